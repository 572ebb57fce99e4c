"""Annotated images: as a file lists them, what can be wrong with that, and as training sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

Spans = tuple[tuple[int, int], ...]
MOST_NAMES = 20


class Fault(Enum):
    """What a repair can mend: (what is wrong, what the repair does about it)."""

    FILE = "missing or unreadable image", "left out"
    SIZE = "recorded size unlike the file's", "the file's taken"
    IMAGE_ID = "duplicate image id", "the second image left out"
    ANNOTATION_ID = "duplicate annotation id", "both kept"
    UNKNOWN_IMAGE = "annotation of an unknown image", "left out"
    UNKNOWN_CLASS = "unknown class", "annotation left out"
    CONTRADICTION = "label that contradicts its category", "annotation left out"
    NO_BOX = "annotation without a box", "left out"
    OUTSIDE = "box out of bounds", "clipped"
    DEGENERATE = "degenerate box", "left out"
    PHRASE = "phrase that is not in its caption", "region left out"

    def __init__(self, what: str, repair: str):
        self.what = what
        self.repair = repair


class Problem(NamedTuple):
    """One thing wrong, in one line that names the file and the place in it."""

    fault: Fault
    text: str


class Annotation(NamedTuple):
    """A box as recorded: xyxy pixels, any numbers at all. `where` is its place in the file, for complaints; area is the
    object's, pixels, where the file records it."""

    where: str
    box: tuple[float, float, float, float]
    label: int
    crowd: bool = False
    area: float | None = None


@dataclass
class Listed:
    """An image as an annotation file lists it.

    size: recorded (height, width), pixels, or None.
    annotations: their labels index the listing's names, or `phrases` where there is a caption.
    phrases: for each phrase of the caption its (start, end) character spans.
    """

    where: str
    id: int | str
    file: str
    size: tuple[int, int] | None
    annotations: list[Annotation] = field(default_factory=list)
    caption: str | None = None
    phrases: tuple[Spans, ...] = ()


@dataclass(frozen=True)
class Listing:
    """The content of one annotation file: class names, images, and what a parser alone can see is wrong."""

    source: Path
    names: list[str]
    images: list[Listed]
    problems: list[Problem]


@dataclass(frozen=True, eq=False)
class AnnotatedImage:
    """One image, checked against its file.

    height, width: pixels of the upright image (after EXIF orientation).
    boxes: (N, 4) float32, xyxy pixels, inside the image and of positive area.
    classes: (N,) int64 into the set's names, or into `phrases` where there is a caption.
    crowd: (N,) bool, True for a box around many objects (COCO's iscrowd).
    areas: (N,) float64, pixels: the object's as recorded, else its box's.
    phrases: for each phrase of the caption its (start, end) character spans.
    """

    id: int | str
    path: Path
    height: int
    width: int
    boxes: np.ndarray
    classes: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    caption: str | None = None
    phrases: tuple[Spans, ...] = ()


@dataclass(frozen=True)
class AnnotatedSet:
    """The images of one annotation file, its class names in order, and a line for each kind of repair."""

    names: list[str]
    images: list[AnnotatedImage]
    notices: list[str]


def shortened(names: list[str]) -> str:
    """The names in one line, no more than MOST_NAMES of them."""
    more = f", ... ({len(names)} in all)" if len(names) > MOST_NAMES else ""
    return (", ".join(names[:MOST_NAMES]) or "none") + more
