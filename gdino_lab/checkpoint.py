"""What a checkpoint holds, and writing it so that `last` is always a whole one.

    checkpoints/last/engine/       DeepSpeed's: weights, optimizer, schedule, loss scaler
    checkpoints/last/trainer.json  step, best score so far, loss scale, and the plan and settings it belongs to
    checkpoints/last/rng_<rank>.pt every rank's random generators
    checkpoints/last/average_0.pt  moving average of the weights, where there is one; under ZeRO-3 each rank's shard
"""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from gdino_lab.engine import autocast_scale, set_autocast_scale
from gdino_lab.errors import ConfigurationError
from gdino_lab.models.average import WeightAverage
from gdino_lab.run_folder import RunFolder, read_json, replace_folder, replacing, write_json

ENGINE, TRAINER = "engine", "trainer.json"


def save(engine: Any, average: WeightAverage | None, folder: Path, trainer_state: dict[str, Any]) -> None:
    """Write `folder`, replacing an older one only when the new one is whole. Collective."""
    rank = dist.get_rank()
    partial = folder.with_name(f".{folder.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(partial), tag=ENGINE, save_latest=False)
    torch.save(_random_state(), partial / f"rng_{rank}.pt")
    if average is not None and rank == _average_rank(engine):
        torch.save(average.state(), partial / f"average_{rank}.pt")
    if rank == 0:
        write_json(partial / TRAINER, trainer_state | {"autocast_scale": autocast_scale(engine)})
    dist.barrier()
    if rank == 0:
        replace_folder(partial, folder)
    dist.barrier()


def copy(source: Path, target: Path) -> None:
    """`target` becomes the same checkpoint as `source`, without storing the bytes twice. Rank 0 only."""
    with replacing(target) as partial:
        shutil.copytree(source, partial, copy_function=os.link)


def load(engine: Any, average: WeightAverage | None, folder: Path) -> dict[str, Any]:
    """Restore engine, average and random generators from `folder`; returns the trainer's state. Collective."""
    path, _ = engine.load_checkpoint(str(folder), tag=ENGINE)
    if path is None:
        raise RuntimeError(f"{folder / ENGINE}: DeepSpeed found nothing to load there")
    stored = read_json(folder / TRAINER)
    set_autocast_scale(engine, stored["autocast_scale"])
    if average is not None:
        average.restore(torch.load(folder / f"average_{_average_rank(engine)}.pt", map_location="cpu"))
    _restore_random_state(torch.load(folder / f"rng_{dist.get_rank()}.pt", weights_only=False))
    return stored


def find(resume: str, runs: Path) -> Path | None:
    """The checkpoint that `train.resume` means, or None for a fresh start.

    Args:
        resume: "none", "auto" (the newest unfinished run below `runs`, if any), a run folder or a checkpoint folder.

    Raises:
        ConfigurationError: the folder named holds no checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        stopped = [path.parent.parent for path in runs.glob("*/*/checkpoints/last") if _unfinished(path.parent.parent)]
        return max(stopped, key=lambda run: run.stat().st_mtime) / "checkpoints" / "last" if stopped else None
    last = Path(resume) / "checkpoints" / "last"
    for folder in (Path(resume), last, last.with_name(".last.old")):  # the last: killed between two renames
        if (folder / TRAINER).is_file():
            return folder.resolve()
    raise ConfigurationError(
        f"train.resume={resume}: neither a checkpoint (no {TRAINER} in it) nor a run folder with checkpoints/last"
    )


def step_of(folder: Path) -> int:
    """Optimizer steps taken when `folder` was written."""
    return read_json(folder / TRAINER)["progressed"]["step"]


def complaints(folder: Path, plan: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Why `folder` cannot be resumed under `plan` and `settings`: what would make it another run."""
    stored = read_json(folder / TRAINER)
    pairs = [(key, stored["plan"][key], plan[key]) for key in ("world_size", "effective_batch", "micro_batch")]
    pairs += [
        (node, stored["settings"][node], settings[node])
        for node in ("task", "data", "model", "tuning", "optimizer", "precision", "zero", "offload")
    ]
    pairs += [
        (f"train.{key}", stored["settings"]["train"].get(key), settings["train"][key]) for key in ("seed", "ema_decay")
    ]
    return [
        f"train.resume={folder}: was written with {key}={then}, this run has {now}; it would not be the same run"
        for key, then, now in pairs
        if then != now
    ]


def bring_best(resume: Path, folder: RunFolder) -> None:
    """The best model so far goes along where a run is resumed in another folder: it may stay the best."""
    run = resume.parent.parent
    for source, target in ((run / "model", folder.model), (resume.parent / "best", folder.checkpoints / "best")):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)


def _average_rank(engine: Any) -> int:
    """Whose file holds this rank's average: its own where the weights are in shards, else rank 0's."""
    return dist.get_rank() if engine.zero_optimization_stage() == 3 else 0


def _unfinished(run: Path) -> bool:
    try:
        status = read_json(run / "status.json")
    except (OSError, ValueError):
        return False
    alive = status.get("host") == socket.gethostname() and psutil.pid_exists(status.get("pid", -1))
    return status["state"] != "completed" and not alive


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
