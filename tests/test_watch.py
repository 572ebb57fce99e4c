"""Signs of life, and the stacks of ranks that give none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdino_lab import settings as settings_module, watch
from gdino_lab.commands.main import composed
from gdino_lab.run_folder import RunFolder, new_run_folder

HANGING = """
import sys, threading, time
from pathlib import Path
from gdino_lab.run_folder import RunFolder
from gdino_lab.watch import Heart

def stuck_here():
    time.sleep(600)

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
heart = Heart(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
heart.beat("train", 5)
print("hangs", flush=True)
stuck_here()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder(str(tmp_path / "run"), "anomaly", "synthetic_loco")


def settings(minutes: float) -> dict:
    return settings_module.as_dict(composed(f"train.hang_minutes={minutes}"))


def beat(folder: RunFolder, rank: int, **changes) -> None:
    values = {"time": time.time(), "doing": "train", "step": 3, "pid": os.getpid(), "host": watch.socket.gethostname()}
    watch.write_json(watch.beat_path(folder, rank), values | changes)


def test_silence_is_measured_against_the_patience_asked_for(folder):
    looking = watch.Watch(folder, settings(10))
    beat(folder, 0)
    beat(folder, 1)
    beats = looking.beats()
    now = time.time()
    assert list(beats) == [0, 1]
    assert looking.silent(beats, now + 599) == 0 and looking.silent(beats, now + 602) > 600
    assert watch.Watch(folder, settings(0)).silent(beats, now + 10**9) == 0
    # A start may take its time, whatever the patience.
    beat(folder, 0, doing=watch.STARTING)
    looking = watch.Watch(folder, settings(0.1))
    looking.started -= 10
    starting = {0: looking.beats()[0]}
    assert looking.silent(starting, now + 100) == 0 and looking.silent(starting, now + 1000) > 0


def test_only_ranks_of_this_run_that_live_here_count(folder):
    beat(folder, 0, time=time.time() - 100)  # of an earlier try
    looking = watch.Watch(folder, settings(1))
    beat(folder, 1, host="another")
    beat(folder, 2, pid=2**22 + 1)
    beat(folder, 3)
    (folder.path / "ranks" / "rank_4.beat").write_text("{")
    assert list(looking.beats()) == [3]


def test_readings_are_those_before_a_rank_went(folder):
    looking = watch.Watch(folder, settings(1))
    looking.start()
    looking.sample([os.getpid()])
    kept = list(looking.hosts)
    looking.sample([])
    assert list(looking.hosts) == kept
    assert looking.readings().host is kept[0]


@pytest.mark.slow
def test_hanging_rank_is_asked_for_its_stack_and_killed(folder):
    """In a process of its own; the thread that merely waits is not what is shown."""
    looking, reported = watch.Watch(folder, settings(0.001)), []
    looking.report = lambda: reported.append(folder.failures()[0]["kind"])
    ranks = [
        subprocess.Popen([sys.executable, "-c", HANGING, str(folder.path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout.readline() == "hangs\n"
        rank.stdout.close()
    with looking:
        assert [rank.wait(timeout=30) for rank in ranks] == [-9, -9]
    (failure,) = folder.failures()
    assert failure["kind"] == "hang" and reported == ["hang"]
    for shown in failure["figures"]["ranks"].values():
        assert shown["step"] == 5 and shown["doing"] == "train" and "stuck_here (<string>:8)" in shown["stack"][0]
    assert "rank 0 stands in stuck_here" in failure["cause"] and "rank 1 stands in stuck_here" in failure["cause"]


def test_the_rank_that_others_wait_for_is_named(folder):
    beats = {rank: {"doing": "train", "step": 4, "time": 100.0 + rank} for rank in range(3)}
    waits = ["all_reduce (/x/torch/distributed/distributed_c10d.py:3)", "mean_count (trainer.py:1)"]
    reads = ["poll (selectors.py:3)", "_try_get_data (/x/torch/utils/data/dataloader.py:9)"]
    with_workers = settings_module.as_dict(composed("train.workers=2", "train.hang_minutes=5"))
    blamed, found = watch.diagnose_hang(beats, {0: waits, 1: waits, 2: reads}, 301.0, 402.0, with_workers)
    assert (blamed, found.kind, found.to_try) == (2, "hang", "train.workers=0")
    assert found.figures["ranks"]["0"]["silent_seconds"] == 302.0
    blamed, found = watch.diagnose_hang(beats, {0: waits, 1: waits, 2: waits}, 301.0, 402.0, with_workers)
    assert (blamed, found.to_try) == (0, "train.hang_minutes=10 if it was only slow")
    assert "a place it could not name" in watch.diagnose_hang(beats, {0: [], 1: waits, 2: waits}, 1.0, 2.0, with_workers)[1].cause


def test_beats_are_cheap_and_end_with_the_rank(folder):
    before = list((folder.path / "ranks").iterdir())
    heart = watch.Heart(folder, 0)
    path = watch.beat_path(folder, 0)
    assert json.loads(path.read_text())["doing"] == watch.STARTING
    heart.beat("a longer name", 123456)
    heart.beat("train", 2)
    beat = json.loads(path.read_text())
    assert (beat["doing"], beat["step"], beat["pid"]) == ("train", 2, os.getpid())
    start = time.perf_counter()
    for step in range(1000):
        heart.beat("train", step)
    assert time.perf_counter() - start < 1
    heart.stop()
    assert list((folder.path / "ranks").iterdir()) == before
