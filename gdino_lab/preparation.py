"""What comes before anything starts: check it all, plan, make the run folder."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_object
from transformers import PreTrainedModel

from gdino_lab import checkpoint, resume, settings as settings_module
from gdino_lab.errors import ConfigurationError
from gdino_lab.memory.forecast import forecast, skeleton_of
from gdino_lab.models import grounding_dino
from gdino_lab.models.anomaly_detector import level_sizes
from gdino_lab.models.tuning import Tuning
from gdino_lab.plan import Plan, make_plan
from gdino_lab.run_folder import RunFolder, new_run_folder, write_json, write_text
from gdino_lab.settings import Settings, instantiate
from gdino_lab.tasks.protocol import Task


def prepare(settings: Settings, world_size: int, run_dir: str | None = None) -> dict[str, Any]:
    """Check everything, plan, make the run folder; returns the job as plain data, with what the run's files said before.

    The checks that write nothing come first, so that a refused run leaves nothing but its message.
    """
    complaints = device_complaints(settings) + tracker_complaints(settings)
    complaints += grounding_dino.check(**_arguments(settings.model))
    data, task, found = data_and_task(settings)
    complaints += found
    plan = start = None
    notices: list[str] = []
    try:
        start, notices = resume.find(settings.train.resume, Path("outputs/runs"), settings)
        if data is not None:
            plan = make_plan(settings, data.train_size(), world_size, schedule_as_written(settings, start))
            found, said = differences(settings, plan, start)
            complaints, notices = complaints + found, notices + said
        if task is not None and not complaints:
            if start is not None:
                check_weights(settings, task, start.folder, where=f"train.resume={start.folder}")
                settings.train.resume_weights = start.trainer_state["settings"]["train"]["resume_weights"]  # it holds those
            elif settings.train.resume_weights is not None:
                settings.train.resume_weights = str(weights_of_start(settings, task))
    except ConfigurationError as error:
        complaints += error.complaints
    asked = settings.run_dir or run_dir or (start and start.run)
    own = start is not None and start.run is not None and start.run == (asked and Path(asked).resolve())
    begun = asked and (Path(asked) / "status.json").exists()
    again = begun and start is None and settings.train.resume == "auto" and resume.nothing_saved(Path(asked))
    if begun and resume.is_running(Path(asked)):
        complaints.append(f"{asked}: this run is still going on; stop it first, or give this one a run_dir of its own")
    elif begun and not own and not again:
        complaints.append(
            f"run_dir={asked}: holds a run already; name another folder, or go on with train.resume={asked}"
        )
    if complaints:
        raise ConfigurationError(complaints)
    data.prepare()
    for notice in [*notices, *task.check(data, grounding_dino.build_processor(**_arguments(settings.model)))]:
        print(notice, flush=True)

    predicted = None
    if settings.hardware.device == "cuda":
        predicted = forecast(settings, task, task.worst(settings.train.micro_batch), world_size)

    folder = new_run_folder(asked, **settings_module.choices_of(settings))
    folder.forget_failures()
    if again:
        folder.rewind(-1)
    if start is not None and not own:
        print("".join(f"{notice}\n" for notice in resume.bring(start, folder)), end="", flush=True)
    before = {path.name: path.read_text() for path in (folder.config, folder.plan, folder.status) if own and path.exists()}
    write_config(settings, folder)
    write_json(folder.plan, plan.as_dict() | {"predicted": predicted and predicted.as_dict()})
    folder.write_status("running", **resume.this_process())
    lines = plan.lines()
    if predicted is not None:
        lines.append(f"peak memory = {predicted.peak / 2**30:.2f} GiB of a GPU  (predicted; `gdino-lab plan` shows its terms)")
    print("\n".join([f"run folder: {folder.path}", "plan:", *(f"  {line}" for line in lines)]), flush=True)
    return {
        "settings": settings_module.as_dict(settings),
        "plan": plan.as_dict(),
        "folder": str(folder.path),
        "resume": None if start is None else str(start.folder),
        "before": before,
    }


def data_and_task(settings: Settings) -> tuple[Any, Task | None, list[str]]:
    """Both, as far as they can be made, and what there is to say about them and the tuning."""
    complaints: list[str] = []
    made: dict[str, Any] = {}
    for name, supplied in (("data", {}), ("task", {"seed": settings.train.seed}), ("tuning", {})):
        try:
            made[name] = instantiate(getattr(settings, name), **supplied)
        except Exception as error:
            complaints += _complaints_of(error)
    data, task = made.get("data"), made.get("task")
    if data is not None and task is not None and not isinstance(data, task.data_class):
        raise ConfigurationError(
            [*complaints, f"data does not suit the task: {type(task).__name__} takes data={task.data_choices}"]
        )
    if not complaints:
        with torch.device("meta"):
            detector = grounding_dino.skeleton(**_arguments(settings.model))
        complaints = size_complaints(detector.config, task, data)
        complaints += tuning_complaints(detector, task, made["tuning"])
    return data, task, complaints


def planned(settings: Settings) -> tuple[Task, Any, Plan, list[str]]:
    """Task, data, plan and notices, on a machine that need not have the GPU, the weights or even the data.

    Raises:
        ConfigurationError: what would be refused on any machine.
    """
    data, task, complaints = data_and_task(settings)
    if complaints:
        raise ConfigurationError(complaints)
    notices = []
    try:
        images = data.train_size()
        task.check(data, grounding_dino.any_processor(**_arguments(settings.model)))
    except ConfigurationError as error:
        images = settings.train.effective_batch
        notices = [f"{error.complaints[0]}: one step an epoch is assumed."]
    return task, data, make_plan(settings, images, settings.hardware.devices), notices


def size_complaints(config: Any, task: Task, data: Any) -> list[str]:
    """Images so small that the encoder has fewer tokens than the decoder takes queries from them."""
    side = int(data.shortest * task.smallest_scale)
    tokens = sum(height * width for height, width in level_sizes(config, side, side))
    if tokens >= config.num_queries:
        return []
    scaled = f" x {task.smallest_scale} (task.augment.scales)" if task.smallest_scale < 1 else ""
    return [
        f"data.image_size: images of {data.shortest}{scaled} pixels a side give {tokens} tokens, fewer than the "
        f"{config.num_queries} queries of this model; use larger images, or model=nano"
    ]


def tuning_complaints(detector: PreTrainedModel, task: Task, tuning: Tuning) -> list[str]:
    """Patterns and layers that the model does not have, and a choice that leaves nothing to train."""
    try:
        with torch.device("meta"):
            module = task.attach(tuning.prepare(detector))
        if tuning.groups(module, lr=0.0):
            return []
    except ConfigurationError as error:
        return error.complaints
    return ["tuning: leaves no parameter to train, and this task has no head of its own; use tuning=full or tuning=lora"]


def schedule_as_written(settings: Settings, start: resume.Start | None) -> int | None:
    """Steps of the learning rate's schedule where a resumed run is to keep the one it was written with."""
    if start is None or settings.train.resume_schedule != "as_written":
        return None
    return start.trainer_state["plan"]["schedule_steps"]


def differences(settings: Settings, plan: Plan, start: resume.Start | None) -> tuple[list[str], list[str]]:
    """(complaints, notices) about going on from `start` under other settings."""
    if start is None:
        return [], []
    complaints, notices = resume.compare(start, settings_module.as_dict(settings), plan.as_dict())
    more, said = resume.extension(start, plan.as_dict(), settings)
    return complaints + more, [f"going on from {start.folder}, step {start.step}", *notices, *said]


def weights_of_start(settings: Settings, task: Task) -> Path:
    """The checkpoint that train.resume_weights means, checked against the model.

    Raises:
        ConfigurationError: it is none, or its weights are not this model's.
    """
    asked = settings.train.resume_weights
    start, _ = resume.checkpoint_at("train.resume_weights", Path(asked))
    check_weights(settings, task, start.folder, where=f"train.resume_weights={asked}")
    return start.folder


def check_weights(settings: Settings, task: Task, folder: Path, where: str) -> None:
    """As `checkpoint.check_fits`, before there is a model."""
    with torch.device("meta"):
        module = skeleton_of(settings, task)
    checkpoint.check_fits(module, folder, where)


def tracker_complaints(settings: Settings) -> list[str]:
    """A tracker whose package is not installed."""
    target = settings.tracker.get("_target_")
    if target is None:
        return []
    name = get_object(target).name
    if importlib.util.find_spec(name) is not None:
        return []
    return [f"tracker={name}: the package {name} is not installed; pip install {name}, or use tracker=tensorboard"]


def device_complaints(settings: Settings) -> list[str]:
    """Devices beyond what there is."""
    hardware = settings.hardware
    there = torch.cuda.device_count() if hardware.device == "cuda" else os.cpu_count() or 1
    if hardware.devices <= there:
        return []
    kind = "CUDA device(s)" if hardware.device == "cuda" else "CPU core(s)"
    cure = "; hardware=cpu trains without a GPU" if there == 0 else ""
    return [f"hardware.devices={hardware.devices}: this machine has {there} {kind}{cure}"]


def _arguments(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "_target_"}


def _complaints_of(error: Exception) -> list[str]:
    """The ConfigurationError behind Hydra's wrapping, or `error` itself if it is a bug and not the user's making."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigurationError):
            return cause.complaints
        cause = cause.__cause__ or cause.__context__
    raise error


def write_config(settings: Settings, folder: RunFolder) -> None:
    """The resolved configuration, as a Hydra file that gives the same run again."""
    values = settings_module.as_dict(settings) | {"run_dir": None, "out": None, "run": None}
    values["train"] |= {"resume": "none", "resume_allow": []}
    text = yaml.safe_dump(settings_module.RUN_HEADER | values, sort_keys=False)
    write_text(folder.config, f"# The same run again: gdino-lab train --config-path {folder.path}\n{text}")
