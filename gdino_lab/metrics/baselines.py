"""Trivial image scorers: what a tuned model has to beat before its number means anything.

Each takes the normal training images and the images to score, lists of (H, W, 3) uint8 arrays, and returns one score
an image, higher is more anomalous. All but `random` are |z|: how far a number lies from what training images show.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
from PIL import Image
from scipy import ndimage

Images = list[np.ndarray]
Scorer = Callable[[Images, Images], np.ndarray]


def random_score(normal: Images, images: Images) -> np.ndarray:
    """A number from the pixels' checksum: fixed for an image, unrelated to what it shows."""
    return np.array([crc32(np.ascontiguousarray(image).tobytes()) / 2**32 for image in images])


def _deviation(statistic: Callable[[np.ndarray], float]) -> Scorer:
    def score(normal: Images, images: Images) -> np.ndarray:
        usual = np.array([statistic(image) for image in normal])
        return np.abs(np.array([statistic(image) for image in images]) - usual.mean()) / (usual.std() + 1e-12)

    return score


def _foreground(image: np.ndarray) -> np.ndarray:
    """(h, w) bool at 192 pixels at most: darker or brighter than the median of the image by 40 grey levels."""
    gray = Image.fromarray(image).convert("L")
    gray.thumbnail((192, 192))
    values = np.asarray(gray, dtype=np.float32)
    return np.abs(values - np.median(values)) > 40


def _mean_pixel(image: np.ndarray) -> float:
    return float(image.mean())


def _foreground_area(image: np.ndarray) -> float:
    return float(_foreground(image).mean())


def _blob_count(image: np.ndarray) -> float:
    labels, count = ndimage.label(_foreground(image))
    return float((np.bincount(labels.ravel())[1:] >= 8).sum()) if count else 0.0


BASELINES: dict[str, Scorer] = {
    "random": random_score,
    "mean pixel": _deviation(_mean_pixel),
    "foreground area": _deviation(_foreground_area),
    "blob count": _deviation(_blob_count),
}
