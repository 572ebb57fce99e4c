"""MVTec LOCO AD's layout: find the images and masks of any subset of categories, and check them before training.

    <root>/<category>/{train,validation}/good/NNN.png
    <root>/<category>/test/{good,logical_anomalies,structural_anomalies}/NNN.png
    <root>/<category>/ground_truth/{logical,structural}_anomalies/NNN/000.png ...   one mask a defect region
    <root>/<category>/defects_config.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdino_lab.data.images import read_mask, read_rgb, sides_of
from gdino_lab.errors import ConfigurationError, nearest

GOOD, LOGICAL, STRUCTURAL = "good", "logical_anomalies", "structural_anomalies"
FOLDERS = {"train": (GOOD,), "validation": (GOOD,), "test": (GOOD, LOGICAL, STRUCTURAL)}
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
MOST_COMPLAINTS = 20


@dataclass(frozen=True)
class LocoImage:
    """One image: where it is, what it is, and the masks of its defect regions (kept apart: they may overlap)."""

    path: Path
    category: str
    split: str
    kind: str
    masks: tuple[Path, ...] = ()


class LocoData:
    """The images of some categories.

    Args:
        root: folder that holds the category folders.
        category: one name, a list of names, or "all".
        image_size: (shortest, longest) side in pixels that the model sees; one number for both.
        prompt: phrases to look for, by category.
        draw: writes the set into `root` where it is missing (synthetic sets); returns nothing.
        draw_size: training images that `draw` will write.
    """

    def __init__(
        self,
        root: str | Path,
        category: str | Sequence[str],
        image_size: int | Sequence[int],
        prompt: Mapping[str, Sequence[str]],
        draw: Callable[[], None] | None = None,
        draw_size: int = 0,
    ):
        self.root = Path(root)
        self.asked = category
        self.shortest, self.longest = sides_of(image_size)
        self.prompt = {name: list(phrases) for name, phrases in prompt.items()}
        self._draw = draw
        self._draw_size = draw_size

    def train_size(self) -> int:
        """Training images, without writing or opening any."""
        return self._draw_size if self._draw else len(self.images("train"))

    def prepare(self) -> None:
        """Draw the set if it is one that draws itself, then check every file.

        Raises:
            ConfigurationError: with every complaint, each naming its file.
        """
        if self._draw:
            self._draw()
        complaints = self._layout_complaints() or self._file_complaints()
        if complaints:
            left = len(complaints) - MOST_COMPLAINTS
            raise ConfigurationError(complaints[:MOST_COMPLAINTS] + ([f"... and {left} more"] if left > 0 else []))

    @property
    def categories(self) -> list[str]:
        """The categories asked for, in the order asked.

        Raises:
            ConfigurationError: the root or a category does not exist.
        """
        if not self.root.is_dir():
            raise ConfigurationError(f"data.root={self.root}: no such folder")
        there = sorted(path.parent.name for path in self.root.glob("*/train") if path.is_dir())
        if self.asked == "all":
            asked = there
        else:
            asked = [self.asked] if isinstance(self.asked, str) else list(self.asked)
        if not asked:
            raise ConfigurationError(f"data.root={self.root}: holds no category (a folder with train/ in it)")
        complaints = [
            f"data.category={name}: {self.root} has {', '.join(there) or 'none'}.{nearest(name, there)}"
            for name in asked
            if name not in there
        ]
        complaints += [
            f"data.prompt has no phrases for category {name}; it has {', '.join(self.prompt)}"
            for name in asked
            if not self.prompt.get(name)
        ]
        if complaints:
            raise ConfigurationError(complaints)
        return asked

    def images(self, split: str) -> list[LocoImage]:
        """All images of "train", "validation" or "test", in the order of categories, kinds and names."""
        return [
            LocoImage(path, category, split, kind, self._masks(category, kind, path))
            for category in self.categories
            for kind in FOLDERS[split]
            for path in _files(self.root / category / split / kind)
        ]

    def _masks(self, category: str, kind: str, image: Path) -> tuple[Path, ...]:
        if kind == GOOD:
            return ()
        return tuple(_files(self.root / category / "ground_truth" / kind / image.stem))

    def _layout_complaints(self) -> list[str]:
        complaints = []
        for category in self.categories:
            folder = self.root / category
            complaints += [
                f"{folder / split / kind}: holds no image"
                for split, kinds in FOLDERS.items()
                for kind in kinds
                if not _files(folder / split / kind)
            ]
            try:
                self._pixel_values(category)
            except ConfigurationError as error:
                complaints += error.complaints
        return complaints

    def _file_complaints(self) -> list[str]:
        values = {category: self._pixel_values(category) for category in self.categories}
        images = [image for split in FOLDERS for image in self.images(split)]
        with ThreadPoolExecutor() as pool:  # decoding releases the interpreter lock
            found = pool.map(lambda image: _image_complaints(image, values[image.category]), images)
            return [complaint for complaints in found for complaint in complaints]

    def _pixel_values(self, category: str) -> set[int]:
        """The mask values that defects_config.json knows."""
        path = self.root / category / "defects_config.json"
        try:
            return {int(defect["pixel_value"]) for defect in json.loads(path.read_text())}
        except FileNotFoundError:
            raise ConfigurationError(f"{path}: missing") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{path}: not a list of defects with a pixel_value each ({type(error).__name__}: {error})"
            ) from None


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")


def _image_complaints(image: LocoImage, pixel_values: set[int]) -> list[str]:
    try:
        size = read_rgb(image.path).size[::-1]
    except ConfigurationError as error:
        return error.complaints
    if image.kind != GOOD and not image.masks:
        return [f"{image.path}: an anomalous test image without a mask in ground_truth/{image.kind}/{image.path.stem}/"]
    complaints = []
    for path in image.masks:
        try:
            mask = read_mask(path)
        except ConfigurationError as error:
            complaints += error.complaints
            continue
        if mask.shape != size:
            complaints.append(f"{path}: mask of {mask.shape[1]}x{mask.shape[0]}, its image has {size[1]}x{size[0]}")
        if unknown := set(np.flatnonzero(np.bincount(mask.ravel(), minlength=256))) - {0} - pixel_values:
            complaints.append(
                f"{path}: value {min(unknown)} is not in defects_config.json, which has "
                f"{', '.join(map(str, sorted(pixel_values)))}"
            )
    return complaints
