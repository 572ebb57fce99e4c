"""Drawn screw bags as a detection set in COCO's format: written by itself when first used.

    <root>/{train,val}/NNNN.png
    <root>/annotations/{train,val}.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from gdino_lab.data.detection import SPLITS, DetectionData
from gdino_lab.data.synthetic.recipe import RECIPE, checked_recipe, own_folder, refuse_other_set, write_recipe
from gdino_lab.data.synthetic.screw_bag import CLASS_NAMES, PRESETS, Bag, draw_bag
from gdino_lab.errors import ConfigurationError

# A bag holds some of these parts: few enough that there is room for any eight of them.
POOL = ("long screw",) * 2 + ("short screw",) * 2 + ("nut",) * 3 + ("washer",) * 3
FEWEST, MOST = 3, 8
EMPTY_SHARE = 0.04


def synthetic_detection(
    root: str | Path | None,
    preset: str,
    seed: int,
    canvas: Sequence[int],
    counts: Mapping[str, int],
    image_size: int | Sequence[int],
    strict: bool,
) -> DetectionData:
    """A DetectionData that draws itself; see conf/data/synthetic_detection.yaml for the arguments.

    Raises:
        ConfigurationError: an unknown preset, a canvas or a count that is too small, or a root with another set.
    """
    recipe = checked_recipe(preset, seed, canvas, counts)
    if set(counts) != set(SPLITS) or min(counts.values()) < 1:
        raise ConfigurationError(f"data.counts={dict(counts)}: allowed are {', '.join(SPLITS)} with 1 or more each")
    folder = Path(root) if root is not None else own_folder("synthetic_detection", recipe)
    refuse_other_set(folder, recipe, _content(folder))
    return DetectionData(
        folder,
        *("annotations/train.json", "train", "annotations/val.json", "val"),
        image_size,
        strict,
        draw=partial(_draw, folder, recipe),
        draw_size=counts["train"],
    )


def _content(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _draw(folder: Path, recipe: Mapping) -> None:
    """Write the set unless it is there; at module level, so that data processes can be handed a DetectionData."""
    if (folder / RECIPE).exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
        new = Path(staging, folder.name)
        for name in ("annotations", *SPLITS):
            (new / name).mkdir(parents=True)
        for stream, split in enumerate(SPLITS):
            annotations = _write_split(new / split, stream, recipe["counts"][split], recipe)
            (new / "annotations" / f"{split}.json").write_text(json.dumps(annotations) + "\n")
        write_recipe(new, recipe)
        try:
            os.replace(new, folder)  # onto an empty folder, or none
        except OSError:
            if not (folder / RECIPE).exists():  # else another run has drawn the same meanwhile
                raise


def _write_split(folder: Path, stream: int, count: int, recipe: Mapping) -> dict[str, list]:
    """The images of a split, and their annotations in COCO's format."""
    height, width = recipe["canvas"]
    images, annotations = [], []
    for index in range(count):
        # A longer split starts like a shorter one.
        rng = np.random.default_rng(np.random.SeedSequence((recipe["seed"], stream, index)))
        bag = _bag(recipe["preset"], (height, width), rng)
        name = f"{index:04d}.png"
        Image.fromarray(bag.image).save(folder / name, format="PNG", compress_level=6)
        images.append({"id": index + 1, "file_name": name, "height": height, "width": width})
        for part, (x0, y0, x1, y1) in bag.parts:
            box = [round(number, 3) for number in (x0, y0, x1 - x0, y1 - y0)]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": CLASS_NAMES.index(part) + 1,
                    "bbox": box,
                    "area": round(box[2] * box[3], 3),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASS_NAMES, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _bag(preset: str, canvas: tuple[int, int], rng: np.random.Generator) -> Bag:
    number = 0 if rng.random() < EMPTY_SHARE else rng.integers(FEWEST, MOST, endpoint=True)
    kinds = rng.choice(POOL, number, replace=False).tolist()
    return draw_bag(PRESETS[preset], canvas, rng, kinds=kinds)
