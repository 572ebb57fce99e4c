"""The tuned model as a plain transformers folder, with what the task needs to use it beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gdino_lab.run_folder import replacing

HEADS, KNOWLEDGE = "heads.safetensors", "task.safetensors"
DETECTOR_PREFIX, HEADS_PREFIX = "detector.", "heads."


@dataclass(frozen=True)
class Knowledge:
    """What a task has learnt besides weights: plain facts (anything JSON holds), and arrays by name."""

    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def save_model(
    folder: Path, module: nn.Module, weights: dict[str, Tensor], tuning: Any, processor: Any, knowledge: Knowledge
) -> None:
    """Write `folder` whole or not at all: safetensors, config and processor, loadable with `from_pretrained`.

    Args:
        module: the trained module; only its structure is used.
        weights: its weights by name, on the CPU, whole.
    """
    detector, heads = tuning.plain(_below(weights, DETECTOR_PREFIX)), _below(weights, HEADS_PREFIX)
    with replacing(folder) as partial:
        module.detector.save_pretrained(partial, state_dict=detector)
        processor.save_pretrained(partial)
        if heads:
            save_file(heads, partial / HEADS)
        # The facts ride in the file's header, so that they and the arrays are of one moment.
        save_arrays(knowledge.arrays, partial / KNOWLEDGE, metadata={"facts": json.dumps(knowledge.facts)})


def load_heads(folder: Path, module: nn.Module) -> None:
    """Give `module` the heads that lie in `folder`, if its kind has any."""
    if hasattr(module, "heads"):
        module.heads.load_state_dict(load_file(folder / HEADS))


def load_knowledge(folder: Path) -> Knowledge:
    with safe_open(folder / KNOWLEDGE, framework="numpy") as file:
        return Knowledge(json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()})


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
