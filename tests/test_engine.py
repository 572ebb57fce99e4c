"""DeepSpeed's known mistakes, and that ours is not to make them: real engines on CPU, one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import run

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
from gdino_lab.commands.main import composed
from gdino_lab.engine import backward_and_step, build_engine, start_distributed, step_report, whole_weights
from gdino_lab.plan import make_plan
from tests.conftest import become_a_lone_rank

become_a_lone_rank()
start_distributed("cpu")


def engine_of(zero, autocast, clip=0.0, accumulation=1, lr=0.1):
    found = composed(f"zero=stage{zero}", "train.micro_batch=1", f"train.effective_batch={accumulation}", "schedule=constant")
    found.precision.autocast, found.train.clip_norm = autocast, clip
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    plan = make_plan(found, 1000, 1)
    plan.deepspeed["zero_allow_untested_optimizer"] = True
    return build_engine(module, optimizer, "constant", plan)


found = {}
"""


def results(body: str, tmp_path: Path) -> dict:
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT + body + "\nprint('RESULT', json.dumps(found))\n")
    root = str(Path(__file__).parents[1])
    ended = run([sys.executable, str(script)], tmp_path, PYTHONPATH=root).assert_done()
    return json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])


def test_fp16_autocast_recovers_from_an_overflow_and_clips_unscaled_gradients(tmp_path: Path):
    found = results(
        """
for stage in range(4):
    engine = engine_of(stage, "fp16", clip=1e-3)
    ones = torch.ones(1, 4)
    scales, overflowed = [step_report(engine)["loss_scale"]], []
    for factor in (1e36, 1e36, 1.0):  # two overflows, then an ordinary loss
        overflowed.append(backward_and_step(engine, engine(ones).float().sum() * factor))
        scales.append(step_report(engine)["loss_scale"])
    before = whole_weights(engine)["weight"].clone()
    backward_and_step(engine, engine(ones).float().sum())
    moved = (whole_weights(engine)["weight"] - before).norm().item()
    report = step_report(engine)
    found[stage] = [scales, overflowed, report["skipped_steps"], engine.lr_scheduler.last_epoch, moved, report.get("grad_norm")]
""",
        tmp_path,
    )
    assert len(found) == 4
    for scales, overflowed, skipped, scheduled, moved, norm in found.values():
        assert scales == [65536.0, 32768.0, 16384.0, 16384.0]
        assert overflowed == [True, True, False] and (skipped, scheduled) == (2, 2)
        # Gradient of the sum is one for each of 4 weights and the bias, norm sqrt(5), clipped to 1e-3; lr 0.1.
        assert moved == pytest.approx(0.1 * 1e-3 * 2 / 5**0.5, rel=0.02)
        assert norm is None or norm == pytest.approx(5**0.5, rel=0.01)  # DeepSpeed tells none at stage 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_add_up_to_the_batch(stage: int, tmp_path: Path):
    found = results(
        f"""
stage = {stage}
"""
        + """
inputs = torch.randn(4, 4)
engine = engine_of(stage, None, accumulation=4)
for row in inputs:
    backward_and_step(engine, engine(row[None]).square().mean())
found["accumulated"] = whole_weights(engine)["weight"].tolist()
torch.manual_seed(0)
plain = torch.nn.Linear(4, 1)
plain(inputs).square().mean().backward()
found["plain"] = (plain.weight - 0.1 * plain.weight.grad).tolist()
found["steps"] = engine.global_steps
""",
        tmp_path,
    )
    assert found["steps"] == 1
    assert found["accumulated"][0] == pytest.approx(found["plain"][0], rel=1e-6)
