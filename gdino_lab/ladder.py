"""A ladder: the same training in ever less memory, rung by rung, each in processes of its own, until one fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gdino_lab import launch, preparation
from gdino_lab.errors import ConfigurationError
from gdino_lab.memory.forecast import KNOWN_ERROR, Forecast, forecast
from gdino_lab.models import grounding_dino
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder, new_output_folder, read_json, write_json
from gdino_lab.settings import Ladder, Settings, as_dict, flat

# A rung may change how a training runs. All else is what it computes, and stays.
MAY_CHANGE = ("hardware", "precision", "activations", "zero", "offload", "bucket")
MAY_CHANGE_IN_TRAIN = ("micro_batch", "workers", "probe")

RUNNING, SKIPPED, TRAINED, OUT_OF_MEMORY = "running", "skipped", "trained", "out_of_memory"
GIB = 2**30


class Mistake(ConfigurationError):
    """Of the ladder itself: a rung that names what there is not."""


@dataclass
class Try:
    """One rung and what became of it; bytes are of one rank's device.

    outcome: "skipped", "trained", or the state of its run: running, out_of_memory, failed, interrupted.
    kind: of a failure, as status.json has it: "out_of_memory" is torch's allocator, other memory has other names.
    """

    number: int
    name: str
    overrides: list[str]
    settings: Settings | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    predicted: Forecast | None = None
    measured_bytes: int | None = None
    outcome: str = ""
    kind: str = ""
    verdict: str = "not tried"
    code: int | None = None
    folder: str | None = None

    def skip(self, why: str) -> None:
        self.outcome, self.verdict = SKIPPED, f"skipped: {why}"

    def as_dict(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("settings", "predicted")}
        return plain | {"predicted": self.predicted and self.predicted.as_dict()}


def climb(base: Settings, compose: Callable[[list[str]], Settings]) -> int:
    """Try the rungs of `base` in order and train on the first that fits; returns the exit code.

    Args:
        compose: overrides of a rung -> its settings.

    Raises:
        ConfigurationError: the ladder, or what every rung shares, cannot work; nothing was started.
    """
    tries = tries_of(base, compose)
    data, task = shared(base)
    folder = new_output_folder(base.out, "ladders").resolve()
    print(f"ladder: {folder}", flush=True)
    for rung in tries:
        print(f"\n== rung {rung.number} of {len(tries)}, {rung.name}: {told(rung)} ==", flush=True)
        if not rung.outcome:
            rung.predicted = consider(rung, tries, data, task)
        if not rung.outcome:
            rung.folder = f"{rung.number:02}_{folder_name(rung.name)}"
            rung.outcome = rung.verdict = RUNNING
            write(folder, tries)
            run(rung, folder / rung.folder)
        write(folder, tries)
        print(f"rung {rung.number}, {rung.name}: {rung.verdict}", flush=True)
        if rung.code in (launch.DONE, launch.FAILED, launch.INTERRUPTED):
            break
    Console(width=max(Console().width, 120)).print("", table_of(tries))
    print(f"{ending(tries)}\n{folder / 'ladder.json'}", flush=True)
    return exit_code(tries)


# --- before anything starts -----------------------------------------------------------------------------------------


def tries_of(base: Settings, compose: Callable[[list[str]], Settings]) -> list[Try]:
    """The rungs, composed. One whose settings contradict each other here is skipped; one that would train something
    else is a mistake of the ladder's.

    Raises:
        ConfigurationError: with every complaint about the ladder.
    """
    complaints = []
    if base.run_dir is not None:
        complaints.append("run_dir with ladder: each rung has a folder of its own; out=DIR names the ladder's folder")
    if base.train.resume != "none":
        complaints.append(f"train.resume={base.train.resume} with ladder: a rung starts afresh; `gdino-lab train` resumes")
    if not base.ladder.rungs:
        complaints.append("ladder.rungs is empty: a ladder needs a rung")
    tries = []
    for number, rung in enumerate(base.ladder.rungs, start=1):
        made = Try(number, rung.name, list(rung.overrides))
        tries.append(made)
        try:
            made.settings = replace(compose(made.overrides), ladder=Ladder(), out=None)
        except Mistake as mistake:
            complaints += mistake.complaints
            continue
        except ConfigurationError as error:
            made.skip(f"refused, {'; '.join(error.complaints)}")
            continue
        made.changed = differences(base, made.settings)
        complaints += [
            f"ladder rung {rung.name}: changes {key} to {value}; a rung may change how a training runs, not what it computes"
            for key, value in made.changed.items()
            if not may_change(key)
        ]
    if complaints:
        raise ConfigurationError(complaints)
    return tries


def merged(words: list[str], overrides: list[str]) -> list[str]:
    """A rung's overrides after the user's, less those of the user's that name the same: the rung wins."""

    def wins(word: str) -> bool:
        return any(key_of(word) == key_of(own) or key_of(word).startswith(f"{key_of(own)}.") for own in overrides)

    return [*(word for word in words if not wins(word)), *overrides]


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def may_change(key: str) -> bool:
    outer, _, inner = key.partition(".")
    return outer in MAY_CHANGE or (outer == "train" and inner in MAY_CHANGE_IN_TRAIN)


def differences(base: Settings, other: Settings) -> dict[str, Any]:
    """Dotted keys whose values differ, with those of `other`."""
    before, after = flat(as_dict(base)), flat(as_dict(other))
    named = {**before, **after}
    return {key: after.get(key) for key in named if before.get(key) != after.get(key) and key != "out" and key[:6] != "ladder"}


def shared(base: Settings) -> tuple[Any, Any]:
    """What every rung has in common, checked: data and the task on them.

    Raises:
        ConfigurationError: no rung could train.
    """
    model = {key: value for key, value in base.model.items() if key != "_target_"}
    data, task, complaints = preparation.data_and_task(base)
    complaints += preparation.tracker_complaints(base) + grounding_dino.check(**model)
    if complaints:
        raise ConfigurationError(complaints)
    processor = grounding_dino.build_processor(**model)
    data.prepare()
    task.check(data, processor)
    task.bind(data, processor)
    return data, task


# --- one rung -------------------------------------------------------------------------------------------------------


def consider(rung: Try, tries: list[Try], data: Any, task: Any) -> Forecast | None:
    """Its prediction; marks a rung that need not be tried as skipped, and says why."""
    settings = rung.settings
    complaints = preparation.device_complaints(settings)
    try:
        make_plan(settings, data.train_size(), settings.hardware.devices)
    except ConfigurationError as error:
        complaints += error.complaints
    if complaints:
        rung.skip(f"refused, {'; '.join(complaints)}")
        return None
    twin = next((each for each in tries[: rung.number - 1] if each.settings == settings), None)
    if twin is not None:
        rung.skip(f"the same settings as rung {twin.number}")
        return twin.predicted
    predicted = forecast(settings, task, task.worst(settings.train.micro_batch), settings.hardware.devices)
    if why := too_large(predicted) or no_smaller(predicted, rung, tries):
        rung.skip(why)
    return predicted


def too_large(predicted: Forecast) -> str | None:
    """Why there is no use in trying: the prediction is above the limit, and by more than it may be wrong."""
    if predicted.limit is None or predicted.peak <= predicted.limit * (1 + KNOWN_ERROR):
        return None
    return f"predicted too large, {gib(predicted.peak)} GiB where {gib(predicted.limit)} are allowed"


def no_smaller(predicted: Forecast, rung: Try, tries: list[Try]) -> str | None:
    """Why there is no use in trying: it is predicted to need what has just not been there."""
    for other in tries:
        short = other.kind == OUT_OF_MEMORY and other.settings.hardware.devices == rung.settings.hardware.devices
        if short and predicted.peak >= other.predicted.peak:
            return f"predicted to need no less than rung {other.number}, which ran out of memory"
    return None


def run(rung: Try, folder: Path) -> None:
    """Train in processes of its own: an engine that ran out of memory trains wrongly ever after."""
    try:
        rung.code = launch.train(rung.settings, run_dir=str(folder))
    except ConfigurationError as error:
        rung.folder = None
        rung.skip(f"refused, {'; '.join(error.complaints)}")
        return
    status = read_json(RunFolder(folder).status)
    rung.kind = status.get("kind", "")
    rung.measured_bytes = measured(RunFolder(folder))
    rung.outcome, rung.verdict = verdict_of(rung.code, status, steps_taken(RunFolder(folder)))


def verdict_of(code: int, status: dict[str, Any], steps: int) -> tuple[str, str]:
    """(outcome, verdict) of a run that has ended."""
    if code == launch.DONE:
        return TRAINED, TRAINED
    if code == launch.OUT_OF_MEMORY:
        whose = "" if status["kind"] == OUT_OF_MEMORY else f" ({status['kind'].replace('_', ' ')})"
        when = f"after step {steps}, the next rung starts afresh" if steps else "before the first step"
        return OUT_OF_MEMORY, f"out of memory{whose} {when}"
    return status["state"], f"{status['state']}: {status.get('cause', '')}"


def measured(folder: RunFolder) -> int | None:
    """Peak bytes of the rank that took most: all it needed, or all it got before it ran out. None on CPU."""
    if folder.summary.exists():
        peaks = [peak["allocated"] for peak in read_json(folder.summary).get("peak_bytes") or []]
        return max(peaks, default=None)
    figures = read_json(folder.status).get("figures") or {}
    return figures.get("peak_allocated_bytes") or figures.get("allocated_bytes")


def steps_taken(folder: RunFolder) -> int:
    """The last step that metrics.jsonl knows of."""
    if not folder.metrics.exists():
        return 0
    steps = re.findall(r'"kind": "step", "step": (\d+)', folder.metrics.read_text())
    return int(steps[-1]) if steps else 0


# --- saying what happened -------------------------------------------------------------------------------------------


def exit_code(tries: list[Try]) -> int:
    """0 trained, 1 failed, 130 interrupted; else 3 if it was for memory that no rung trained, 2 if all were refused."""
    ended = [rung.code for rung in tries if rung.code in (launch.DONE, launch.FAILED, launch.INTERRUPTED)]
    if ended:
        return ended[0]
    short = any(rung.code == launch.OUT_OF_MEMORY or rung.predicted is not None for rung in tries)
    return launch.OUT_OF_MEMORY if short else launch.REFUSED


def ending(tries: list[Try]) -> str:
    """The result in a sentence."""
    trained = next((rung for rung in tries if rung.outcome == TRAINED), None)
    if trained is not None:
        return f"trained on rung {trained.number}, {trained.name}: {told(trained)}"
    stopped = next((rung for rung in tries if rung.code in (launch.FAILED, launch.INTERRUPTED)), None)
    if stopped is not None:
        return f"stopped at rung {stopped.number}, {stopped.name}: no failure for lack of memory, so no other rung is tried"
    if exit_code(tries) == launch.REFUSED:
        return f"none of the {len(tries)} rungs could be tried"
    return f"none of the {len(tries)} rungs fits; a smaller data.image_size needs less"


def told(rung: Try) -> str:
    """What the rung changes of the configuration, as overrides."""
    return words_of(rung.changed) or "as configured" if rung.settings is not None else " ".join(rung.overrides)


def words_of(values: dict[str, Any]) -> str:
    plain = {None: "null", True: "true", False: "false"}
    return " ".join(f"{key}={value if type(value) in (int, float, str) else plain[value]}" for key, value in values.items())


def rows_of(tries: list[Try]) -> list[list[str]]:
    """Rung, what it changes of the one above it, GiB predicted and measured, verdict."""
    rows, above = [], None
    for rung in tries:
        changes = told(rung)
        if above is not None and rung.settings is not None:
            changes = words_of(differences(above, rung.settings)) or "nothing"
        above = rung.settings or above
        predicted = "-" if rung.predicted is None else gib(rung.predicted.peak)
        took = "-" if rung.measured_bytes is None else gib(rung.measured_bytes)
        more = "> " if rung.measured_bytes is not None and rung.outcome != TRAINED else ""
        rows.append([f"{rung.number} {rung.name}", changes, predicted, more + took, rung.verdict])
    return rows


def table_of(tries: list[Try]) -> Table:
    note = f"Predictions may be {100 * KNOWN_ERROR:.0f} % off. Where a rung and the command line name the same key, the rung wins."
    table = Table(title="Ladder", title_justify="left", caption=note, caption_justify="left")
    for name, justify in (
        ("rung", "left"), ("changes of the one above", "left"), ("predicted GiB", "right"), ("measured GiB", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows_of(tries):
        table.add_row(*map(escape, row))
    return table


def write(folder: Path, tries: list[Try]) -> None:
    """ladder.json, whole at any time."""
    trained = next((rung.name for rung in tries if rung.outcome == TRAINED), None)
    write_json(folder / "ladder.json", {"trained": trained, "rungs": [rung.as_dict() for rung in tries]})


def folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:60]


def gib(size: int) -> str:
    return f"{size / GIB:.2f}"
