"""Is a run worth its checkpoints? Killed with SIGKILL at random moments, again and again, it has to come to the same losses.

    python benchmarks/kill_test.py [--kills 100] [--seed N] [--out docs/kill_test.md]

A nano model is trained on a small synthetic set with a checkpoint after every step, half of the kills on one rank, half on
two, both at once. Most kills end the launcher and all ranks, some a single rank only, after which the launcher has to end by
itself. Half of them are sent some milliseconds after a checkpoint began to be written, the others while the run starts or
between steps. Each try goes on from the one before, by train.resume=RUN, and what is said about that is compared with what
lay there. A run that reaches its end is compared with an undisturbed one, bit for bit; the next kills get a run of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import psutil

from gdino_lab import checkpoint_folder
from gdino_lab.checkpoint_folder import Damaged
from gdino_lab.resume import Start, newest_whole

HARDWARE = {1: "cpu", 2: "cpu_dual"}
STEPS_AN_EPOCH, EPOCHS = 16, 6
WORDS = [
    "data.canvas=[48,64]",
    "data.image_size=[64,96]",
    f"data.counts={{train: {4 * STEPS_AN_EPOCH}, validation: 4, test_good: 2, test_logical: 2, test_structural: 2}}",
    "task.part_kinds=3",
    "tracker=none",
    "train.micro_batch=2",
    "train.effective_batch=4",
    "train.log_every=1",
    "train.save_every=1",
    f"train.epochs={EPOCHS}",
]
# Differs from run to run whatever is trained.
MEASURED = ("images_per_s", "memory_gib")
START, STEP, SAVE = "start-up", "steps", "save"
SHARE = {START: 0.2, STEP: 0.3, SAVE: 0.5}
ONE_RANK = 0.3
# Seconds: what a launcher may take after its rank was killed, and what a whole try may take.
ENDS_WITHIN, PATIENCE = 120, 1800


@dataclass
class Kill:
    """One kill and what was found afterwards."""

    ranks: int
    moment: str
    whole: bool
    """Launcher and ranks; otherwise a single rank."""
    half_written: bool
    """Whether it met a checkpoint being written."""
    lost: int | None
    """Steps that metrics.jsonl knows beyond the newest whole checkpoint; None before the first one."""
    resumed: bool = False
    faults: list[str] = field(default_factory=list)


class Series:
    """Kills on a number of ranks.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: Path, ranks: int, kills: int, seed: int):
        self.place, self.ranks, self.wanted = place, ranks, kills
        self.dice = random.Random(f"{seed}/{ranks}")
        self.kills: list[Kill] = []
        self.waiting: list[Kill] = []
        """Kills after which no try has said yet where it goes on."""
        self.faults: list[str] = []
        self.completed = self.alike = 0
        self.start_seconds = 15.0

    def run(self) -> Series:
        undisturbed = self.place / "undisturbed"
        code, said = self.launch(undisturbed).ended(PATIENCE)
        if code != 0:
            raise SystemExit(f"the undisturbed run failed:\n{said}")
        truth = losses(undisturbed)
        while len(self.kills) < self.wanted:
            run = self.place / f"run_{self.completed}"
            while self.one_try(run):
                pass
            self.completed += 1
            self.compare(run, truth)
            shutil.rmtree(run)
        return self

    def launch(self, run: Path) -> Launched:
        resumed = checkpoint_folder.written(run / "checkpoints") if run.exists() else []
        if run.exists() and not resumed:
            shutil.rmtree(run)  # killed before its first checkpoint: nothing to go on from
        words = [f"train.resume={run}"] if resumed else [f"run_dir={run}"]
        return Launched([*WORDS, f"data.root={self.place / 'set'}", f"hardware={HARDWARE[self.ranks]}", *words], self.place)

    def one_try(self, run: Path) -> bool:
        """Start or go on with the run, kill it, look at what is left; False once it is complete."""
        expected = newest_whole(run / "checkpoints")[0] if run.exists() else None
        resumed_at = expected.step if expected else 0  # read now: later steps prune it
        begun = time.monotonic()
        launched = self.launch(run)
        if len(self.kills) >= self.wanted:
            code, said = launched.ended(PATIENCE)
            self.check_resumption(said, expected)
            self.must_be_done(code, said)
            return False
        moment = self.dice.choices(list(SHARE), list(SHARE.values()))[0] if expected else SAVE
        waited = self.wait_for(moment, launched, run, begun, resumed_at)
        if not waited:
            code, said = launched.ended(PATIENCE)
            self.check_resumption(said, expected)
            self.must_be_done(code, said)
            return False
        before = checkpoint_folder.written(run / "checkpoints")[:1]
        before_step = step_of(before[0]) if before else 0
        rank = launched.some_rank(self.dice) if self.dice.random() < ONE_RANK else None
        faults = launched.kill_rank(rank, moment) if rank is not None else launched.kill_all()
        _, said = launched.ended(5)
        self.check_resumption(said, expected)
        self.look(run, moment, rank is None, before_step, faults)
        return True

    def must_be_done(self, code: int, said: str) -> None:
        """A run that failed by itself is not gone on with."""
        if code != 0:
            self.faults.append(f"a try ended by itself with {code}: {said[-300:]!r}")
            print(f"{self.ranks} rank(s): a try ended by itself with {code}:\n{said}", flush=True)
            self.wanted = len(self.kills)

    def wait_for(self, moment: str, launched: Launched, run: Path, begun: float, resumed_at: int) -> bool:
        """Until the moment has come; False if the run ended before."""
        if moment == START:
            return launched.sleep(self.dice.uniform(0, self.start_seconds))
        if moment == STEP:
            while "proved:" not in launched.listen() or last_step(run) == resumed_at:
                if not launched.sleep(0.02):
                    return False
            self.start_seconds = 0.5 * self.start_seconds + 0.5 * (time.monotonic() - begun)
            return launched.sleep(self.dice.uniform(0, 2))
        stale = set((run / "checkpoints").glob(".*.partial"))
        for _ in range(self.dice.randint(1, 5)):
            while not (found := set((run / "checkpoints").glob(".step_*.partial")) - stale):
                if not launched.sleep(0.002):
                    return False
            stale = found
        return launched.sleep(self.dice.uniform(0, 0.1))

    def check_resumption(self, said: str, expected: Start | None) -> None:
        """What a try said about where it goes on."""
        if expected is None:
            return
        told = re.search(r"going on from (\S+), step (\d+)", said)
        if told is None:
            return  # killed before
        right = Path(told[1]).resolve() == expected.folder and int(told[2]) == expected.step
        if not right:
            self.faults.append(f"went on from {told[1]}, step {told[2]}; the newest whole one is {expected.folder}")
        for kill in self.waiting:
            kill.resumed = right
        self.waiting.clear()

    def look(self, run: Path, moment: str, whole: bool, before: int, faults: list[str]) -> None:
        folder = run / "checkpoints"
        for path in folder.glob("step_*"):
            try:
                checkpoint_folder.verify(path)
            except Damaged as damage:
                faults.append(f"torn: {damage}")
        for link in (checkpoint_folder.LAST, checkpoint_folder.BEST):
            if (folder / link).is_symlink() and not (folder / link).is_dir():
                faults.append(f"torn: {link} points nowhere")
        start, said = newest_whole(folder)
        if before and (start is None or start.step < before):
            faults.append(f"step {before} was written before the kill; found {start and start.step}, {said}")
        lost = None if start is None else max(0, last_step(run) - start.step)
        half = moment != START and any(folder.glob(".step_*.partial"))  # of an earlier try otherwise
        kill = Kill(self.ranks, moment, whole, half, lost, faults=faults)
        self.kills.append(kill)
        if start is not None:
            self.waiting.append(kill)
        at = f"step {start.step}" if start else "no checkpoint yet"
        print(
            f"{self.ranks} rank(s), kill {len(self.kills)}: {'everything' if whole else 'one rank'} in {moment}, {at}, "
            f"lost {lost}{', half a checkpoint left' if kill.half_written else ''} {faults or ''}",
            flush=True,
        )

    def compare(self, run: Path, truth: list[dict]) -> None:
        found = losses(run)
        if found == truth:
            self.alike += 1
        else:
            first = next((a["step"] for a, b in zip(found, truth, strict=False) if a != b), "in number")
            self.faults.append(f"losses differ from the undisturbed run's, first at {first}")
        print(f"{self.ranks} rank(s): complete after {len(self.kills)} kills, losses equal: {found == truth}", flush=True)


class Launched:
    """A `gdino-lab train` in a session of its own, so that nothing of it escapes."""

    def __init__(self, words: list[str], place: Path):
        self.output = tempfile.TemporaryFile("w+", dir=place)
        command = [sys.executable, "-m", "gdino_lab", "train", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def sleep(self, seconds: float) -> bool:
        """False if it ended meanwhile."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is None

    def listen(self) -> str:
        """All it has said so far."""
        return os.pread(self.output.fileno(), 2**20, 0).decode(errors="replace")

    def ended(self, within: float) -> tuple[int, str]:
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill_all()
            code = -1
        for process in self.members():  # nothing stays behind
            with suppress(psutil.NoSuchProcess):
                process.kill()
        said = self.listen()
        self.output.close()
        return code, said

    def members(self) -> list[psutil.Process]:
        """All processes of the session that live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def some_rank(self, dice: random.Random) -> psutil.Process | None:
        """One of the ranks by chance; None where none was started yet."""
        with suppress(psutil.NoSuchProcess):
            started = [
                child for child in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(child.cmdline())
            ]
            return dice.choice(started) if started else None
        return None

    def kill_all(self) -> list[str]:
        for process in self.members():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        while self.members():
            time.sleep(0.01)
        return []

    def kill_rank(self, rank: psutil.Process, moment: str) -> list[str]:
        """Returns what is wrong with how the launcher took it."""
        with suppress(psutil.NoSuchProcess):
            rank.kill()
        if self.sleep(ENDS_WITHIN):
            self.kill_all()
            return [f"the launcher was still there {ENDS_WITHIN} s after its rank was killed in {moment}"]
        said = self.listen()
        wrong = [] if self.process.returncode == 1 else [f"exit code {self.process.returncode} after a rank was killed: {said}"]
        if "died by signal 9" not in said:
            wrong.append(f"not said that a rank was killed: {said}")
        for _ in range(50):
            if not (left := self.members()):
                return wrong
            time.sleep(0.1)
        return [*wrong, f"processes stayed behind: {[' '.join(process.cmdline()) for process in left]}"]


def step_of(path: Path) -> int:
    return int(path.name.split("_")[1])


def rows(run: Path) -> list[dict]:
    """Rows of steps; a line that is being written is left out."""
    with suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
        return [row for row in map(json.loads, lines) if row["kind"] == "step"]
    return []


def last_step(run: Path) -> int:
    return max((row["step"] for row in rows(run)), default=0)


def losses(run: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows(run)]


def report(all_series: list[Series], seed: int, minutes: float) -> str:
    kills = [kill for series in all_series for kill in series.kills]
    resumable = [kill for kill in kills if kill.lost is not None]
    faults = [fault for series in all_series for fault in series.faults] + [fault for kill in kills for fault in kill.faults]
    torn = sum(fault.startswith("torn") for fault in faults)
    counted = Counter((kill.moment, kill.ranks, kill.whole) for kill in kills)
    columns = [(ranks, whole) for ranks in HARDWARE for whole in (True, False)]
    lines = [
        "# Killed at random moments",
        "",
        "    python benchmarks/kill_test.py",
        "",
        f"{len(kills)} kills with SIGKILL, seed {seed}, {date.today()}, {minutes:.0f} minutes on {os.cpu_count()} CPU cores; nano "
        f"model, a checkpoint after every step, {STEPS_AN_EPOCH * EPOCHS} steps a run.",
        "",
        "| sent during | 1 rank: everything | 1 rank: the rank only | 2 ranks: everything | 2 ranks: one of them |",
        "|---|---|---|---|---|",
        *(
            f"| {moment} | " + " | ".join(str(counted[moment, ranks, whole]) for ranks, whole in columns) + " |"
            for moment in SHARE
        ),
        "",
        "| found afterwards | |",
        "|---|---|",
        f"| a checkpoint half written: a `.partial` folder, which the next save removes | {sum(k.half_written for k in kills)} |",
        f"| torn checkpoints under a final name, or `last` or `best` not a whole one | {torn} |",
        f"| resumed from the newest whole one, and said so | {sum(k.resumed for k in resumable)} of {len(resumable)} |",
        f"| before the first checkpoint was written: begun again | {len(kills) - len(resumable)} |",
        f"| steps lost, at most | {max((k.lost for k in resumable), default=0)} |",
        *(
            f"| steps lost: {lost} | {count} kills |"
            for lost, count in sorted(Counter(kill.lost for kill in resumable).items())
        ),
        f"| runs completed, with the losses of the undisturbed run bit for bit | {sum(s.alike for s in all_series)} of "
        f"{sum(s.completed for s in all_series)} |",
        f"| other faults | {len(faults) - torn} |",
        "",
        "Two steps can be lost at most: the one whose checkpoint is being written, and the one trained meanwhile.",
        "",
        *(f"- {fault.splitlines()[0]}" for fault in faults),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("docs/kill_test.md"))
    asked = parser.parse_args()
    seed = random.randrange(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="kill_test_"))
    shared = set(Path("/dev/shm").glob("*"))
    try:
        series = []
        for ranks in HARDWARE:
            (place / str(ranks)).mkdir()
            series.append(Series(place / str(ranks), ranks, asked.kills // len(HARDWARE), seed))
        with ThreadPoolExecutor() as pool:
            all_series = list(pool.map(Series.run, series))
    finally:
        shutil.rmtree(place)
        left = set(Path("/dev/shm").glob("*")) - shared
        for path in left:  # joblib makes some when it is imported, and nobody is left to remove them
            if path.name.startswith("sem.loky-") and not psutil.pid_exists(int(path.name.split("-")[1])):
                path.unlink()
    all_series[0].faults += [f"left in /dev/shm: {path}" for path in left if path.name.startswith(("deepspeed_", "torch_"))]
    text = report(all_series, seed, (time.monotonic() - begun) / 60)
    asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
