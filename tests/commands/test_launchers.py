"""Ranks that another launcher started: the same run folder, one, whatever their number."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL, environment, read_json, read_metrics, run

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent


def words(small_set: Path) -> list[str]:
    return ["train", "hardware=cpu_dual", *SMALL, f"data.root={small_set}", "train.max_steps=3"]


def assert_one_whole_run(place: Path) -> None:
    (folder,) = (place / "outputs" / "runs").glob("*/*")
    assert read_json(folder / "status.json") == {"state": "completed"}
    assert read_json(folder / "plan.json")["world_size"] == 2
    assert [row["step"] for row in read_metrics(folder, "step")] == [1, 2, 3]
    assert {path.name for path in (folder / "ranks").iterdir()} == {"rank_0.log", "rank_1.log"}


@pytest.mark.parametrize(
    "launcher",
    [
        ["accelerate", "launch", "--num_processes", "2", "--cpu", "-m", "gdino_lab"],
        ["torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "gdino_lab"],
        ["deepspeed", "--num_accelerators", "2", "--module", "gdino_lab"],
    ],
    ids=lambda launcher: launcher[0],
)
def test_launcher_gives_one_run_folder(launcher: list[str], tmp_path: Path, small_set: Path):
    program, *options = launcher
    extra = {"MASTER_PORT": str(free_port())} if program == "deepspeed" else {}
    run([str(BIN / program), *options, *words(small_set)], tmp_path, **extra).assert_done()
    assert_one_whole_run(tmp_path)


def test_srun_gives_one_run_folder(tmp_path: Path, small_set: Path):
    """srun starts processes and describes them in its own variables; no srun is needed for that."""
    common = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "gdino_lab", *words(small_set)], cwd=tmp_path,
            env=environment() | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(said)
    assert_one_whole_run(tmp_path)


def test_refusal_under_a_launcher_ends_all_ranks(tmp_path: Path, small_set: Path):
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "gdino_lab"]
    ended = run([str(BIN / "torchrun"), *options, *words(small_set), "train.effective_batch=5"], tmp_path)
    assert ended.code != 0
    assert ended.err.count("train.effective_batch=5 is not a multiple") == 1
    assert not (tmp_path / "outputs").exists()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
