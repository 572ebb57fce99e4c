"""Is a run still alive? Each rank writes down that it goes on; a thread beside them looks, and keeps the last readings."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from gdino_lab.machine.host import Host, read_host, read_memlock, read_oom_kills, read_shared
from gdino_lab.machine.readings import Readings, kills_since
from gdino_lab.postmortem import HANG, Diagnosis, communicates, hang_cure
from gdino_lab.run_folder import RunFolder, write_json

ASK = signal.SIGUSR2
STARTING = "starting"
# Importing, meeting the other ranks and fetching a model may take their time whatever the patience later.
STARTING_SECONDS = 600
BEAT_BYTES = 512
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 2.0
# Readings kept: of the last seconds, the one with the least memory left is what a killed rank died in.
READINGS = 10
FRAMES = 12


class Heart:
    """Of one rank: writes what it does to ranks/rank_N.beat, and its stack to ranks/rank_N.stack when asked to."""

    def __init__(self, folder: RunFolder, rank: int):
        self.path = beat_path(folder, rank)
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.stack = stack_path(folder, rank).open("w")
        faulthandler.register(ASK, self.stack, all_threads=True)
        self.beat(STARTING)

    def beat(self, doing: str, step: int = 0) -> None:
        """`doing`: train, evaluate, ...; `step`: the optimizer step under way. Some microseconds: one write in place."""
        beat = {"time": time.time(), "doing": doing, "step": step, "pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self.file, json.dumps(beat).ljust(BEAT_BYTES).encode(), 0)

    def stop(self) -> None:
        faulthandler.unregister(ASK)
        os.close(self.file)
        self.stack.close()
        self.path.unlink(missing_ok=True)
        Path(self.stack.name).unlink(missing_ok=True)


class Watch(Thread):
    """Beside the ranks of this machine: keeps memory readings, ends a run that does not go on.

    Args:
        settings: of the run, as plain data; a silence of `train.hang_minutes` is a hang, 0: never.
        report: called when a hang is written down, before the ranks are killed.
    """

    def __init__(self, folder: RunFolder, settings: dict[str, Any], report: Callable[[], Any] = lambda: None):
        super().__init__(daemon=True)
        self.folder, self.settings, self.report = folder, settings, report
        self.patience = 60 * settings["train"]["hang_minutes"]
        self.started = time.time()
        self.oom_kills = read_oom_kills()
        self.hosts: deque[Host] = deque(maxlen=READINGS)
        self.shared: deque[tuple[int, int]] = deque(maxlen=READINGS)
        self.ranks: set[int] = set()
        self.over = Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(LOOK_SECONDS):
            beats = self.beats()
            with suppress(psutil.Error, OSError):
                self.sample([beat["pid"] for beat in beats.values()])
            if silent := self.silent(beats, time.time()):
                self.end(beats, silent)
                return

    def sample(self, ranks: list[int]) -> None:
        """Keep memory readings, until a rank has gone and with it what it had used up."""
        if not self.ranks <= set(ranks):
            return
        self.ranks = set(ranks)
        self.hosts.append(read_host(ranks))
        if (shared := read_shared()) is not None:
            self.shared.append(shared)

    def beats(self) -> dict[int, dict[str, Any]]:
        """The last sign of life of each rank of this run and this machine that has not ended."""
        found = {}
        for path in (self.folder.path / "ranks").glob("rank_*.beat"):
            with suppress(OSError, ValueError):
                beat = json.loads(path.read_text())
                if beat["time"] >= self.started and beat["host"] == socket.gethostname() and psutil.pid_exists(beat["pid"]):
                    found[int(path.stem.removeprefix("rank_"))] = beat
        return dict(sorted(found.items()))

    def silent(self, beats: dict[int, dict[str, Any]], now: float) -> float:
        """Seconds of the longest silence, if that is too long; else 0."""
        if not self.patience:
            return 0.0
        for beat in beats.values():
            seconds = now - beat["time"]
            if seconds > (max(self.patience, STARTING_SECONDS) if beat["doing"] == STARTING else self.patience):
                return seconds
        return 0.0

    def end(self, beats: dict[int, dict[str, Any]], seconds: float) -> None:
        """Ask each rank where it stands, write that down as the failure, and kill them all."""
        for beat in beats.values():
            with suppress(ProcessLookupError):
                os.kill(beat["pid"], ASK)
        time.sleep(ANSWER_SECONDS)
        stacks = {rank: read_stack(stack_path(self.folder, rank)) for rank in beats}
        blamed, diagnosis = diagnose_hang(beats, stacks, seconds, time.time(), self.settings)
        write_json(
            self.folder.rank_failure(blamed),
            # When the silence began: what the killing below makes ranks say comes after it.
            {"time": time.time() - seconds, "rank": blamed, "traceback": None} | diagnosis.as_dict(),
        )
        self.report()
        trees = [psutil.Process(beat["pid"]) for beat in beats.values() if psutil.pid_exists(beat["pid"])]
        for tree in trees:
            with suppress(psutil.Error):
                children = tree.children(recursive=True)
                tree.kill()
                for child in children:
                    with suppress(psutil.Error):
                        child.kill()

    def readings(self) -> Readings:
        """Of the last seconds before a rank went, the worst; ends the watch."""
        self.over.set()
        self.join()
        return Readings(
            min(self.hosts, key=Host.share_left, default=None),
            kills_since(self.oom_kills),
            min(self.shared, key=lambda size: size[1], default=None),
            read_memlock(),
        )


def diagnose_hang(
    beats: dict[int, dict[str, Any]],
    stacks: dict[int, list[str]],
    seconds: float,
    now: float,
    settings: dict[str, Any],
) -> tuple[int, Diagnosis]:
    """The rank that the others wait for, as far as the stacks tell, and what to say. Pure."""
    apart = [rank for rank in beats if stacks[rank] and not communicates(stacks[rank])]
    blamed = min(apart or beats, key=lambda rank: (beats[rank]["step"], beats[rank]["time"]))
    ranks = {
        str(rank): {
            "doing": beat["doing"],
            "step": beat["step"],
            "silent_seconds": round(now - beat["time"], 1),
            "stack": stacks[rank],
        }
        for rank, beat in beats.items()
    }
    places = [
        f"rank {rank} stands in {stacks[rank][0] if stacks[rank] else 'a place it could not name'}"
        f" ({beat['doing']}{', step ' + str(beat['step']) if beat['step'] else ''})"
        for rank, beat in beats.items()
    ]
    cause = f"no progress for {seconds:.0f} s (train.hang_minutes): {'; '.join(places)}"
    return blamed, Diagnosis(HANG, cause, {"ranks": ranks}, hang_cure(stacks[blamed], settings))


def read_stack(path: Path) -> list[str]:
    """The main thread's innermost frames within run_rank, innermost first, as `function (file:line)`; empty where
    nothing was dumped.

    faulthandler writes the threads in turn, the main one last.
    """
    with suppress(OSError):
        thread = re.split(r"^(?:Current thread|Thread) .*$", path.read_text(), flags=re.MULTILINE)[-1]
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, flags=re.MULTILINE)
        ours = list(takewhile(lambda frame: frame[2] != "run_rank", frames))
        return [f"{function} ({file}:{line})" for file, line, function in ours[:FRAMES]]
    return []


def beat_path(folder: RunFolder, rank: int) -> Path:
    return folder.path / "ranks" / f"rank_{rank}.beat"


def stack_path(folder: RunFolder, rank: int) -> Path:
    return folder.path / "ranks" / f"rank_{rank}.stack"
