"""The anomaly objective: pure functions of fp32 tensors. Shapes: B images, S tokens of all levels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def anomaly_losses(
    global_logit: Tensor,
    local_logits: Tensor,
    kind_logits: Tensor,
    *,
    anomalous: Tensor,
    seen_locally: Tensor,
    changed: Tensor,
    kinds: Tensor,
    valid: Tensor,
    top_fraction: float,
) -> dict[str, Tensor]:
    """The terms of the objective, unweighted.

    Each is a mean over images of a number that depends on that image alone, so that micro-batches add up to the batch.

    Args:
        global_logit: (B,), one logit an image.
        local_logits: (B, S), one logit a token.
        kind_logits: (B, F, K), what kind of part the F tokens of the finest level show; 0 is background.
        anomalous: (B,), 1.0 where the image is.
        seen_locally: (B,), 1.0 where the local logits can know: a missing part is nowhere to be seen.
        changed: (B, S), 1.0 where a token's pixels were changed.
        kinds: (B, F, K), each kind's share of a token's pixels.
        valid: (B, S) bool, False for padding.
        top_fraction: share of the tokens that speaks for the image.

    Raises:
        ValueError: a target is not shaped like its logits (broadcasting would train on nonsense).
    """
    for name, logits, target in (
        ("anomalous", global_logit, anomalous),
        ("seen_locally", global_logit, seen_locally),
        ("changed", local_logits, changed),
        ("kinds", kind_logits, kinds),
    ):
        if logits.shape != target.shape:
            raise ValueError(f"{name} has shape {tuple(target.shape)}, its logits {tuple(logits.shape)}")
    top = top_mean(local_logits, valid, top_fraction)
    changed = changed * anomalous[:, None]
    return {
        "global": F.binary_cross_entropy_with_logits(global_logit, anomalous),
        "top": (seen_locally * F.binary_cross_entropy_with_logits(top, anomalous, reduction="none")).mean(),
        "focal": (seen_locally * focal(local_logits, changed, valid)).mean(),
        "dice": (seen_locally * dice(local_logits, changed, valid)).mean(),
        "parts": soft_cross_entropy(kind_logits, kinds, valid[:, : kinds.shape[1]]).mean(),
    }


def top_mean(logits: Tensor, valid: Tensor, fraction: float) -> Tensor:
    """(B,): the mean of the highest `fraction` of each image's valid tokens, at least one token."""
    ordered = logits.masked_fill(~valid, -torch.inf).sort(dim=1, descending=True).values
    count = (valid.sum(1) * fraction).ceil().clamp(min=1)
    chosen = torch.arange(logits.shape[1], device=logits.device)[None] < count[:, None]
    return ordered.masked_fill(~chosen, 0.0).sum(1) / count


def focal(logits: Tensor, target: Tensor, valid: Tensor, gamma: float = 2.0) -> Tensor:
    """(B,): focal loss (Lin et al. 2017, eq. 4, without alpha), summed over valid tokens and divided by the number of
    positives, or by 1 % of the tokens where there are fewer."""
    cross_entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    probability_of_truth = torch.exp(-cross_entropy)
    summed = ((1 - probability_of_truth) ** gamma * cross_entropy * valid).sum(1)
    return summed / torch.maximum((target * valid).sum(1), 0.01 * valid.sum(1))


def dice(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """(B,): soft Dice loss (Milletari et al. 2016), smoothed by 1."""
    probability = logits.sigmoid() * valid
    overlap = 2 * (probability * target).sum(1)
    return 1 - (overlap + 1) / (probability.sum(1) + (target * valid).sum(1) + 1)


def soft_cross_entropy(logits: Tensor, shares: Tensor, valid: Tensor) -> Tensor:
    """(B,): cross entropy of (B, F, K) logits with shares that sum to 1 over K, mean over valid tokens."""
    per_token = -(shares * logits.log_softmax(-1)).sum(-1)
    return (per_token * valid).sum(1) / valid.sum(1).clamp(min=1)
