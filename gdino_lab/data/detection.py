"""Annotated sets for detection: read from COCO or ODVG files and checked against every image before training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from gdino_lab.data.annotations import (
    AnnotatedImage,
    AnnotatedSet,
    Annotation,
    Fault,
    Listed,
    Listing,
    Problem,
    shortened,
)
from gdino_lab.data.formats.coco import parse_coco
from gdino_lab.data.formats.odvg import parse_odvg, read_label_map
from gdino_lab.data.images import read_size, sides_of
from gdino_lab.errors import ConfigurationError, nearest

log = logging.getLogger(__name__)

SPLITS = ("train", "val")
ODVG_SUFFIXES = (".jsonl", ".odvg")
SUFFIXES = (".json", *ODVG_SUFFIXES)
MOST_COMPLAINTS = 20
MOST_EXAMPLES = 5
# Annotation tools round: a box this far outside its image is no mistake.
TOLERANCE = 1.0  # pixels


class DetectionData:
    """A training set and a validation set with one list of classes.

    Reading and checking happen once, at the first call that needs them.

    Args:
        root: folder that the paths of annotations and images are relative to; absolute ones stay.
        train_annotations, val_annotations: .json is COCO, .jsonl and .odvg are ODVG.
        train_images, val_images: folders that the file names are relative to; None looks beside the annotation file
            and in the usual places around it, see `image_folder`.
        image_size: (shortest, longest) side in pixels that the model sees; one number for both.
        strict: refuse a set with a fault in it; otherwise repair it and tell what was repaired.
        label_map: JSON file {"0": name, ...} of ODVG labels; None where every box names its category.
        draw: writes the set into `root` where it is missing (synthetic sets); returns nothing.
        draw_size: training images that `draw` will write.

    Raises:
        ConfigurationError: an image size or an annotation file's ending that is not allowed.
    """

    def __init__(
        self,
        root: str | Path,
        train_annotations: str | Path,
        train_images: str | Path | None,
        val_annotations: str | Path,
        val_images: str | Path | None,
        image_size: int | Sequence[int],
        strict: bool,
        label_map: str | Path | None = None,
        draw: Callable[[], None] | None = None,
        draw_size: int = 0,
    ):
        self.root = Path(root)
        complaints = []
        try:
            self.shortest, self.longest = sides_of(image_size)
        except ConfigurationError as error:
            complaints += error.complaints
        annotations = dict(zip(SPLITS, (train_annotations, val_annotations), strict=True))
        complaints += [
            f"data.{split}_annotations={path}: allowed is a file that ends in {', '.join(SUFFIXES)}"
            for split, path in annotations.items()
            if path is None or Path(path).suffix.lower() not in SUFFIXES
        ]
        if complaints:
            raise ConfigurationError(complaints)
        self.annotations = {split: self.root / path for split, path in annotations.items()}
        folders = dict(zip(SPLITS, (train_images, val_images), strict=True))
        self.folders = {split: None if path is None else self.root / path for split, path in folders.items()}
        self.label_map = None if label_map is None else self.root / label_map
        self.strict = strict
        self._draw = draw
        self._draw_size = draw_size

    @property
    def names(self) -> list[str]:
        """Class names in order: the training file's, or the validation file's where that one has captions only."""
        return self._content.names

    def images(self, split: str) -> list[AnnotatedImage]:
        """The images of "train" or "val" in the file's order.

        Raises:
            ConfigurationError: the files cannot be read, or are at fault and `strict` is set.
        """
        return self._content.images[split]

    def train_size(self) -> int:
        """Training images after repair; a set that draws itself is not drawn for that.

        Raises:
            ConfigurationError: as in `images`.
        """
        return self._draw_size if self._draw else len(self.images("train"))

    def notices(self) -> list[str]:
        """What was repaired: one line a kind of fault, with its count and some examples."""
        return self._content.notices

    def prepare(self) -> None:
        """Draw the set if it is one that draws itself, then check every file; repairs are logged as warnings.

        Raises:
            ConfigurationError: as in `images`.
        """
        if self._draw:
            self._draw()
        for notice in self.notices():
            log.warning(notice)

    @cached_property
    def _content(self) -> _Content:
        files = [*self.annotations.values(), *([self.label_map] if self.label_map else [])]
        if missing := [f"{path}: missing" for path in files if not path.exists()]:
            no_root = [] if self.root.is_dir() else [f"data.root={self.root}: no such folder"]
            raise ConfigurationError(no_root or missing)
        label_map = None if self.label_map is None else read_label_map(_text(self.label_map), self.label_map)
        train, val = (_listing(self.annotations[split], label_map) for split in SPLITS)
        if captioned := next((image for image in val.images if image.caption is not None), None):
            raise ConfigurationError(
                f"{val.source}: {captioned.where} is a caption; validation needs boxes of classes "
                "(detection lines or a COCO .json): mAP is not defined on captions"
            )
        names = train.names or val.names
        if not names:
            raise ConfigurationError(f"{train.source}: names no class, and neither does {val.source}")
        val = _renamed(val, names, train.source)
        images, problems = {}, []
        for split, listing in zip(SPLITS, (train, val), strict=True):
            images[split], found = _checked_images(listing, self.folders[split])
            problems += found
        notices = _settled(problems, self.strict)
        for split in SPLITS:
            _refuse_empty(self.annotations[split], images[split], problems)
        return _Content(names, images, notices)


@dataclass(frozen=True)
class _Content:
    names: list[str]
    images: dict[str, list[AnnotatedImage]]
    notices: list[str]


def read_set(annotations: Path, images: Path | None, strict: bool) -> AnnotatedSet:
    """A single annotation file, checked against its images.

    Args:
        annotations: a .json (COCO), .jsonl or .odvg (ODVG with category names) file.
        images: folder that the file names are relative to; None as in `image_folder`.
        strict: refuse a set with a fault in it; otherwise repair it and tell what was repaired.

    Raises:
        ConfigurationError: the file cannot be read or holds no image, or is at fault and `strict` is set.
    """
    if annotations.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"{annotations}: allowed is a file that ends in {', '.join(SUFFIXES)}")
    listing = _listing(annotations, None)
    found, problems = _checked_images(listing, images)
    notices = _settled(problems, strict)
    _refuse_empty(annotations, found, problems)
    return AnnotatedSet(listing.names, found, notices)


def image_folder(annotations: Path, first: str) -> Path:
    """Where the images of an annotation file are when nobody says: the first usual place that holds the first one.

    The places are the file's own folder, images/ in it, the folder above and images/ there.
    """
    own = annotations.parent
    places = (own, own / "images", own.parent, own.parent / "images")
    return next((place for place in places if (place / first).is_file()), own)


# ---- Reading --------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a readable text file ({error})") from None


def _listing(path: Path, label_map: dict[int, str] | None) -> Listing:
    if path.suffix.lower() in ODVG_SUFFIXES:
        return parse_odvg(_text(path), path, label_map)
    return parse_coco(_text(path), path)


def _renamed(listing: Listing, names: list[str], source: Path) -> Listing:
    """The listing with its labels pointing into `names`, the classes of `source`."""
    place = {name: index for index, name in enumerate(names)}
    if unknown := [name for name in listing.names if name not in place]:
        raise ConfigurationError(
            f"{listing.source}: class '{name}' is not in {source}, which has {shortened(names)}.{nearest(name, names)}"
            for name in unknown
        )
    own = [place[name] for name in listing.names]
    images = [
        replace(image, annotations=[each._replace(label=own[each.label]) for each in image.annotations])
        for image in listing.images
    ]
    return replace(listing, names=names, images=images)


# ---- Checking -------------------------------------------------------------------------------------------------------


def _checked_images(listing: Listing, folder: Path | None) -> tuple[list[AnnotatedImage], list[Problem]]:
    """The repaired images and everything that was wrong, the parser's findings first."""
    if folder is None:
        folder = image_folder(listing.source, listing.images[0].file if listing.images else "")
    elif not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; it should hold the images of {listing.source}")
    with ThreadPoolExecutor() as pool:  # waiting for a disk releases the interpreter lock
        found = list(pool.map(partial(_checked, listing.source, folder), listing.images))
    images = [image for image, _ in found if image is not None]
    return images, listing.problems + [problem for _, problems in found for problem in problems]


def _checked(source: Path, folder: Path, listed: Listed) -> tuple[AnnotatedImage | None, list[Problem]]:
    path = folder / listed.file
    try:
        height, width = read_size(path)
    except ConfigurationError as error:
        return None, [Problem(Fault.FILE, f"{source}: {listed.where}: {error}")]
    problems = []
    if listed.size not in (None, (height, width)):
        text = f"{source}: {listed.where}: recorded as {_extent(*listed.size)}, {path} has {_extent(height, width)}"
        problems.append(Problem(Fault.SIZE, text))
    boxes, kept, faults = _fitted(listed.annotations, height, width)
    within = f"{path} of {_extent(height, width)}"
    problems += [
        Problem(fault, f"{source}: {annotation.where}: box {_corners(annotation)} in {within}")
        for annotation, fault in zip(listed.annotations, faults, strict=True)
        if fault is not None
    ]
    classes = np.array([annotation.label for annotation in listed.annotations], np.int64)[kept]
    crowd = np.array([annotation.crowd for annotation in listed.annotations], bool)[kept]
    own = (boxes[:, 2:] - boxes[:, :2]).astype(np.float64).prod(axis=1)
    areas = np.array([each.area for each in listed.annotations], np.float64)  # None becomes NaN
    areas = np.where(np.isfinite(areas), areas, own)[kept]
    image = AnnotatedImage(
        listed.id, path, height, width, boxes[kept], classes, crowd, areas, listed.caption, listed.phrases
    )
    return image, problems


def _fitted(
    annotations: list[Annotation], height: int, width: int
) -> tuple[np.ndarray, np.ndarray, list[Fault | None]]:
    """Boxes clipped to the image (N, 4) float32, which of them have an area (N,) bool, and the fault of each."""
    recorded = np.array([annotation.box for annotation in annotations], np.float64).reshape(-1, 4)
    clipped = np.clip(recorded, 0, (width, height, width, height))
    boxes = clipped.astype(np.float32)
    kept = np.isfinite(recorded).all(axis=1)
    kept &= (recorded[:, :2] < recorded[:, 2:]).all(axis=1) & (boxes[:, :2] < boxes[:, 2:]).all(axis=1)
    outside = (np.abs(recorded - clipped) > TOLERANCE).any(axis=1)
    faults = np.where(kept, np.where(outside, Fault.OUTSIDE, None), Fault.DEGENERATE)
    return boxes, kept, faults.tolist()


def _settled(problems: list[Problem], strict: bool) -> list[str]:
    """The notices of what was repaired, or the refusal to repair it."""
    counts = Counter(problem.fault for problem in problems)
    if not strict:
        return [_notice(fault, count, problems) for fault, count in counts.items()]
    if problems:
        kinds = "; ".join(f"{fault.what}: {count}" for fault, count in counts.items())
        left = len(problems) - MOST_COMPLAINTS
        raise ConfigurationError(
            [
                f"{len(problems)} faults in the annotations, which data.strict=false repairs ({kinds}):",
                *(f"{problem.fault.what}: {problem.text}" for problem in problems[:MOST_COMPLAINTS]),
                *([f"... and {left} more"] if left > 0 else []),
            ]
        )
    return []


def _notice(fault: Fault, count: int, problems: Iterable[Problem]) -> str:
    examples = [problem.text for problem in problems if problem.fault is fault][:MOST_EXAMPLES]
    more = "; ..." if count > len(examples) else ""
    return f"{fault.what}: {count} ({fault.repair}): {'; '.join(examples)}{more}"


def _refuse_empty(source: Path, images: list[AnnotatedImage], problems: list[Problem]) -> None:
    if not images:
        missing = [problem.text for problem in problems if problem.fault is Fault.FILE]
        why = f" that can be used: {missing[0]}" if missing else ""
        raise ConfigurationError(f"{source}: holds no image{why}")


def _extent(height: int, width: int) -> str:
    return f"{width}x{height}"


def _corners(annotation: Annotation) -> str:
    return "[" + ", ".join(f"{number:g}" for number in annotation.box) + "]"
