"""A clash of dtypes, told by the module where it happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# What torch says: "mat1 and mat2 must have the same dtype", "expected scalar type Float but found BFloat16", "Input type
# (float) and bias type (c10::BFloat16) should be the same", "expected m1 and m2 to have the same dtype", ...
SAID = re.compile(r"same dtype|scalar type|Input type .* should be the same|not implemented for '(Half|BFloat16)'", re.DOTALL)


class DtypeClash(RuntimeError):
    """A module got another dtype than its weights have."""


@contextmanager
def telling_clashes(module: nn.Module, again: Callable[[], Any]) -> Iterator[None]:
    """An error about dtypes inside the block becomes one that names the module.

    Args:
        module: whose parts may be at fault.
        again: repeats what failed; called once, with hooks, only after a failure.

    Raises:
        DtypeClash: with the module's path, the dtypes that came in and those of its weights.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not SAID.search(str(error)):
            raise
        if (told := describe_failure(module, again)) is None:
            raise
        raise DtypeClash(f"{told}: {str(error).splitlines()[0]}") from error


def describe_failure(module: nn.Module, again: Callable[[], Any]) -> str | None:
    """Where `again` fails: the innermost module then running, in words; None where it does not fail this time."""
    running: list[tuple[str, nn.Module, list[torch.dtype]]] = []

    def enter(name: str, part: nn.Module, args: tuple, kwargs: dict) -> None:
        running.append((name, part, [each.dtype for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
        hooks.append(part.register_forward_hook(leave))
    try:
        again()
    except RuntimeError:
        name, part, incoming = running[-1]
        weights = [parameter.dtype for parameter in part.parameters(recurse=False)]
        return (
            f"{name or 'the module itself'} ({type(part).__name__}) got {_names(incoming)}, its weights are {_names(weights)}; "
            "cast what comes in, or choose another precision"
        )
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _names(dtypes: list[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(str(each).removeprefix("torch.") for each in dtypes)) or "none"
