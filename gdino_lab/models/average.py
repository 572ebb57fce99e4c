"""An exponential moving average of the weights: steadier than the last step's, and what is evaluated and kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """fp32 averages of the parameters that move; under ZeRO-3 of this rank's shard of each.

    The decay warms up as min(decay, (1 + n) / (10 + n)) after n updates, so that the random start is soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        self.updates = 0
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.averages = [stored(parameter).detach().float().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(stored(parameter).to(average.dtype), 1 - decay)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The averages stand in for the weights inside the block."""
        kept = [stored(parameter).clone() for parameter in self.parameters]
        self._write(self.averages)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the weights as they are."""
        self.updates = 0
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.copy_(stored(parameter))

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            stored(parameter).copy_(value)


def stored(parameter: nn.Parameter) -> Tensor:
    """Where a parameter's values lie between two steps: whole, or under ZeRO-3 this rank's shard."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data
