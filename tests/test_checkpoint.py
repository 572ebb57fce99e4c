"""A resume is the run that was never stopped, to the bit; on another layout to rounding."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from gdino_lab import checkpoint
from tests.conftest import SMALL, run

COMMON = [word for word in SMALL if not word.startswith("train.")]
DROPOUT = "model.config.dropout=0.1"  # so that the generators matter
RANKS = {
    1: ["train.micro_batch=2", "train.effective_batch=2"],
    2: ["hardware=cpu_dual", "train.micro_batch=1", "train.effective_batch=2"],
}
LAYOUTS = [
    [f"zero=stage{stage}", f"offload={offload}"]
    for stage in range(4)
    for offload in ("none", "optimizer", "optimizer_and_params")[: (1, 2, 2, 3)[stage]]
]
PRECISIONS = ("fp32", "bf16", "bf16_autocast")
# In turn, so that each meets many cells.
TURNS = [
    ["tuning=full"],
    ["tuning=lora", "train.ema_decay=0.9"],
    ["tuning=full", "train.ema_decay=0.9", "activations=recompute"],
    ["tuning=frozen"],
    ["tuning=full", "train.effective_batch=4"],
]
HERE = Path(__file__).parent


def cells(ranks: int) -> list[list[str]]:
    """All that a CPU can train with GDINO_LAB_MATRIX=full; else every layout on one rank, every other one on two, the precisions
    in turn."""
    if os.environ.get("GDINO_LAB_MATRIX") == "full":
        return [[*layout, f"precision={precision}"] for layout in LAYOUTS for precision in PRECISIONS]
    taken = list(enumerate(LAYOUTS))[ranks - 1 :: ranks]
    return [[*layout, f"precision={PRECISIONS[(number + ranks) % 3]}"] for number, layout in taken]


def results(cases: list[dict], folder: Path, ranks: int) -> list[list[dict]]:
    """What resumed.py found, by rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(launcher if ranks == 2 else []), str(HERE / "resumed.py"), "out.json", json.dumps(cases)]
    run(command, folder, timeout=600, PYTHONPATH=str(HERE.parent)).assert_done()
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, small_set: Path, ranks: int):
    """Losses, weights, optimizer states, averages and random generators; from within an epoch, with a score to prove and
    without, and from before the first step, where the optimizer has no states yet."""
    cases = [
        {
            "words": [*COMMON, f"data.root={small_set}", DROPOUT, *RANKS[ranks], *cell, *TURNS[(number + ranks) % len(TURNS)]],
            "words_after": [],
            "folder": str(tmp_path / str(number)),
            "scored": number % 4 == ranks,
            "before": 0 if number % 4 == 0 else 2,
        }
        for number, cell in enumerate(cells(ranks))
    ]
    for shares in zip(*results(cases, tmp_path, ranks), cases, strict=True):
        *found, case = shares
        for result in found:
            assert not result["stored"], (case, result["stored"][:3])
            assert result["went_on"] == result["resumed"], case
            assert not result["ended"], (case, result["ended"][:3])
            steps = case["before"] + 2
            assert result["counted"] == [steps, steps * (2 if "train.effective_batch=4" in case["words"] else 1)]
        assert len(set(found[0]["before"] + found[0]["went_on"])) == steps  # it moves, so the test could fail
        states = {"state/exp_avg", "state/exp_avg_sq", "scalar/step"} & set(found[0]["kinds"])
        assert len(states) == (3 if case["before"] else 0)
        assert ("average" in found[0]["kinds"]) == ("train.ema_decay=0.9" in case["words"])


# From, to, and how far apart losses may be: rounding alone where the precision stays.
PRECISION = "train.resume_allow=[precision]"
# After one step of two passes an engine of four would be amid a step, if it went on counting passes.
FOUR_IMAGES = "train.effective_batch=4"
BF16_ROUNDING = 2.0**-9
ELSEWHERE = [
    (["zero=stage0"], ["zero=stage2", "offload=optimizer"], 1e-5),
    (["zero=stage0", "train.ema_decay=0.9"], ["zero=stage3", "offload=optimizer_and_params", "activations=recompute"], 1e-5),
    (["zero=stage3", "train.ema_decay=0.9", FOUR_IMAGES], ["zero=stage1", "offload=none", "train.micro_batch=1"], 1e-5),
    (["zero=stage2", "precision=bf16"], ["zero=stage3"], BF16_ROUNDING),  # linear layers round once more there
    (["zero=stage0"], ["precision=bf16", PRECISION], 0.05),
    (["zero=stage2", "precision=bf16"], ["precision=fp32", "zero=stage0", PRECISION], 0.05),
]


def near(one: list[float], other: list[float], tolerance: float) -> bool:
    return all(abs(a / b - 1) <= tolerance for a, b in zip(one, other, strict=True))


@pytest.mark.thorough
@pytest.mark.slow
def test_on_another_stage_offload_or_precision_the_trajectory_stays(tmp_path: Path, small_set: Path):
    cases = [
        {
            "words": [*COMMON, f"data.root={small_set}", *RANKS[1], *before],
            "words_after": after,
            "before": 1 if FOUR_IMAGES in before else 2,
            "folder": str(tmp_path / str(number)),
        }
        for number, (before, after, _) in enumerate(ELSEWHERE)
    ]
    (found,) = results(cases, tmp_path, 1)
    for (before, after, tolerance), result in zip(ELSEWHERE, found, strict=True):
        assert near(result["went_on"], result["resumed"], tolerance), (before, after, result["went_on"], result["resumed"])


@pytest.mark.thorough
@pytest.mark.slow
def test_on_another_number_of_ranks_the_trajectory_stays(tmp_path: Path, small_set: Path):
    """2 -> 1, and 1 -> 2, at the same effective batch, each also changing the stage, and the passes of a step."""
    stages = [("zero=stage3", "zero=stage0")]

    def cases(ranks: int, name: str, words: bool) -> list[dict]:
        return [
            {
                name: [
                    *COMMON, f"data.root={small_set}", *RANKS[ranks], "train.micro_batch=1", FOUR_IMAGES, pair[not words],
                    "train.ema_decay=0.9",
                ],  # fmt: skip
                "before": 1,
                "words_after" if words else "words": None,
                "folder": str(tmp_path / f"{ranks if words else 3 - ranks}_{number}"),
            }
            for number, pair in enumerate(stages)
        ]

    for ranks in (2, 1):
        (first, *_) = results(cases(ranks, "words", True), tmp_path, ranks)
        (second, *_) = results(cases(3 - ranks, "words_after", False), tmp_path, 3 - ranks)
        for pair, before, after in zip(stages, first, second, strict=True):
            assert near(before["went_on"], after["resumed"], 1e-5), (ranks, pair, before["went_on"], after["resumed"])


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.integers(1, 60))))
def test_copies_on_the_host_are_equal_and_lie_in_few_blocks(kinds: list[tuple[torch.dtype, int]]):
    values = [torch.randint(0, 2, (size,)).to(dtype) for dtype, size in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK", 480)
        copies = checkpoint.copies_on_host(values)
    assert all(torch.equal(copy, tensor) and copy.dtype == tensor.dtype for copy, tensor in zip(copies, values, strict=True))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in copies}
    assert addresses.isdisjoint(tensor.data_ptr() for tensor in values)
    held = sum(tensor.nbytes for tensor in values)  # two blocks in a row hold more than one may
    assert len(addresses) <= 2 * (held // 481) + len({tensor.dtype for tensor in values})


def test_random_generators_come_back(tmp_path: Path):
    import random

    import numpy as np

    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    state = {name: tensor.clone() for name, tensor in checkpoint.random_state().items()}
    first = drawn()
    drawn()
    checkpoint.restore_random_state(state)
    assert drawn() == first
