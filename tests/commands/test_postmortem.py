"""Deaths provoked in a run: what status.json says of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL, Ended, read_json, read_metrics, run

pytestmark = pytest.mark.slow

SABOTAGED = """
import os, sys, time
import torch
import gdino_lab.trainer as trainer
from gdino_lab.commands.main import main

honest = trainer.mean_count

def never_comes_back():
    time.sleep(600)

def sabotaged(run, passes):
    if os.environ["RANK"] == "{rank}" and run.engine.global_steps == 1:
        {deed}
    return honest(run, passes)

trainer.mean_count = sabotaged  # spawned ranks import this file, so they get it too
if __name__ == "__main__":
    sys.exit(main())
"""


def die(tmp_path: Path, small_set: Path, rank: int, deed: str, *words: str) -> tuple[Ended, dict]:
    """A run in which `rank` does `deed` in the second step, and its status."""
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(rank=rank, deed=deed))
    command = [sys.executable, str(script), "train", *SMALL, f"data.root={small_set}", "train.max_steps=3", "run_dir=run"]
    ended = run([*command, *words], tmp_path, PYTHONPATH=str(Path.cwd()))
    return ended, read_json(tmp_path / "run" / "status.json")


def test_out_of_memory(tmp_path: Path, small_set: Path):
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is free. "
        "Process 1234 has 10.00 GiB memory in use. Of the allocated memory 66.06 GiB is allocated by PyTorch, and 1.12 GiB is "
        "reserved by PyTorch but unallocated."
    )
    ended, status = die(tmp_path, small_set, 0, f"raise torch.OutOfMemoryError({message!r})", "activations=recompute")
    assert ended.code == 3, ended.out + ended.err
    assert (status["state"], status["kind"]) == ("out_of_memory", "out_of_memory")
    assert status["figures"]["asked_bytes"] == 2 * 2**30 and status["figures"]["others"] == [{"pid": 1234, "bytes": 10 * 2**30}]
    assert status["to_try"] == "train.micro_batch=1" and status["to_try"] in ended.err


def test_loss_that_is_not_finite_names_the_module(tmp_path: Path, small_set: Path):
    deed = "run.engine.module.get_submodule('heads.evidence.0').weight.data[0] = float('nan')"
    ended, status = die(tmp_path, small_set, 1, deed, "hardware=cpu_dual", "optimizer.lr=1e-4", "train.log_every=10")
    assert ended.code == 1, ended.out + ended.err
    assert (status["state"], status["kind"]) == ("failed", "not_finite") and status["where"].startswith("rank 1")
    figures = status["figures"]
    assert (figures["module"], figures["type"], figures["step"]) == ("heads.evidence.0", "Linear", 2)
    assert figures["weights_finite"] is False and figures["nan"] > 0 and figures["terms"]
    assert "heads.evidence.0" in ended.err and status["to_try"] == "optimizer.lr=1e-05"


def test_hang_shows_where_every_rank_stands(tmp_path: Path, small_set: Path):
    ended, status = die(tmp_path, small_set, 1, "never_comes_back()", "hardware=cpu_dual", "train.hang_minutes=0.2")
    assert ended.code == 1, ended.out + ended.err
    assert (status["state"], status["kind"]) == ("failed", "hang") and status["where"].startswith("rank 1")
    ranks = status["figures"]["ranks"]
    assert "never_comes_back" in ranks["1"]["stack"][0] and "sabotaged" in ranks["1"]["stack"][1]
    assert "all_reduce" in ranks["0"]["stack"][0]
    assert all((shown["doing"], shown["step"]) == ("train", 2) and shown["silent_seconds"] > 12 for shown in ranks.values())
    assert "rank 1 stands in never_comes_back" in status["cause"]
    assert len(read_metrics(tmp_path / "run", "step")) == 1
