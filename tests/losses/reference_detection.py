"""The detection objective from its formulas: loops over images, queries, tokens and boxes in double precision, and the
best matching found by trying them all. Numbers are floats where no gradient is asked for, else tensors of one element.
"""

from __future__ import annotations

import math
from itertools import permutations

import torch
from torch import Tensor

from gdino_lab.losses.detection import Targets, Weights

Pairs = list[tuple[int, int]]  # of a query and a box


def giou(a, b):
    """Rezatofighi et al. 2019, algorithm 1, of two cxcywh boxes."""
    ax0, ay0, ax1, ay1 = a[0] - a[2] / 2, a[1] - a[3] / 2, a[0] + a[2] / 2, a[1] + a[3] / 2
    bx0, by0, bx1, by1 = b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2
    width, height = min(ax1, bx1) - max(ax0, bx0), min(ay1, by1) - max(ay0, by0)
    overlap = width * height if width > 0 and height > 0 else 0 * width
    union = a[2] * a[3] + b[2] * b[3] - overlap
    hull = (max(ax1, bx1) - min(ax0, bx0)) * (max(ay1, by1) - min(ay0, by0))
    return overlap / union - (hull - union) / hull


def l1(a, b):
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def focal(logit: Tensor, positive: bool, alpha: float) -> Tensor:
    """Lin et al. 2017, eq. 5, with gamma 2."""
    signed = logit if positive else -logit
    balance = alpha if positive else 1 - alpha
    return balance * (1 - torch.sigmoid(signed)) ** 2 * torch.logaddexp(torch.zeros_like(signed), -signed)


def class_cost(logits: list[float], tokens: list[bool], alpha: float) -> float:
    """Mean over the tokens of a class: what the focal loss of a positive is above that of a negative."""
    costs = []
    for logit, named in zip(logits, tokens, strict=True):
        if named:
            p = 1 / (1 + math.exp(-logit))
            positive = alpha * (1 - p) ** 2 * -math.log(p + 1e-8)
            costs.append(positive - (1 - alpha) * p**2 * -math.log(1 - p + 1e-8))
    return sum(costs) / max(1, len(costs))


def pair_costs(logits: Tensor, boxes: Tensor, tokens: Tensor, truths: Tensor, weights: Weights) -> list[list[float]]:
    """[query][box], from (Q, L) logits, (Q, 4) boxes, (T, L) tokens and (T, 4) truths of an image."""
    by_class, by_box, by_giou = weights.cost
    return [
        [
            by_class * class_cost(row, named, weights.alpha) + by_box * l1(box, truth) - by_giou * giou(box, truth)
            for named, truth in zip(tokens.tolist(), truths.tolist(), strict=True)
        ]
        for row, box in zip(logits.tolist(), boxes.tolist(), strict=True)
    ]


def matchings(costs: list[list[float]]) -> list[tuple[float, Pairs]]:
    """Every way to pair as many queries and boxes as possible, with its total cost, the cheapest first."""
    queries, count = len(costs), len(costs[0])
    if queries >= count:
        options = [[(q, t) for t, q in enumerate(chosen)] for chosen in permutations(range(queries), count)]
    else:
        options = [list(enumerate(chosen)) for chosen in permutations(range(count), queries)]
    return sorted((sum(costs[q][t] for q, t in pairs), sorted(pairs)) for pairs in options)


def image_matchings(logits: Tensor, boxes: Tensor, targets: Targets, weights: Weights, image: int):
    """`matchings` of one image of (B, Q, L) logits and (B, Q, 4) boxes; one that is empty where it has no boxes."""
    count = targets.counts[image]
    if not count:
        return [(0.0, [])]
    truths, tokens = targets.boxes[image, :count].double(), targets.tokens[image, :count]
    return matchings(pair_costs(logits[image].double(), boxes[image].double(), tokens, truths, weights))


def detection_losses(
    logits: Tensor, boxes: Tensor, text_mask: Tensor, targets: Targets, normaliser: float, weights: Weights
) -> dict[str, Tensor]:
    """As gdino_lab.losses.detection's, of fp64 logits and boxes."""
    sets = len(logits)
    terms = {}
    for s in range(sets):
        name = "_enc" if s == 0 else "" if s == sets - 1 else f"_{s - 1}"
        by_class = by_box = by_giou = torch.zeros((), dtype=torch.float64)
        for b in range(logits.shape[1]):
            _, pairs = image_matchings(logits[s].detach(), boxes[s].detach(), targets, weights, b)[0]
            box_of = dict(pairs)
            for q in range(logits.shape[2]):
                for token in range(logits.shape[3]):
                    if text_mask[b, token]:
                        positive = q in box_of and bool(targets.tokens[b, box_of[q], token])
                        by_class = by_class + focal(logits[s, b, q, token], positive, weights.alpha)
            for q, t in pairs:
                truth = targets.boxes[b, t].double()
                by_box = by_box + l1(boxes[s, b, q], truth)
                by_giou = by_giou + 1 - giou(boxes[s, b, q], truth)
        sums = {"class": by_class, "box": by_box, "giou": by_giou}
        for weight, (term, value) in zip(weights.loss, sums.items(), strict=True):
            terms[term + name] = weight * value / normaliser
    return terms
