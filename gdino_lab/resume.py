"""Which checkpoint `train.resume` means, and whether this configuration may go on from it."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from gdino_lab import checkpoint, checkpoint_folder
from gdino_lab.checkpoint_folder import BEST, LAST, TRAINER, Damaged, point
from gdino_lab.errors import ConfigurationError, nearest
from gdino_lab.run_folder import RunFolder, read_json, replacing
from gdino_lab.settings import Settings, as_dict, flat

# Where, how long and how it is told: nothing that training computes.
FREE = (
    "run_dir", "out", "run", "checkpoint", "average", "adapter", "split", "images", "threshold", "alpha", "plan", "ladder", "tracker",
    "train.epochs", "train.max_steps", "train.resume", "train.resume_check", "train.resume_allow", "train.resume_schedule",
    "train.resume_weights", "train.workers", "train.log_every", "train.hang_minutes", "train.probe", "train.keep",
    "train.save_every",
)  # fmt: skip
# How it is computed: the same trajectory but for rounding, and for dropout where the number of ranks changes.
ELSEWHERE = ("hardware", "zero", "offload", "bucket", "activations", "train.micro_batch")
# Seconds by which the system's word on when a process began may move, with its clock.
SAME_PROCESS = 5
ENDS_AT_ZERO = ("cosine", "linear")
# Other tensors: no state of the one fits the other.
ANOTHER_MODEL = ("model.architecture", "model.config", "tuning")


@dataclass(frozen=True)
class Start:
    """A whole checkpoint to go on from."""

    folder: Path

    @property
    def run(self) -> Path | None:
        """The run folder it lies in: a resumed run goes on there. None for a checkpoint kept elsewhere."""
        run = self.folder.parent.parent
        return run.resolve() if (run / "status.json").exists() else None

    @cached_property
    def trainer_state(self) -> dict[str, Any]:
        """What trainer.json holds.

        Raises:
            ConfigurationError: it is not what gdino-lab writes there.
        """
        try:
            state = read_json(self.folder / TRAINER)
            sound = isinstance(state["settings"], dict) and isinstance(state["versions"], dict)
            sound = sound and all(
                isinstance(number, int)
                for number in (
                    state["progressed"]["step"], *(state["plan"][name] for name in ("total_steps", "steps_per_epoch", "train_images"))
                )
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise ConfigurationError(f"{self.folder / TRAINER}: is not what a checkpoint's {TRAINER} holds; it is damaged")
        return state

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.trainer_state["progressed"]["step"]


def find(asked: str, runs: Path, settings: Settings) -> tuple[Start | None, list[str]]:
    """The checkpoint that `train.resume` means, None for a fresh start; and what there is to say about the choice.

    Args:
        asked: "none", "auto" (the newest unfinished run of the same configuration below `runs`, or with run_dir the one that is
            there), a run folder or a checkpoint folder.

    Raises:
        ConfigurationError: the folder named holds no whole checkpoint; says which file is damaged, and how.
    """
    if asked == "none":
        return None, []
    if asked == "auto":
        return newest_unfinished(runs, settings)
    return checkpoint_at("train.resume", Path(asked))


def checkpoint_at(key: str, folder: Path) -> tuple[Start, list[str]]:
    """The checkpoint in `folder`, or the newest whole one of the run in it; and what there is to say about the choice.

    Raises:
        ConfigurationError: there is none; says which file is damaged, and how.
    """
    if (folder / "checkpoints").is_dir() or (folder / "status.json").is_file():
        start, said = newest_whole(folder / "checkpoints")
        if start is None:
            why = "; ".join(said) or "its run was stopped before the first was written"
            raise ConfigurationError(f"{key}={folder}: no whole checkpoint there: {why}")
        return start, said
    if not (folder / checkpoint_folder.MANIFEST).is_file() and not (folder / TRAINER).is_file():
        raise ConfigurationError(
            f"{key}={folder}: neither a checkpoint (no {checkpoint_folder.MANIFEST} in it) nor a run folder with checkpoints/"
        )
    try:
        checkpoint_folder.verify(folder)
    except Damaged as damage:
        raise ConfigurationError(f"{key}={folder}: {damage}; {key}=<the run's folder> takes the newest whole one") from None
    return Start(folder.resolve()), []


def newest_whole(folder: Path) -> tuple[Start | None, list[str]]:
    """The newest checkpoint below `folder` that is as its manifest says, and why it is not a newer one or `last`."""
    damages: list[str] = []
    for path in checkpoint_folder.written(folder):
        try:
            checkpoint_folder.verify(path)
        except Damaged as damage:
            damages.append(str(damage))
            continue
        said = [f"{damage}; an older checkpoint is taken, {path.name}" for damage in damages]
        last = folder / LAST
        if not damages and last.resolve() != path.resolve():
            said.append(f"{path.name} is whole and the newest, though {last} does not point to it: its run died between the two")
        return Start(path.resolve()), said
    return None, damages


def newest_unfinished(runs: Path, settings: Settings) -> tuple[Start | None, list[str]]:
    """Of the runs of this configuration that are not running and have something left to do, the newest with a whole checkpoint."""
    folders = runs.glob("*/*") if settings.run_dir is None else [Path(settings.run_dir)]
    stopped = [run for run in folders if status_of(run).get("state") is not None and not is_running(run)]
    notices: list[str] = []
    for run in sorted(stopped, key=lambda run: (run / "status.json").stat().st_mtime, reverse=True):
        start, said = newest_whole(run / "checkpoints")
        if start is None:
            notices += [f"train.resume=auto: {damage}" for damage in said]
        elif all(kind == "free" for *_, kind in changes(start.trainer_state["settings"], as_dict(settings))):
            if status_of(run)["state"] != "completed" or steps_asked_for(start, settings) > start.step:
                return start, [*notices, f"train.resume=auto: goes on with {run}", *said]
    return None, [*notices, "train.resume=auto: no unfinished run of this configuration; starts afresh"]


def steps_asked_for(start: Start, settings: Settings) -> int:
    """Steps that `settings` would have its run take in all, the data being the same."""
    whole = settings.train.epochs * start.trainer_state["plan"]["steps_per_epoch"]
    return min(whole, settings.train.max_steps or whole)


def nothing_saved(run: Path) -> bool:
    """Whether a run stopped before its first checkpoint, so that there is nothing to lose of it."""
    stopped = status_of(run).get("state") not in (None, "completed") and not is_running(run)
    return stopped and not checkpoint_folder.written(run / "checkpoints")


def is_running(run: Path) -> bool:
    """Whether a run still goes on, on this machine."""
    status = status_of(run)
    if status.get("state") != "running" or status.get("host") != socket.gethostname():
        return False
    try:  # a process id comes again, in a container or after a boot soon
        began = psutil.Process(status["pid"]).create_time()
        return abs(began - status["process_began"]) < SAME_PROCESS
    except (KeyError, psutil.Error):
        return False


def this_process() -> dict[str, Any]:
    """What `is_running` tells a run's process by."""
    return {"pid": os.getpid(), "process_began": psutil.Process().create_time(), "host": socket.gethostname()}


def status_of(run: Path) -> dict[str, Any]:
    """What its status.json says; nothing where that cannot be read."""
    try:
        return dict(read_json(run / "status.json"))
    except (OSError, ValueError, TypeError):
        return {}


# --- what differs -----------------------------------------------------------------------------------------------------


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any, str]]:
    """(key, value then, value now, kind) of every setting that differs; kind: free, elsewhere, model or result."""
    before, after = flat(then), flat(now)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [(key, before.get(key), after.get(key), kind_of(key)) for key in keys]


def kind_of(key: str) -> str:
    for kind, keys in (("free", FREE), ("elsewhere", ELSEWHERE), ("model", ANOTHER_MODEL)):
        if below(key, keys):
            return kind
    return "result"


def below(key: str, keys: Any) -> bool:
    """Whether `key` is one of `keys` or lies in one of them."""
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def compare(start: Start, settings: dict[str, Any], plan: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(complaints, notices) about what differs from the configuration the checkpoint was written under, field by field."""
    stored, allowed = start.trainer_state, settings["train"]["resume_allow"]
    complaints, notices, other_model = [f"train.resume_allow: {each}" for each in unknown(allowed, settings)], [], []
    for key, then, now, kind in changes(stored["settings"], settings):
        said = f"{key}: {shown(then)} -> {shown(now)}"
        if kind == "model":
            other_model.append(said)
        elif kind == "result" and not below(key, allowed):
            complaints.append(
                f"{said}: changes what is trained; ask for it with train.resume_allow=[{key}], or take the weights only with "
                f"train.resume_weights={start.folder}"
            )
        elif key not in ("train.resume", "train.resume_allow", "run_dir"):
            meaning = {
                "free": "",
                "elsewhere": ", the same training but for rounding",
                "result": ", another training from here on, as asked for",
            }
            notices.append(f"{said}{meaning[kind]}")
    if other_model:
        complaints.append(
            f"{', '.join(other_model)}: no state of the one model fits the other; train.resume_weights={start.folder} takes the "
            "weights only, as far as they have the same names and shapes"
        )
    if stored["plan"]["train_images"] != plan["train_images"] and not below("data", allowed):
        complaints.append(
            f"data: {stored['plan']['train_images']} training images then, {plan['train_images']} now; ask for it with "
            "train.resume_allow=[data]"
        )
    installed = checkpoint.versions()
    for name, then in stored["versions"].items():
        now = installed.get(name)
        if then != now:
            notices.append(f"version of {name}: {then} -> {now}")
    return [f"train.resume={start.folder}: {complaint}" for complaint in complaints], notices


def unknown(keys: list[str], settings: dict[str, Any]) -> list[str]:
    """A word on each key that is neither a setting nor a group of them."""
    known = flat(settings)
    groups = {key.rpartition(".")[0] for key in known} | {key.partition(".")[0] for key in known}
    return [f"{key} is no setting.{nearest(key, [*known, *groups])}" for key in keys if key not in known and key not in groups]


def shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def extension(start: Start, plan: dict[str, Any], settings: Settings) -> tuple[list[str], list[str]]:
    """(complaints, notices) about the learning rate where a run is to take more, or fewer, steps than it was planned for."""
    then, now = start.trainer_state["plan"]["total_steps"], plan["total_steps"]
    if then == now:
        return [], []
    if now < start.step:
        return [f"train.epochs={settings.train.epochs}: plans {now} steps, and {start.folder} has taken {start.step}"], []
    if settings.train.resume_schedule == "stretch":
        return [], [f"schedule: as if {now} steps had been asked for from the start, not {then}"]
    if settings.schedule.name in ENDS_AT_ZERO and now > plan["schedule_steps"]:
        return [
            f"train.resume_schedule=as_written: schedule={settings.schedule.name} ends at a learning rate of 0 after "
            f"{plan['schedule_steps']} steps, so nothing would be learnt up to step {now}; use train.resume_schedule=stretch"
        ], []
    return [], [f"schedule: as written for {plan['schedule_steps']} steps; the last learning rate stays up to step {now}"]


# --- another folder ---------------------------------------------------------------------------------------------------


def bring(start: Start, folder: RunFolder) -> list[str]:
    """A run that is resumed in another folder has there what it goes on from, so that it can go on from it again, and the best
    until then, which may stay the best. Returns what there is to say.

    Raises:
        ConfigurationError: it cannot be written there.
    """
    said = []
    try:
        best = best_of(start)
    except Damaged as damage:
        best, said = None, [f"the best so far is left behind: {damage}"]
    try:
        if best is not None:
            with replacing(folder.model) as partial:
                shutil.copytree(start.run / "model", partial)
            point(folder.checkpoints / BEST, checkpoint_folder.bring(best, folder.checkpoints))
        point(folder.checkpoints / LAST, checkpoint_folder.bring(start.folder, folder.checkpoints))
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # copytree tells of every file
        raise ConfigurationError(f"run_dir={folder.path}: {start.folder} cannot be brought there: {why}") from None
    return said


def best_of(start: Start) -> Path | None:
    """The best checkpoint of the run, as of `start`, where the model that goes with it is there too.

    Raises:
        Damaged: it is not whole.
    """
    best = checkpoint_folder.best_until(start.step, start.folder.parent)
    if best is None or start.run is None or not (start.run / "model").is_dir():
        return None
    checkpoint_folder.verify(best)
    return best
