"""The Grounding DINO criterion (Liu et al. 2023, after DINO and DETR): match predictions to boxes, then score them.

Every image has its own prompt, so a target is not a class number but the set of prompt tokens that name its class.
All of it is computed in fp32, whatever the model's dtype. Shapes: S sets of predictions (encoder proposals, then each
decoder layer, the final one last), B images, Q queries, L prompt tokens, T boxes of the image that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from gdino_lab.losses.boxes import corners, generalised_iou

GAMMA = 2.0
TERMS = ("class", "box", "giou")
# Pairs queries and boxes, given costs (S, B, Q, T) and the boxes of each image; see `least_cost`.
Assign = Callable[[Tensor, Sequence[int]], Tensor]
# Stands for a cost that is not finite: such a pair is matched only where nothing else is left.
PROHIBITIVE = 1e6


@dataclass(frozen=True)
class Targets:
    """What there is to find.

    boxes: (B, T, 4) fp32, cxcywh as fractions of the image without its padding; rows from counts[b] on are padding.
    tokens: (B, T, L) bool, the tokens of each box's class.
    counts: boxes of each image.
    """

    boxes: Tensor
    tokens: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """loss and cost: weights of TERMS in the loss and in the matching; alpha: of positives in the focal loss."""

    loss: tuple[float, float, float] = (2.0, 5.0, 2.0)
    cost: tuple[float, float, float] = (1.0, 5.0, 2.0)
    alpha: float = 0.25


def detection_losses(
    logits: Tensor,
    boxes: Tensor,
    text_mask: Tensor,
    targets: Targets,
    normaliser: float,
    weights: Weights,
    assign: Assign | None = None,
) -> dict[str, Tensor]:
    """The weighted terms, each a sum over boxes (class: over queries and tokens) divided by `normaliser`.

    Args:
        logits: (S, B, Q, L), any dtype; columns outside `text_mask` may hold -inf.
        boxes: (S, B, Q, 4) cxcywh, fractions of the image without its padding.
        text_mask: (B, L) bool, False for padding.
        normaliser: boxes that the sums are divided by: those of the whole effective batch, as a mean over its passes,
            so that micro-batches add up to the batch.
        assign: what pairs queries and boxes, by default `least_cost`.

    Returns:
        class, box and giou of the final layer; class_0, ... of the auxiliary layers; class_enc, ... of the encoder.
    """
    logits, boxes = _at_least_fp32(logits), _at_least_fp32(boxes)
    image, query, box = match(logits.detach(), boxes.detach(), targets, weights, assign)
    positive = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    terms: dict[str, Tensor] = {}
    for number, name in enumerate(set_names(len(logits))):
        found = boxes[number, image[number], query[number]]
        true = targets.boxes[image[number], box[number]].to(found.dtype)
        positive[number, image[number], query[number]] = targets.tokens[image[number], box[number]]
        sums = (
            focal_loss(logits[number], positive[number], text_mask[:, None], weights.alpha),
            (found - true).abs().sum(),
            (1 - generalised_iou(corners(found), corners(true))).sum(),
        )
        for term, weight, value in zip(TERMS, weights.loss, sums, strict=True):
            terms[term + name] = weight * value / normaliser
    return terms


def set_names(sets: int) -> list[str]:
    """What is appended to a term's name for each of the S sets."""
    return ["_enc", *(f"_{layer}" for layer in range(sets - 2)), ""]


@torch.no_grad()
def match(
    logits: Tensor, boxes: Tensor, targets: Targets, weights: Weights, assign: Assign | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign queries to boxes one to one at the least total cost (Carion et al. 2020), for every set at once.

    The costs of all sets and images cross to the host in a single transfer, the assignment comes back in one.

    Returns:
        image, query and box, each (S, M) int64 on the logits' device, M = sum over images of min(Q, boxes).
    """
    costs = match_costs(logits, boxes, targets, weights).nan_to_num(PROHIBITIVE, PROHIBITIVE, PROHIBITIVE)
    image, query, box = (assign or least_cost)(costs, targets.counts).to(logits.device, non_blocking=True).unbind(1)
    return image, query, box


def least_cost(costs: Tensor, counts: Sequence[int]) -> Tensor:
    """(S, 3, M) int64 on the host: image, query and box of every pair, from costs (S, B, Q, T)."""
    found = []
    for per_image in costs.cpu().numpy():
        pairs = [
            (index, *linear_sum_assignment(cost[:, :count]))
            for index, (cost, count) in enumerate(zip(per_image, counts, strict=True))
        ]
        found.append(
            [
                np.concatenate([np.full(len(queries), index) for index, queries, _ in pairs]),
                np.concatenate([queries for _, queries, _ in pairs]),
                np.concatenate([chosen for _, _, chosen in pairs]),
            ]
        )
    return torch.from_numpy(np.array(found, np.int64))


def match_costs(logits: Tensor, boxes: Tensor, targets: Targets, weights: Weights) -> Tensor:
    """(S, B, Q, T): weighted cost of every pair. The class cost is the mean, over the tokens of the class, of how much
    the focal loss would change (Deformable DETR's)."""
    probability = logits.sigmoid()
    positive = weights.alpha * (1 - probability) ** GAMMA * -(probability + 1e-8).log()
    negative = (1 - weights.alpha) * probability**GAMMA * -(1 - probability + 1e-8).log()
    share = targets.tokens.to(probability.dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    class_cost = torch.einsum("sbql,btl->sbqt", positive - negative, share)
    true = targets.boxes.to(boxes.dtype)
    box_cost = (boxes[:, :, :, None] - true[:, None]).abs().sum(-1)
    giou_cost = -generalised_iou(corners(boxes)[:, :, :, None], corners(true)[:, None])
    return sum(weight * cost for weight, cost in zip(weights.cost, (class_cost, box_cost, giou_cost), strict=True))


def focal_loss(logits: Tensor, positive: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Sum over valid elements of the focal loss with balance `alpha` (Lin et al. 2017, eq. 5); `valid` broadcasts."""
    logits = logits.masked_fill(~valid, 0.0)  # -inf there would give NaN gradients
    target = positive.to(logits.dtype)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    probability_of_truth = torch.exp(-cross_entropy)
    balance = alpha * target + (1 - alpha) * (1 - target)
    return (balance * (1 - probability_of_truth) ** GAMMA * cross_entropy * valid).sum()


def _at_least_fp32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
