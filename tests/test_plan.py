"""The plan's arithmetic, and DeepSpeed's configuration as DeepSpeed itself understands it."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdino_lab.commands.main import composed
from gdino_lab.errors import ConfigurationError
from gdino_lab.plan import make_plan


BASE = composed()


@settings(deadline=None)
@given(
    micro=st.integers(1, 8), accumulation=st.integers(1, 8), world=st.integers(1, 8), images=st.integers(1, 2000),
    epochs=st.integers(1, 30), limit=st.none() | st.integers(1, 5000),
)  # fmt: skip
def test_numbers_agree_with_each_other(micro, accumulation, world, images, epochs, limit):
    found = deepcopy(BASE)
    found.train.micro_batch, found.train.effective_batch = micro, micro * accumulation * world
    found.train.epochs, found.train.max_steps = epochs, limit
    if images < found.train.effective_batch:
        with pytest.raises(ConfigurationError, match="more than the"):
            make_plan(found, images, world)
        return
    plan = make_plan(found, images, world)
    assert plan.accumulation == accumulation
    assert plan.steps_per_epoch * plan.effective_batch <= images < (plan.steps_per_epoch + 1) * plan.effective_batch
    assert plan.total_steps == min(epochs * plan.steps_per_epoch, limit or 10**9)
    assert (plan.epochs - 1) * plan.steps_per_epoch < plan.total_steps <= plan.epochs * plan.steps_per_epoch
    assert 0 <= plan.warmup_steps <= plan.total_steps
    assert plan.deepspeed["train_batch_size"] == plan.effective_batch
    assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()


def test_batches_that_do_not_divide_name_the_nearest():
    found = composed("train.micro_batch=2", "train.effective_batch=7")
    with pytest.raises(ConfigurationError, match=r"train.effective_batch=7 is not a multiple.*6 or 8"):
        make_plan(found, 100, 1)
    with pytest.raises(ConfigurationError, match=r"the nearest that is: 8$"):
        make_plan(found, 100, 4)


@pytest.mark.parametrize(
    ("precision", "megabytes", "elements"),
    [("fp32", 50, 12_500_000), ("bf16", 50, 25_000_000), ("bf16_autocast", 5, 1_250_000), ("fp16", 1, 500_000)],
)
def test_buckets_are_megabytes_of_the_communication_dtype(precision, megabytes, elements):
    words = [f"precision={precision}", f"bucket={megabytes}mb", "zero=stage3", "hardware=h200_single"]
    zero = make_plan(composed(*words), 720, 1).deepspeed["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] == elements


def test_every_derived_number_says_where_it_came_from():
    plan = make_plan(composed("train.max_steps=3", "train.micro_batch=4"), 100, 2)
    assert "cut by train.max_steps=3" in plan.origin["total_steps"]
    assert all(f"{name} = {getattr(plan, name)}" in line for name, line in zip(plan.origin, plan.lines(), strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16_autocast", "fp16", "fp16_autocast"])
def test_deepspeed_accepts_every_cell(stage, precision):
    from deepspeed.runtime.config import DeepSpeedConfig

    if stage == 0 and precision in ("bf16", "fp16"):
        pytest.skip("refused: DeepSpeed trains it wrongly")
    offload = {0: "none", 3: "optimizer_and_params"}.get(stage, "optimizer")
    words = ["hardware=h200_single", f"zero=stage{stage}", f"precision={precision}", f"offload={offload}"]
    plan = make_plan(composed(*words), 720, 1)
    understood = DeepSpeedConfig(dict(plan.deepspeed))
    assert understood.zero_optimization_stage == stage
    assert understood.gradient_accumulation_steps == plan.accumulation
    assert understood.bfloat16_config.enabled == (precision == "bf16")
    assert understood.float16_config.enabled == (precision == "fp16")
