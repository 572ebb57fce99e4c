"""Parts of a product, found without annotation: what stands out from its surroundings, and which kinds there are.

Sorting the blobs of normal images into kinds gives pseudo labels for a segmentation of parts, from which counts
follow (the idea of CSAD, Hsieh & Lai 2024, with blobs in place of a foundation model's masks).

Images are (H, W, 3) uint8, masks (H, W) bool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage
from sklearn.cluster import KMeans

# Blobs are searched for at this size at most: parts stay visible, and a 1600x1100 photograph costs no more than a
# thumbnail.
SEARCH_SIDE = 192
# Smaller is noise, larger is the product itself; fractions of the image area.
MIN_AREA, MAX_AREA = 0.002, 0.12


@dataclass(frozen=True)
class Part:
    """One blob: its box (y0, x0, y1, x1) in pixels and its mask within the box, (y1 - y0, x1 - x0) bool."""

    box: tuple[int, int, int, int]
    mask: np.ndarray

    @property
    def area(self) -> int:
        return int(self.mask.sum())


def find_parts(image: np.ndarray) -> list[Part]:
    """The blobs that stand out from their surroundings, largest first."""
    height, width = image.shape[:2]
    scale = min(1.0, SEARCH_SIDE / max(height, width))
    small = Image.fromarray(image)
    if scale < 1.0:
        small = small.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BILINEAR)
    gray = np.asarray(small.convert("L"), dtype=np.float32)
    labels, _ = ndimage.label(ndimage.binary_opening(_stands_out(gray)))
    parts = []
    for index, (rows, cols) in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[rows, cols] == index
        sized = MIN_AREA * gray.size <= mask.sum() <= MAX_AREA * gray.size
        if sized and _lies_on_one_surface(gray, labels, rows, cols):
            parts.append(_at_scale(mask, rows.start, cols.start, scale, height, width))
    return sorted(parts, key=lambda part: -part.area)


class PartKinds:
    """Kinds of parts in a category, learnt from its normal images by k-means over the blobs' size, elongation and
    colour.

    Args:
        images: normal images.
        kinds: how many; fewer where there are fewer blobs.
    """

    def __init__(self, images: Iterable[np.ndarray], kinds: int):
        found = [_describe(image, part) for image in images for part in find_parts(image)]
        self.kinds = min(kinds, len(found))
        if self.kinds:
            described = np.array(found)
            self.centre, self.spread = described.mean(0), described.std(0) + 1e-6
            self.clusters = KMeans(self.kinds, n_init=4, random_state=0)
            self.clusters.fit((described - self.centre) / self.spread)

    def label_map(self, image: np.ndarray) -> np.ndarray:
        """(H, W) uint8: 0 for background, 1 and up for the kind of the part there."""
        labels = np.zeros(image.shape[:2], np.uint8)
        parts = find_parts(image) if self.kinds else []
        if parts:
            described = np.array([_describe(image, part) for part in parts])
            for part, kind in zip(parts, self.clusters.predict((described - self.centre) / self.spread), strict=True):
                y0, x0, y1, x1 = part.box
                labels[y0:y1, x0:x1][part.mask] = kind + 1
        return labels


def _describe(image: np.ndarray, part: Part) -> list[float]:
    """Log area and log elongation, redness against blueness, brightness."""
    y0, x0, y1, x1 = part.box
    red, _, blue = colour = image[y0:y1, x0:x1][part.mask].mean(axis=0, dtype=np.float64)
    rows, cols = np.nonzero(part.mask)
    spread = np.array([[rows.var(), np.mean(rows * cols) - rows.mean() * cols.mean()], [0.0, cols.var()]])
    short, long = np.sqrt(np.maximum(np.linalg.eigvalsh(spread, UPLO="U"), 0.05))
    relative = part.area / (image.shape[0] * image.shape[1])
    return [np.log(relative), np.log(long / short), (red - blue) / 255, colour.mean() / 255]


def _stands_out(gray: np.ndarray) -> np.ndarray:
    """(H, W) bool: darker or brighter than the local background by more than the image's own spread."""
    coarse = ndimage.median_filter(gray[::6, ::6], size=max(3, min(gray.shape) // 15), mode="nearest")
    background = Image.fromarray(coarse).resize(gray.shape[::-1], Image.Resampling.BILINEAR)
    difference = np.abs(gray - np.asarray(background))
    return difference > max(12.0, 2.5 * float(np.median(difference)) + 6.0)


def _lies_on_one_surface(gray: np.ndarray, labels: np.ndarray, rows: slice, cols: slice) -> bool:
    """False where the pixels around a blob are of two kinds: then it is a piece of the product's outline."""
    if rows.start == 0 or cols.start == 0 or rows.stop == gray.shape[0] or cols.stop == gray.shape[1]:
        return False
    around = slice(max(0, rows.start - 3), rows.stop + 3), slice(max(0, cols.start - 3), cols.stop + 3)
    low, high = np.percentile(gray[around][labels[around] == 0], (10, 90))
    return bool(high - low < 0.25 * np.ptp(gray))


def _at_scale(mask: np.ndarray, top: int, left: int, scale: float, height: int, width: int) -> Part:
    """The part found in an image shrunk by `scale`, at full size."""
    if scale == 1.0:
        return Part((top, left, top + mask.shape[0], left + mask.shape[1]), mask)
    y0, x0 = int(top / scale), int(left / scale)
    y1 = min(height, max(y0 + 1, int((top + mask.shape[0]) / scale)))
    x1 = min(width, max(x0 + 1, int((left + mask.shape[1]) / scale)))
    grown = Image.fromarray(mask).resize((x1 - x0, y1 - y0), Image.Resampling.NEAREST)
    return Part((y0, x0, y1, x1), np.asarray(grown))
