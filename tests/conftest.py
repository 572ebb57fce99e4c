"""What several tests share: a small set, and running the program as a person does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# A set drawn in a second and a model input seen in milliseconds.
SMALL = [
    "data.canvas=[48,64]",
    "data.image_size=[64,96]",
    "data.counts={train: 16, validation: 4, test_good: 4, test_logical: 4, test_structural: 4}",
    "task.part_kinds=3",
    "tracker=none",
    "train.log_every=1",
    "train.micro_batch=2",
    "train.effective_batch=4",
]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def assert_done(self) -> "Ended":
        assert self.code == 0, self.out + self.err
        return self


def environment() -> dict[str, str]:
    """This process's, without what a launcher around the tests or a command called in them would add, and offline."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def become_a_lone_rank() -> None:
    """Tell this process what a launcher would tell the only rank of a run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def run(command: list[str], folder: Path, timeout: float = 240, **extra: str) -> Ended:
    done = subprocess.run(
        command, cwd=folder, env=environment() | extra, capture_output=True, text=True, timeout=timeout
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("set")


@pytest.fixture
def gdino(tmp_path: Path, small_set: Path):
    """Call `gdino-lab` in `tmp_path` on the small set, in a process of its own."""

    def call(command: str, *words: str, **options) -> Ended:
        overrides = [*SMALL, f"data.root={small_set}"] if command == "train" else []
        return run([sys.executable, "-m", "gdino_lab", command, *overrides, *words], tmp_path, **options)

    return call


def read_json(path: Path):
    return json.loads(path.read_text())


def read_metrics(folder: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shared_memory():
    """DeepSpeed's CPU all-reduce leaves 69 MB files in /dev/shm; ours must leave none."""
    shared = Path("/dev/shm")
    before = set(shared.glob("deepspeed_*")) if shared.is_dir() else set()
    yield
    after = set(shared.glob("deepspeed_*")) if shared.is_dir() else set()
    assert after <= before, f"left in /dev/shm: {sorted(after - before)}"
