"""Boxes as tensors: forms and overlaps. cxcywh is centre, width and height; xyxy the two corners."""

from __future__ import annotations

import torch
from torch import Tensor


def corners(boxes: Tensor) -> Tensor:
    """(..., 4) cxcywh -> xyxy."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], -1)


def centred(boxes: Tensor) -> Tensor:
    """(..., 4) xyxy -> cxcywh."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], -1)


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """(...,): GIoU (Rezatofighi et al. 2019) of xyxy boxes (..., 4), which broadcast; -1 to 1. Two points give 0."""
    overlap = _area(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    union = _area(a[..., :2], a[..., 2:]) + _area(b[..., :2], b[..., 2:]) - overlap
    hull = _area(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    tiny = torch.finfo(a.dtype).tiny
    return overlap / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def _area(low: Tensor, high: Tensor) -> Tensor:
    width, height = (high - low).clamp(min=0).unbind(-1)
    return width * height
