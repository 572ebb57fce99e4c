"""Whether a restored model is the one that was saved: by its answers to a fixed image, and by its validation score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Share by which an answer may differ, by the coarser of the two precisions; the same weights answer the same but for the
# order in which a machine adds.
FULL, TF32, HALF = 1e-4, 1e-2, 3e-2
# Share by which a score may differ: on the same layout, and on another (ranks, ZeRO stage, offload, precision), whose
# rounding may swap two images.
SCORE_SAME, SCORE_ELSEWHERE = 0.01, 0.05

Digest = dict[str, list[float]]


def digest_of(outputs: Mapping[str, Any]) -> Digest:
    """Mean, mean size and root mean square of every floating-point output; none depends on the order of the queries."""
    names = sorted(name for name, values in outputs.items() if isinstance(values, Tensor) and values.is_floating_point())
    # All are fetched at once: a GPU is waited for once.
    return dict(zip(names, torch.stack([sizes_of(outputs[name]) for name in names]).tolist(), strict=True))


def sizes_of(values: Tensor) -> Tensor:
    """The three numbers, in float64, of the elements that are finite: logits beyond the prompt are -inf."""
    finite = torch.isfinite(values)
    values = values.double().where(finite, 0)
    mean, size, square = torch.stack([values.sum(), values.abs().sum(), values.square().sum()]) / finite.sum()
    return torch.stack([mean, size, square.sqrt()])


def tolerance_of(*precisions: Mapping[str, Any]) -> float:
    """Of answers, for settings.precision as the checkpoint has it and as it is now."""
    half = any(each["weights"] != "fp32" or each["autocast"] for each in precisions)
    return HALF if half else TF32 if any(each["tf32"] for each in precisions) else FULL


def differing_answers(then: Digest, now: Digest, tolerance: float) -> list[str]:
    """A complaint, with both numbers, about the output that differs most, if by more than `tolerance` of its size."""
    worst, told = tolerance, []
    for name, known in then.items():
        if name not in now:
            return [f"output {name} of the fixed image: the checkpoint has one, this model none"]
        for label, before, after in zip(("mean", "mean size", "root mean square"), known, now[name], strict=True):
            off = abs(after - before) / max(known[2], 1e-12)
            if not off <= worst:  # NaN is no proof either
                worst = off
                told = [
                    f"output {name} of the fixed image: {label} {before:.6g} in the checkpoint, {after:.6g} now "
                    f"({off:.2g} of its size; allowed {tolerance:g})"
                ]
    return told


def differing_score(then: float, now: float | None, tolerance: float) -> list[str]:
    """A complaint, with both numbers, if the validation score is another one."""
    if now is not None and abs(now - then) <= tolerance * max(abs(then), 1e-12):
        return []
    return [f"validation score: {then:.6g} in the checkpoint, {now} now (allowed {100 * tolerance:g} % apart)"]
