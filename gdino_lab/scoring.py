"""Batches through a model, without gradients: shared by training, `eval`, `blend` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gdino_lab.settings import Settings
from gdino_lab.tasks.protocol import Batch, Outputs, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def images_at_once(settings: Settings) -> int:
    """Images of an evaluation batch: without a backward there is room for two micro-batches, unless training keeps no
    activations either."""
    return settings.train.micro_batch * (1 if settings.activations.recompute else 2)


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The one place where a batch changes device and dtype: pixels take the weights' dtype, targets stay fp32."""
    moved = {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }
    moved["inputs"] = {key: value.to(device, non_blocking=True) for key, value in batch["inputs"].items()}
    moved["inputs"]["pixel_values"] = moved["inputs"]["pixel_values"].to(dtype)
    return moved


@torch.no_grad()
def records_of(
    forward: Callable[..., Outputs], task: Task, batches: Iterable[Batch], device: torch.device, dtype: torch.dtype
) -> list[Any]:
    """The task's records of every sample in `batches`."""
    records = []
    for batch in batches:
        batch = to_device(batch, device, dtype)
        records += task.records(forward(**batch["inputs"]), batch)
    return records
