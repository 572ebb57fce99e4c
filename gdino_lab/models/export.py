"""The tuned model as a plain transformers folder, with the task's heads beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from gdino_lab.run_folder import replacing

HEADS = "heads.safetensors"
DETECTOR_PREFIX, HEADS_PREFIX = "detector.", "heads."


def save_model(folder: Path, module: nn.Module, weights: dict[str, Tensor], tuning: Any, processor: Any) -> None:
    """Write `folder` whole or not at all: safetensors, config and processor, loadable with `from_pretrained`.

    Args:
        module: the trained module; only its structure is used.
        weights: its weights by name, on the CPU, whole.
    """
    detector = tuning.plain(_below(weights, DETECTOR_PREFIX))
    with replacing(folder) as partial:
        module.detector.save_pretrained(partial, state_dict=detector)
        processor.save_pretrained(partial)
        save_file(_below(weights, HEADS_PREFIX), partial / HEADS)


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
