"""The files of one run: where they lie, and how they are written so that a reader never meets half a file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdino_lab.errors import ConfigurationError

# Bytes: of a few reports, each with its traceback.
ROOM = 2**18
# A failure's kind where a rank only noticed that another one was gone.
LOST_PEER = "lost_peer"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank_{rank}.log"

    def rank_failure(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank_{rank}.failure.json"

    def failures(self) -> list[dict[str, Any]]:
        """What failing ranks left, the cause first: the earliest that is no echo of another rank's end."""
        found = [read_json(path) for path in (self.path / "ranks").glob("rank_*.failure.json")]
        return sorted(found, key=lambda failure: (failure["kind"] == LOST_PEER, failure["time"]))

    def keep_room(self) -> None:
        """Hold some of the disk, for `give_room` to let go when it is full and what happened has to be written down."""
        self._room.write_bytes(bytes(ROOM))

    def give_room(self) -> None:
        self._room.unlink(missing_ok=True)

    @property
    def _room(self) -> Path:
        return self.path / "ranks" / ".room"

    def forget_failures(self) -> None:
        """Of an earlier try."""
        for path in (self.path / "ranks").glob("rank_*.failure.json"):
            path.unlink()

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps that will be taken again: those after `step`."""
        if self.metrics.exists():
            rows = []
            for line in self.metrics.read_text().splitlines():
                with suppress(ValueError):  # half a line, of a run that was killed while it wrote
                    rows += [line] if json.loads(line)["step"] <= step else []
            write_text(self.metrics, "".join(f"{row}\n" for row in rows))

    def write_status(self, state: str, **details: Any) -> None:
        """`state`: running, completed, failed, out_of_memory or interrupted; details say cause, where and cure."""
        write_json(self.status, {"state": state, **details})

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")


def new_run_folder(run_dir: str | None, task: str, data: str) -> RunFolder:
    """Make the folder of a run: `run_dir`, or outputs/runs/<date>/<time>_<task>_<data>.

    Raises:
        ConfigurationError: it, or its checkpoints/, cannot be written; better said now than after the first epoch.
    """
    place = Path(run_dir or "outputs/runs")
    try:
        if run_dir is not None:
            path = Path(run_dir)
            path.mkdir(parents=True, exist_ok=True)
        else:
            now = time.localtime()
            parent = Path("outputs/runs") / time.strftime("%Y-%m-%d", now)
            parent.mkdir(parents=True, exist_ok=True)
            path = _first_free(parent, f"{time.strftime('%H-%M-%S', now)}_{task}_{data}")
        folder = RunFolder(path.resolve())
        for place in (folder.path / "ranks", folder.checkpoints):
            place.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        folder.keep_room()
    except OSError as error:
        raise ConfigurationError(
            f"run_dir={run_dir or 'null'}: {place} cannot be written ({error.strerror}); name another, or make it writable"
        ) from None
    return folder


def new_output_folder(asked: str | None, kind: str) -> Path:
    """Make a folder for what is no run: `asked`, new or empty, or outputs/<kind>/<date>/<time>.

    Raises:
        ConfigurationError: there is something in it already.
    """
    if asked is not None:
        if Path(asked).exists() and (not Path(asked).is_dir() or any(Path(asked).iterdir())):
            raise ConfigurationError(f"out={asked}: holds something already; name a new or an empty folder")
        Path(asked).mkdir(parents=True, exist_ok=True)
        return Path(asked)
    now = time.localtime()
    parent = Path("outputs") / kind / time.strftime("%Y-%m-%d", now)
    parent.mkdir(parents=True, exist_ok=True)
    return _first_free(parent, time.strftime("%H-%M-%S", now))


def _first_free(parent: Path, name: str) -> Path:
    """Two runs of one second get two folders."""
    for suffix in ("", *(f"_{number}" for number in range(2, 1000))):
        try:
            (parent / (name + suffix)).mkdir()
        except FileExistsError:
            continue
        return parent / (name + suffix)
    raise FileExistsError(parent / name)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write into that becomes `folder` when the block ends, or vanishes when it raises."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        replace_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_folder(partial: Path, folder: Path) -> None:
    """`partial` becomes `folder`. The old one goes aside first, so one of the two is whole at any time."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
