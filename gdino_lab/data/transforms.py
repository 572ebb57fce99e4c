"""Random views of an image with boxes: cropped, mirrored, scaled, in other light. The generator alone decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from PIL import Image, ImageEnhance

from gdino_lab.data import images
from gdino_lab.errors import ConfigurationError

# A crop keeps at least this share of each side.
LEAST_SIDE = 0.5
SIDES = re.compile(r"(?<![^\W\d_])(left|right)(?![^\W\d_])", re.IGNORECASE)


@dataclass(frozen=True)
class Augment:
    """How much a training image varies from epoch to epoch.

    Args:
        scales: (low, high) factors on the shortest side; the longest side stays the limit.
        flip: probability of a mirror image.
        crop: probability of a crop.
        min_visible: least share of its area that a box needs inside the crop, in [0, 1].
        colour: most that brightness, contrast and saturation change, as a fraction in [0, 1].

    Raises:
        ConfigurationError: a value out of its range, by its key.
    """

    scales: Sequence[float]
    flip: float
    crop: float
    min_visible: float
    colour: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", _listed(self.scales))
        complaints = [
            f"task.augment.{name}={value}: allowed is a number from 0 to 1"
            for name, value in vars(self).items()
            if name != "scales" and not (_is_number(value) and 0 <= value <= 1)
        ]
        low, high = self.scales if len(self.scales) == 2 and all(map(_is_number, self.scales)) else (0, 0)
        if not 0 < low <= high < float("inf"):
            complaints.insert(
                0, f"task.augment.scales={list(self.scales)}: allowed is [low, high] with 0 < low <= high"
            )
        if complaints:
            raise ConfigurationError(complaints)

    def __call__(
        self,
        image: Image.Image,
        boxes: np.ndarray,
        may_flip: bool,
        shortest: int,
        longest: int,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One random view at the training resolution.

        Args:
            image: RGB, upright.
            boxes: (N, 4) float32, xyxy pixels of `image`.
            may_flip: False where a mirror image would contradict the text, see `mentions_a_side`.
            shortest, longest: sides in pixels that a factor of 1 fits the image to.

        Returns:
            image (H, W, 3) uint8; boxes (N, 4) float32 in its pixels; kept (N,) bool. The rows of boxes that are not
            kept mean nothing.
        """
        kept = np.ones(len(boxes), bool)
        if rng.random() < self.crop:
            image, boxes, kept = crop(image, boxes, self.min_visible, rng)
        if rng.random() < self.flip and may_flip:
            image, boxes = flip(image, boxes)
        side = max(1, round(shortest * rng.uniform(*self.scales)))
        image, boxes = resize(image, boxes, side, longest)
        return np.asarray(jitter_colour(image, self.colour, rng)), boxes, kept


    def views(self, height: int, width: int) -> set[tuple[int, int]]:
        """(height, width) of the image and of the crops of it that are narrowest either way."""
        if not self.crop:
            return {(height, width)}
        return {(height, width), (height, ceil(width * LEAST_SIDE)), (ceil(height * LEAST_SIDE), width)}


def flip(image: Image.Image, boxes: np.ndarray) -> tuple[Image.Image, np.ndarray]:
    """The mirror image, left and right exchanged; boxes (N, 4) xyxy pixels."""
    mirrored = boxes.copy()
    mirrored[:, [0, 2]] = image.width - boxes[:, [2, 0]]
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), mirrored


def crop(
    image: Image.Image, boxes: np.ndarray, min_visible: float, rng: np.random.Generator
) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """A random sub-rectangle of whole pixels, each side at least LEAST_SIDE of the image's.

    Returns:
        the part of the image; boxes (N, 4) float32 clipped to it, in its pixels; kept (N,) bool: the boxes that have
        at least `min_visible` of their area, and some area, inside.
    """
    size = np.array(image.size)
    inner = np.maximum(1, np.ceil(size * rng.uniform(LEAST_SIDE, 1, 2))).astype(int)
    start = rng.integers(0, size - inner, endpoint=True)
    exact = boxes.astype(np.float64)  # or a box that is wholly inside could seem to lose some of its area
    clipped = np.clip(exact - np.tile(start, 2), 0, np.tile(inner, 2))
    visible = _area(clipped)
    kept = (visible > 0) & (visible >= min_visible * _area(exact))
    return image.crop((*start.tolist(), *(start + inner).tolist())), clipped.astype(np.float32), kept


def resize(image: Image.Image, boxes: np.ndarray, shortest: int, longest: int) -> tuple[Image.Image, np.ndarray]:
    """The image with its short side `shortest` unless the long one would pass `longest`; boxes (N, 4) in its pixels."""
    resized = Image.fromarray(images.resize(image, shortest, longest))
    ratio = np.tile(np.array(resized.size) / np.array(image.size), 2)
    return resized, (boxes * ratio).astype(np.float32)


def jitter_colour(image: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    """Brightness, contrast and saturation each times a factor in [1 - strength, 1 + strength]."""
    for enhancer in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhancer(image).enhance(1 + strength * rng.uniform(-1, 1))
    return image


def mentions_a_side(text: str) -> bool:
    """Whether the word left or right occurs, in any case: a mirror image would make the text wrong."""
    return SIDES.search(text) is not None


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(axis=1)


def _listed(value: object) -> tuple:
    return (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
