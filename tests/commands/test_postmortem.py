"""Deaths provoked in a run: what status.json says of each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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


def die(
    tmp_path: Path, small_set: Path, rank: int, deed: str, *words: str, within: Sequence[str] = ()
) -> tuple[Ended, dict]:
    """A run in which `rank` does `deed` in the second step, and its status; `within`: a command that starts another."""
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(rank=rank, deed=deed))
    command = [sys.executable, str(script), "train", *SMALL, f"data.root={small_set}", "train.max_steps=3", "run_dir=run"]
    ended = run([*within, *command, *words], tmp_path, PYTHONPATH=str(Path.cwd()))
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


# --- memory that is really used up ---


def shared_memory_of(size: str) -> list[str]:
    """A command that runs another with a /dev/shm of its own of that size."""
    return ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"']


def needs_a_shared_memory_of_its_own() -> None:
    try:
        tried = subprocess.run([*shared_memory_of("64k"), "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if tried.returncode:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")


@pytest.mark.parametrize("size", [pytest.param("64k", marks=pytest.mark.thorough), "512k"], ids=["semaphores", "images"])
def test_full_shared_memory(tmp_path: Path, small_set: Path, size: str):
    """What a container with docker's 64 MB meets with images of the usual size. That it ends at all shows, too, that no
    data process stays behind: it would hold the pipes that this test reads."""
    needs_a_shared_memory_of_its_own()
    words = ["train.workers=1", "data.image_size=[256,384]"]
    ended, status = die(tmp_path, small_set, 0, "pass", *words, within=shared_memory_of(size))
    assert ended.code == 3, ended.out + ended.err
    assert (status["state"], status["kind"]) == ("out_of_memory", "shared_memory"), status
    assert status["figures"]["shm_total_bytes"] == int(size[:-1]) * 2**10
    assert 0 <= status["figures"]["shm_free_bytes"] <= status["figures"]["shm_total_bytes"]
    assert "No space left on device" in status["cause"] and status["to_try"] == "train.workers=0"


LIMIT = 3 * 2**30


@pytest.fixture
def little_memory() -> Iterator[list[str]]:
    """A command that runs another in a control group with LIMIT bytes of memory, of either version."""
    root = Path("/sys/fs/cgroup")
    group = (root / "memory" if (root / "memory").is_dir() else root) / f"gdino_lab_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        names = [name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()]
        if not names:
            pytest.skip("control groups here do not limit memory")
        (group / names[0]).write_text(str(LIMIT))
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with suppress(OSError):  # where there is swap it would fill first
                (group / name).write_text(str(LIMIT if "memsw" in name else 0))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"']
    finally:
        for _ in range(100):  # what was killed takes a moment to go
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@pytest.mark.thorough
def test_rank_that_the_kernel_ended_for_lack_of_memory(tmp_path: Path, small_set: Path, little_memory: list[str]):
    ended, status = die(tmp_path, small_set, 0, f"torch.ones({LIMIT // 4})", "activations=recompute", within=little_memory)
    assert ended.code == 3, ended.out + ended.err
    assert (status["state"], status["kind"]) == ("out_of_memory", "host_memory"), status
    figures = status["figures"]
    assert (figures["signal"], figures["oom_kills"], figures["container_limit_bytes"]) == (9, 1, LIMIT)
    assert "the kernel ended it for lack of memory" in status["cause"] and "of the container's 3.0 GiB" in status["cause"]
    assert status["to_try"] == "train.micro_batch=1" and status["to_try"] in ended.err
