"""What is watched while a run trains: losses and throughput between two log lines, and which parameters get a gradient."""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

log = logging.getLogger(__name__)


class Meter:
    """Loss terms and throughput between two log lines; reads the device only when asked."""

    def __init__(self, effective_batch: int):
        self.effective_batch = effective_batch
        self.terms: list[dict[str, Tensor]] = []
        self.epoch: list[float] = []
        self.since = time.perf_counter()

    def restart(self, keep: bool = False) -> None:
        """A new epoch, or with `keep` the rest of one: evaluating and saving is not the training's time."""
        self.since = time.perf_counter()
        if not keep:
            self.epoch = []

    def add(self, terms: dict[str, Tensor]) -> None:
        self.terms.append(terms)

    def read(self) -> dict[str, float]:
        """Mean loss terms over steps and ranks, their sum as `loss`, and images/s; starts anew. Collective."""
        names = list(self.terms[0])
        values = torch.stack([torch.stack([terms[name] for name in names]) for terms in self.terms]).mean(0)
        dist.all_reduce(values)
        values = (values / dist.get_world_size()).tolist()
        seconds, count = time.perf_counter() - self.since, len(self.terms)
        self.terms, self.since = [], time.perf_counter()
        loss = sum(values)
        self.epoch += [loss] * count
        return {
            "loss": loss,
            **{f"loss/{name}": value for name, value in zip(names, values, strict=True)},
            "images_per_s": count * self.effective_batch / seconds,
        }

    def pending(self) -> dict[str, Tensor]:
        """Loss terms since the last reading, one value a step: what a resumed run has to go on from."""
        names = self.terms[0] if self.terms else ()
        return {name: torch.stack([terms[name] for terms in self.terms]).float().cpu() for name in names}

    def resume(self, pending: dict[str, Tensor], epoch: list[float], device: torch.device) -> None:
        """The inverse of `pending`, with the losses read so far in this epoch."""
        steps = max(map(len, pending.values()), default=0)
        self.terms = [{name: values[step].to(device) for name, values in pending.items()} for step in range(steps)]
        self.epoch = list(epoch)

    def epoch_loss(self) -> float:
        """Mean loss of the epoch's steps."""
        return float(np.mean(self.epoch))


class GradientWatch:
    """Notes which trainable parameters get a gradient in the first step."""

    def __init__(self, module: nn.Module):
        self.silent = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.hooks = [
            parameter.register_hook(partial(self._heard, name))
            for name, parameter in list(self.silent.items())
        ]

    def _heard(self, name: str, gradient: Tensor) -> None:
        self.silent.pop(name, None)

    def silent_modules(self) -> dict[str, int]:
        """Modules whose parameters got none, with the number of tensors; said once, and the hooks go."""
        for hook in self.hooks:
            hook.remove()
        modules = Counter(name.rsplit(".", 1)[0] for name in self.silent)
        if modules and dist.get_rank() == 0:
            log.warning(
                "%d trainable parameter tensors got no gradient in the first step, no loss reaches them:\n%s",
                len(self.silent),
                "\n".join(f"  {module} ({count})" for module, count in modules.items()),
            )
        return dict(modules)
