"""What a checkpoint holds, and writing it so that `last` is always a whole one.

    checkpoints/last/engine/       DeepSpeed's: weights, optimizer, schedule, loss scaler
    checkpoints/last/trainer.json  step, best score so far and the plan it belongs to
    checkpoints/last/rng_<rank>.pt every rank's random generators
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gdino_lab.errors import ConfigurationError
from gdino_lab.run_folder import read_json, replace_folder, replacing, write_json

ENGINE, TRAINER = "engine", "trainer.json"


def save(engine: Any, folder: Path, trainer_state: dict[str, Any]) -> None:
    """Write `folder`, replacing an older one only when the new one is whole. Collective."""
    rank = dist.get_rank()
    partial = folder.with_name(f".{folder.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(partial), tag=ENGINE, save_latest=False)
    torch.save(_random_state(), partial / f"rng_{rank}.pt")
    if rank == 0:
        write_json(partial / TRAINER, trainer_state)
    dist.barrier()
    if rank == 0:
        replace_folder(partial, folder)
    dist.barrier()


def copy(source: Path, target: Path) -> None:
    """`target` becomes the same checkpoint as `source`, without storing the bytes twice. Rank 0 only."""
    with replacing(target) as partial:
        shutil.copytree(source, partial, copy_function=os.link)


def load(engine: Any, folder: Path) -> dict[str, Any]:
    """Restore engine and random generators from `folder`; returns the trainer's state. Collective."""
    engine.load_checkpoint(str(folder), tag=ENGINE)
    _restore_random_state(torch.load(folder / f"rng_{dist.get_rank()}.pt", weights_only=False))
    return read_json(folder / TRAINER)


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
    for folder in (Path(resume), Path(resume) / "checkpoints" / "last"):
        if (folder / TRAINER).is_file():
            return folder.resolve()
    raise ConfigurationError(
        f"train.resume={resume}: neither a checkpoint (no {TRAINER} in it) nor a run folder with checkpoints/last"
    )


def step_of(folder: Path) -> int:
    """Optimizer steps taken when `folder` was written."""
    return read_json(folder / TRAINER)["progressed"]["step"]


def complaints(folder: Path, plan: dict[str, Any]) -> list[str]:
    """Why `folder` cannot be resumed under `plan`."""
    stored = read_json(folder / TRAINER)["plan"]
    return [
        f"train.resume={folder}: was written with {key} {stored[key]}, this run has {plan[key]}; "
        "the run would not be the same"
        for key in ("world_size", "effective_batch", "micro_batch", "train_images")
        if stored[key] != plan[key]
    ]


def _unfinished(run: Path) -> bool:
    try:
        return read_json(run / "status.json")["state"] != "completed"
    except (OSError, ValueError, KeyError):
        return False


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
