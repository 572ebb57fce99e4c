"""A loss, gradient or evaluation that is NaN or infinite, and the module where that began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class NotFinite(FloatingPointError):
    """The loss, a gradient or an evaluation is NaN or infinite.

    `figures`: what (loss, gradient or evaluation), step, terms (of the loss that are not finite), inputs (of the model that are
    not), identity (of the batch), and what find_not_finite found; empty where only another rank's loss is not finite.
    """

    def __init__(self, figures: dict[str, Any]):
        self.figures = figures
        super().__init__(_cause(figures) if figures else "the loss of another rank is not finite")


def _cause(figures: dict[str, Any]) -> str:
    cause = f"the {figures['what']} is not finite at step {figures['step']}"
    if figures.get("inputs"):
        return f"{cause}: the batch itself is not, in {', '.join(figures['inputs'])}"
    if figures.get("module"):
        cause += (
            f": the first module with a non-finite output is {figures['module']} ({figures['type']}), "
            f"{figures['nan']} NaN and {figures['infinite']} infinite of {figures['of']}"
        )
        if figures["weights_finite"] is False:
            return f"{cause}; its own weights are not finite: an earlier step broke them"
        return f"{cause}; its weights are finite" if figures["weights_finite"] else cause
    if figures.get("terms"):
        return f"{cause}: every module's output is finite, the loss terms {', '.join(figures['terms'])} are not"
    return f"{cause}: every module's output is finite"


def find_not_finite(module: nn.Module, forward: Callable[[], Any]) -> dict[str, Any]:
    """Call `forward` and find the first module, in order of execution, whose output is NaN or infinite.

    Minus infinity alone is what masks are filled with, so it counts only in the output of torch's own layers.

    Returns:
        module, type, nan and infinite (numbers in its output), of, inputs_finite and weights_finite (None where they
        cannot be seen, as under ZeRO-3); empty where every output is finite.
    """
    found: dict[str, Any] = {}

    def look(name: str, each: nn.Module, inputs: Any, output: Any) -> None:
        if found:
            return
        own = type(each).__module__.startswith("torch.nn")
        for tensor in _tensors(output):
            nan, positive = int(tensor.isnan().sum()), int(tensor.isposinf().sum())
            infinite = positive + int(tensor.isneginf().sum())
            if nan or positive or own and infinite:
                weights = [weight for weight in each.parameters(recurse=False) if weight.numel()]
                found.update(
                    module=name or "the whole model",
                    type=type(each).__name__,
                    nan=nan,
                    infinite=infinite,
                    of=tensor.numel(),
                    inputs_finite=all(bool(given.isfinite().all()) for given in _tensors(inputs)),
                    weights_finite=all(bool(weight.isfinite().all()) for weight in weights) if weights else None,
                )
                return

    hooks = [each.register_forward_hook(partial(look, name)) for name, each in module.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
