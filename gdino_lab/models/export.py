"""The tuned model as a plain transformers folder, with what the task needs to use it beside it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gdino_lab.models.tuning import Lora
from gdino_lab.run_folder import replacing

HEADS, KNOWLEDGE, ADAPTER = "heads.safetensors", "task.safetensors", "adapter_model.safetensors"
DETECTOR_PREFIX, HEADS_PREFIX = "detector.", "heads."
# transformers 5 does not say where Grounding DINO keeps its embeddings, and peft 0.21 asks.
ADAPTER_README = """Low-rank adapters of a Grounding DINO. With peft, on the model that adapter_config.json names:

    model = AutoModelForZeroShotObjectDetection.from_pretrained(BASE)
    model.get_input_embeddings = model.model.text_backbone.get_input_embeddings
    model = PeftModel.from_pretrained(model, THIS_FOLDER)
"""


@dataclass(frozen=True)
class Knowledge:
    """What a task has learnt besides weights: plain facts (anything JSON holds), and arrays by name."""

    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def save_model(
    folder: Path, module: nn.Module, weights: dict[str, Tensor], tuning: Any, processor: Any, knowledge: Knowledge | None
) -> None:
    """Write `folder` whole or not at all: safetensors, config and processor, loadable with `from_pretrained`.

    Args:
        module: the trained module; only its structure is used.
        weights: its weights by name, on the CPU, whole.
        knowledge: None where no evaluation has said what the task knows.
    """
    detector = tuning.plain(_below(weights, DETECTOR_PREFIX))
    with replacing(folder) as partial:
        module.detector.save_pretrained(partial, state_dict=detector)
        _save_rest(partial, weights, processor, knowledge)


def save_adapter(
    folder: Path, weights: dict[str, Tensor], tuning: Lora, base: str | None, processor: Any, knowledge: Knowledge | None
) -> None:
    """Write `folder` whole or not at all: the low-rank adapters as `peft.PeftModel.from_pretrained` reads them, and beside
    them what `save_model` has beside the detector.

    Args:
        weights: the trained module's by name, on the CPU, whole.
        base: hub id or folder of the model that they belong on.
    """
    with replacing(folder) as partial:
        config = copy.deepcopy(tuning.config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(partial)
        adapters = tuning.adapters(_below(weights, DETECTOR_PREFIX))
        save_file(adapters, partial / ADAPTER, metadata={"format": "pt"})
        (partial / "README.md").write_text(ADAPTER_README)
        _save_rest(partial, weights, processor, knowledge)


def _save_rest(folder: Path, weights: dict[str, Tensor], processor: Any, knowledge: Knowledge | None) -> None:
    """What is no detector: processor, heads and knowledge."""
    processor.save_pretrained(folder)
    if heads := _below(weights, HEADS_PREFIX):
        save_file(heads, folder / HEADS)
    if knowledge is not None:
        # The facts ride in the file's header, so that they and the arrays are of one moment.
        save_arrays(knowledge.arrays, folder / KNOWLEDGE, metadata={"facts": json.dumps(knowledge.facts)})


def load_heads(folder: Path, module: nn.Module) -> None:
    """Give `module` the heads that lie in `folder`, if its kind has any."""
    if hasattr(module, "heads"):
        module.heads.load_state_dict(load_file(folder / HEADS))


def load_knowledge(folder: Path) -> Knowledge:
    with safe_open(folder / KNOWLEDGE, framework="numpy") as file:
        return Knowledge(json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()})


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
