"""COCO's average precision of boxes, computed by faster-coco-eval, which equals pycocotools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from faster_coco_eval.core.coco import COCO
from faster_coco_eval.core.faster_eval_api import COCOeval_faster


@dataclass(frozen=True)
class Truth:
    """The objects of an image: N boxes.

    Attributes:
        boxes: (N, 4), xyxy in pixels.
        classes: (N,) int, positions in the list of names.
        crowd: (N,) bool, True for a region that holds several objects: detections in it count neither way.
        height: of the image, in pixels.
        width: of the image, in pixels.
        areas: (N,) of the objects, in pixels, which makes them small (up to 32 x 32), medium or large (from 96 x 96);
            None: their boxes'.
    """

    boxes: np.ndarray
    classes: np.ndarray
    crowd: np.ndarray
    height: int
    width: int
    areas: np.ndarray | None = None


@dataclass(frozen=True)
class Detections:
    """What a model found in an image: M boxes (M, 4), xyxy in pixels, their scores (M,) and classes (M,) int."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def mean_ap(
    truths: Sequence[Truth], detections: Sequence[Detections], names: Sequence[str], max_detections: int = 100
) -> dict[str, float | None]:
    """COCO's numbers, each in [0, 1], or None where no object that counts is there to be found (COCO's -1).

    Args:
        truths: one an image.
        detections: one an image, in the same order. Between equal scores the earlier image goes first, so that only
            among those does the order of the images matter.
        names: what the classes are called.
        max_detections: how many of an image's detections of a class count, the best first.

    Returns:
        ap (mean over IoU 0.50 to 0.95 and over classes), ap50, ap75, ap_small, ap_medium, ap_large, ar (recall, mean
        as for ap), then for each class ap/NAME and ap50/NAME.

    Raises:
        ValueError: a class that `names` does not have, or not as many detections as truths.
    """
    for kind, classes in ((type(each).__name__, each.classes) for each in (*truths, *detections)):
        if len(classes) and not 0 <= np.min(classes) <= np.max(classes) < len(names):
            raise ValueError(f"{kind}: classes {np.min(classes)} to {np.max(classes)}, names for 0 to {len(names) - 1}")
    pairs = list(zip(truths, detections, strict=True))
    head = {
        "images": [{"id": i, "height": truth.height, "width": truth.width} for i, truth in enumerate(truths)],
        "categories": [{"id": c, "name": name} for c, name in enumerate(names)],
    }
    found = COCOeval_faster(
        COCO(head | {"annotations": _annotations([truth for truth, _ in pairs])}, print_function=_quiet),
        COCO(head | {"annotations": _annotations([found for _, found in pairs])}, print_function=_quiet),
        "bbox",
        print_function=_quiet,
    )
    found.params.maxDets = [max_detections]
    found.evaluate()
    found.accumulate()
    # (10 IoUs, 101 recalls, classes, 4 areas) and (10 IoUs, classes, 4 areas); the areas: all, small, medium, large.
    precision, recall = found.eval["precision"][..., 0], found.eval["recall"][..., 0]
    numbers = {
        "ap": precision[..., 0],
        "ap50": precision[0, ..., 0],
        "ap75": precision[5, ..., 0],
        "ap_small": precision[..., 1],
        "ap_medium": precision[..., 2],
        "ap_large": precision[..., 3],
        "ar": recall[..., 0],
    }
    for c, name in enumerate(names):
        numbers |= {f"ap/{name}": precision[:, :, c, 0], f"ap50/{name}": precision[0, :, c, 0]}
    return {name: _mean(values[values > -1]) for name, values in numbers.items()}


def _mean(defined: np.ndarray) -> float | None:
    return float(defined.mean()) if defined.size else None


def _annotations(images: Sequence[Truth] | Sequence[Detections]) -> list[dict]:
    """COCO's form of them, with ids from 1: 0 stands for "unmatched"."""
    rows: list[dict] = []
    for i, image in enumerate(images):
        boxes = np.asarray(image.boxes, dtype=np.float64).reshape(-1, 4)
        sizes = boxes[:, 2:] - boxes[:, :2]
        key, values = ("iscrowd", image.crowd) if isinstance(image, Truth) else ("score", image.scores)
        areas = getattr(image, "areas", None)
        areas = sizes.prod(axis=1) if areas is None else areas
        for corner, size, area, c, value in zip(
            boxes[:, :2].tolist(), sizes.tolist(), areas, image.classes, values, strict=True
        ):
            row = {"id": len(rows) + 1, "image_id": i, "category_id": int(c), key: float(value)}
            rows.append(row | {"bbox": [*corner, *size], "area": float(area)})
    return rows


def _quiet(*_) -> None:
    """In place of the evaluator's printing."""
