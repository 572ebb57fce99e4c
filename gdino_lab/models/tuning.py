"""Which parameters move: all of them, low-rank adapters, or none of the detector's. Heads always move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peft import LoraConfig, LoraModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from gdino_lab.errors import ConfigurationError, nearest


class Tuning(Protocol):
    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        """The detector with `requires_grad` set as this tuning wants it, adapters put in."""

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The prepared detector's weights as plain transformers names them, adapters merged."""


class Full:
    """Every parameter moves."""

    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        return detector.requires_grad_(True)

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


class Frozen:
    """No parameter of the detector moves."""

    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        return detector.requires_grad_(False)

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


class Lora:
    """Low-rank adapters (Hu et al. 2021) on every linear layer that bears one of the names in `target_modules`.

    Raises:
        ConfigurationError: rank below 1, or a name that no linear layer of the detector bears.
    """

    def __init__(self, rank: int, alpha: float, dropout: float, target_modules: Sequence[str]):
        if rank < 1:
            raise ConfigurationError(f"tuning.rank={rank}: allowed is 1 or more")
        self.config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules), bias="none"
        )

    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        layers = {name.rpartition(".")[2] for name, layer in detector.named_modules() if isinstance(layer, nn.Linear)}
        complaints = [
            f"tuning.target_modules: no linear layer is named {target}; there are {', '.join(sorted(layers))}."
            + nearest(target, layers)
            for target in sorted(self.config.target_modules)
            if target not in layers
        ]
        if complaints:
            raise ConfigurationError(complaints)
        # peft looks for tied embeddings, and transformers does not know where this model keeps its own.
        detector.get_input_embeddings = detector.model.text_backbone.get_input_embeddings
        LoraModel(detector, self.config, adapter_name="default")  # puts the adapters in, in place
        return detector

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """W + (alpha / rank) B A, eq. 3 of the paper."""
        scale = self.config.lora_alpha / self.config.r
        merged = {}
        for name, weight in weights.items():
            if ".lora_" in name:
                continue
            layer, base, kind = name.rpartition(".base_layer.")
            if base and kind == "weight":
                down, up = (weights[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
                weight = (weight.float() + scale * up @ down).to(weight.dtype)
            merged[f"{layer}.{kind}" if base else name] = weight
        return merged
