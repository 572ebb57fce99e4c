"""A resume is the run that was never stopped, to the bit; elsewhere to rounding; and what is damaged is told."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from safetensors.torch import load_file

from gdino_lab import checkpoint
from gdino_lab.checkpoint import Damaged, Stored
from tests.conftest import SMALL, run

COMMON = [word for word in SMALL if not word.startswith("train.")]
RANKS = {
    1: ["train.micro_batch=2", "train.effective_batch=2"],
    2: ["hardware=cpu_dual", "train.micro_batch=1", "train.effective_batch=2"],
}
CELLS = [
    [f"zero=stage{stage}", f"offload={offload}", f"precision={precision}"]
    for stage in range(4)
    for offload in ("none", "optimizer", "optimizer_and_params")[: (1, 2, 2, 3)[stage]]
    for precision in ("fp32", "bf16", "bf16_autocast")
]
# In turn, so that each meets many cells.
TURNS = [
    ["tuning=full"],
    ["tuning=lora", "train.ema_decay=0.9"],
    ["tuning=full", "train.ema_decay=0.9", "activations=recompute"],
    ["tuning=frozen"],
    ["tuning=full", "train.effective_batch=4"],
]
HERE = Path(__file__).parent


def results(cases: list[dict], folder: Path, ranks: int) -> list[list[dict]]:
    """What resumed.py found, by rank."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *(launcher if ranks == 2 else []), str(HERE / "resumed.py"), "out.json", json.dumps(cases)]
    run(command, folder, timeout=600, PYTHONPATH=str(HERE.parent)).assert_done()
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, small_set: Path, ranks: int):
    """Losses, weights, optimizer states, averages and random generators, in every cell that a CPU can train."""
    cases = [
        {
            "words": [*COMMON, f"data.root={small_set}", *RANKS[ranks], *cell, *TURNS[(number + ranks) % len(TURNS)]],
            "words_after": [],
            "folder": str(tmp_path / str(number)),
        }
        for number, cell in enumerate(CELLS)
        if ranks == 1 or number % 2  # a rank of two takes twice as long; the rows of CELLS come in threes, so all are met
    ]
    for shares in zip(*results(cases, tmp_path, ranks), cases, strict=True):
        *found, case = shares
        for result in found:
            assert not result["stored"], (case, result["stored"][:3])
            assert result["went_on"] == result["resumed"], case
            assert not result["ended"], (case, result["ended"][:3])
            assert result["counted"] == [4, 8 if "train.effective_batch=4" in case["words"] else 4]
        assert len(set(found[0]["before"] + found[0]["went_on"])) == 4  # it moves, so the test could fail
        assert {"weight", "state/exp_avg", "state/exp_avg_sq", "scalar/step"} <= set(found[0]["kinds"])
        assert ("average" in found[0]["kinds"]) == ("train.ema_decay=0.9" in case["words"])


# From, to, and how far apart losses may be: rounding alone where the precision stays.
PRECISION = "train.resume_allow=[precision]"
ELSEWHERE = [
    (["zero=stage0"], ["zero=stage2", "offload=optimizer"], 1e-5),
    (["zero=stage0", "train.ema_decay=0.9"], ["zero=stage3", "offload=optimizer_and_params", "activations=recompute"], 1e-5),
    (["zero=stage3", "train.ema_decay=0.9"], ["zero=stage0"], 1e-5),
    (["zero=stage3", "offload=optimizer"], ["zero=stage1", "offload=none", "train.micro_batch=1"], 1e-5),
    (["zero=stage2", "precision=bf16"], ["zero=stage3"], 1e-3),
    (["zero=stage0"], ["precision=bf16", PRECISION], 0.05),
    (["zero=stage2", "precision=bf16"], ["precision=fp32", "zero=stage0", PRECISION], 0.05),
]


def near(one: list[float], other: list[float], tolerance: float) -> bool:
    return all(abs(a / b - 1) <= tolerance for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_on_another_stage_offload_or_precision_the_trajectory_stays(tmp_path: Path, small_set: Path):
    cases = [
        {
            "words": [*COMMON, f"data.root={small_set}", *RANKS[1], *before],
            "words_after": after,
            "folder": str(tmp_path / str(number)),
        }
        for number, (before, after, _) in enumerate(ELSEWHERE)
    ]
    (found,) = results(cases, tmp_path, 1)
    for (before, after, tolerance), result in zip(ELSEWHERE, found, strict=True):
        assert near(result["went_on"], result["resumed"], tolerance), (before, after, result["went_on"], result["resumed"])


@pytest.mark.slow
def test_on_another_number_of_ranks_the_trajectory_stays(tmp_path: Path, small_set: Path):
    """2 -> 1, and 1 -> 2, at the same effective batch, each also changing the stage."""
    stages = [("zero=stage2", "zero=stage3"), ("zero=stage3", "zero=stage0")]

    def cases(ranks: int, name: str, words: bool) -> list[dict]:
        return [
            {
                name: [*COMMON, f"data.root={small_set}", *RANKS[ranks], pair[not words], "train.ema_decay=0.9"],
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


# --- files ------------------------------------------------------------------------------------------------------------


def made(folder: Path, step: int = 1, keep: int = 9, best: bool = False) -> Path:
    """A checkpoint of two ranks without an engine."""
    partial = folder / f".{checkpoint.name_of(step)}.partial"
    partial.mkdir(parents=True)
    checkpoint.write_share(partial, 1, {"weight:b:4": torch.arange(4.0) + step}, None)
    checkpoint.write_share(partial, 0, {"weight:b:0": torch.arange(4.0), "state/m:b:0": torch.ones(4)}, {"progressed": {"step": step}})
    checkpoint.commit(partial, folder, step, 2, best, keep)
    return checkpoint.written(folder)[0]


def test_links_point_to_whole_folders_and_old_ones_go(tmp_path: Path):
    for step in range(1, 7):
        made(tmp_path, step, keep=2, best=step == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best", "last", "step_00000002", "step_00000005", "step_00000006",
    ]  # fmt: skip
    assert (tmp_path / "last").resolve().name == "step_00000006"
    assert (tmp_path / "best").resolve().name == "step_00000002"


def test_a_step_taken_again_gets_a_folder_of_its_own(tmp_path: Path):
    first, again = made(tmp_path, 3, best=True), made(tmp_path, 3)
    assert first != again and checkpoint.written(tmp_path) == [again, first]
    assert (tmp_path / "best").resolve() == first.resolve()


def test_parts_of_ranks_are_put_together(tmp_path: Path):
    with Stored(made(tmp_path)) as stored:
        assert stored.read("weight", "b", 0, 8).tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        assert stored.read("weight", "b", 3, 3).tolist() == [3, 1, 2]
        assert stored.kinds("b") == {"weight", "state/m"}
        with pytest.raises(KeyError, match="state/m of b from element 4 to 6"):
            stored.read("state/m", "b", 2, 4)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json: cannot be read"),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json: is missing"),
        (lambda path: (path / "state_1.safetensors").unlink(), "state_1.safetensors: is missing"),
        (lambda path: (path / "trainer.json").write_text("{}"), "trainer.json: has 2 bytes, the manifest says"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, harm, said: str):
    path = made(tmp_path)
    checkpoint.verify(path)
    harm(path)
    with pytest.raises(Damaged, match=said):
        checkpoint.verify(path)


@given(st.data())
@hypothesis_settings(max_examples=30, deadline=None)
def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("harmed")
    path = made(folder)
    file = path / data.draw(st.sampled_from(["state_0.safetensors", "state_1.safetensors", "trainer.json"]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    file.write_bytes(content)
    with pytest.raises(Damaged, match=file.name):
        checkpoint.verify(path)
    shutil.rmtree(folder)


DTYPES = list(checkpoint.DTYPES)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 50)), max_size=8))
@hypothesis_settings(max_examples=40, deadline=None)
def test_any_tensors_are_read_back_by_safetensors(tmp_path_factory: pytest.TempPathFactory, shapes: list):
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    tensors = {f"kind:{number}:0": (torch.randn(size) * 9).to(dtype) for number, (dtype, size) in enumerate(shapes)}
    entry = checkpoint.write_tensors(path, tensors)
    assert entry["bytes"] == path.stat().st_size
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_large_and_small_parts_are_written_as_they_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK", 64)
    parts = [bytes([number % 251]) * number for number in (1, 3, 200, 2, 64, 63, 5, 129)]
    entry = checkpoint.write_bytes(tmp_path / "file", [memoryview(part) for part in parts])
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert entry["bytes"] == sum(map(len, parts))


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
