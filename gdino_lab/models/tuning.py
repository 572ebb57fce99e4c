"""Which parameters move: all of them, low-rank adapters, or none of the detector's. Heads always move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from peft import LoraConfig, LoraModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from gdino_lab.errors import ConfigurationError, nearest


class Tuning(Protocol):
    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        """The detector with `requires_grad` set as this tuning wants it, adapters put in."""

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: what moves, and how fast, of the detector with its heads."""

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The prepared detector's weights as plain transformers names them, adapters merged."""


class Full:
    """Every parameter moves, but for those a pattern of `freeze` finds.

    Args:
        freeze: regular expressions, searched for in the names of the detector's parameters.
        lr_factors: regular expression -> factor on the learning rate, for parameters of the detector or of the heads;
            the first that is found in a name counts, parameters without any have factor 1.

    Raises:
        ConfigurationError: a pattern that is none or finds nothing, or a negative factor.
    """

    def __init__(self, freeze: Sequence[str] = (), lr_factors: Mapping[str, float] | None = None):
        self.freeze, self.lr_factors = list(freeze), dict(lr_factors or {})
        complaints = _pattern_complaints("tuning.freeze", self.freeze)
        complaints += _pattern_complaints("tuning.lr_factors", self.lr_factors)
        complaints += [
            f"tuning.lr_factors.{pattern}={factor}: allowed is a number of 0 or more"
            for pattern, factor in self.lr_factors.items()
            if not isinstance(factor, (int, float)) or factor < 0
        ]
        if complaints:
            raise ConfigurationError(complaints)

    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        detector.requires_grad_(True)
        _refuse_idle("tuning.freeze", self.freeze, [name for name, _ in detector.named_parameters()])
        for name, parameter in detector.named_parameters():
            if any(re.search(pattern, name) for pattern in self.freeze):
                parameter.requires_grad_(False)
        return detector

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        moving = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        _refuse_idle("tuning.lr_factors", self.lr_factors, list(moving))
        groups: dict[float, list[nn.Parameter]] = {1.0: []}  # first, so that the rate that is logged is optimizer.lr
        for name, parameter in moving.items():
            found = (factor for pattern, factor in self.lr_factors.items() if re.search(pattern, name))
            groups.setdefault(float(next(found, 1.0)), []).append(parameter)
        return [{"params": parameters, "lr": factor * lr} for factor, parameters in groups.items() if parameters]

    def plain(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


class Frozen:
    """No parameter of the detector moves."""

    def prepare(self, detector: PreTrainedModel) -> PreTrainedModel:
        return detector.requires_grad_(False)

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        return one_group(module, lr)

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

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        return one_group(module, lr)

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

    def adapters(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the prepared detector's weights the adapters, as peft names them in a file."""
        return {
            f"base_model.model.{name.replace('.default.', '.')}": weight.contiguous()
            for name, weight in weights.items()
            if ".lora_" in name
        }


def one_group(module: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Whatever moves, at one rate; no group where nothing does."""
    moving = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [{"params": moving, "lr": lr}] if moving else []


def _pattern_complaints(key: str, patterns: Iterable[str]) -> list[str]:
    complaints = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            complaints.append(f"{key}: {pattern!r} is no regular expression ({error})")
    return complaints


def _refuse_idle(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """A pattern that finds no parameter is a mistake, not a wish."""
    modules = sorted({".".join(name.split(".")[:3]) for name in names})
    complaints = [
        f"{key}: {pattern!r} is found in no parameter's name; there are {', '.join(modules)}."
        for pattern in patterns
        if not any(re.search(pattern, name) for name in names)
    ]
    if complaints:
        raise ConfigurationError(complaints)
