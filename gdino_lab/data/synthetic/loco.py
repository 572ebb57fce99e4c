"""The drawn screw bag as a data set: written by itself when first used, read like any other LOCO category."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gdino_lab.data.loco import LocoData
from gdino_lab.data.synthetic.screw_bag import PRESETS, BagCounts, write_screw_bags
from gdino_lab.errors import ConfigurationError, nearest

# Beside the category folders: what the set was drawn with, so that another recipe is never taken for it.
RECIPE = "recipe.json"


def synthetic_loco(
    root: str | Path | None,
    category: str | Sequence[str],
    preset: str,
    seed: int,
    canvas: Sequence[int],
    counts: Mapping[str, int],
    image_size: int | Sequence[int],
    prompt: Mapping[str, Sequence[str]],
) -> LocoData:
    """A LocoData that draws itself; see conf/data/synthetic_loco.yaml for the arguments.

    Raises:
        ConfigurationError: an unknown preset, a canvas or a count that is too small, or a root with another set.
    """
    if preset not in PRESETS:
        raise ConfigurationError(f"data.preset={preset}: allowed are {', '.join(PRESETS)}.{nearest(preset, PRESETS)}")
    asked = [category] if isinstance(category, str) else list(category)
    if asked not in (["screw_bag"], ["all"]):
        raise ConfigurationError(f"data.category={category}: the drawn set has screw_bag only")
    if len(canvas) != 2 or min(canvas) < 32:
        raise ConfigurationError(f"data.canvas={list(canvas)}: allowed are height and width of 32 pixels or more")
    if seed < 0:
        raise ConfigurationError(f"data.seed={seed}: allowed is 0 or more")
    try:
        bag_counts = BagCounts(**counts)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"data.counts={dict(counts)}: {error}") from None
    recipe = {"preset": preset, "seed": seed, "canvas": list(canvas), "counts": dict(counts)}
    folder = Path(root) if root is not None else _own_folder(recipe)
    _refuse_other_set(folder, recipe)
    draw = partial(_draw, folder, recipe, bag_counts)
    return LocoData(folder, category, image_size, prompt, draw=draw, draw_size=bag_counts.train)


def _draw(folder: Path, recipe: Mapping, counts: BagCounts) -> None:
    """Write the set unless it is there; at module level, so that data processes can be handed a LocoData."""
    if (folder / RECIPE).exists():
        return
    height, width = recipe["canvas"]
    # A small bag is drawn faster than a process starts.
    workers = (os.cpu_count() or 1) if height * width > 250_000 else 1
    write_screw_bags(
        folder, preset=recipe["preset"], seed=recipe["seed"], canvas=(height, width), counts=counts, workers=workers
    )
    (folder / RECIPE).write_text(json.dumps(recipe) + "\n")


def _own_folder(recipe: Mapping) -> Path:
    height, width = recipe["canvas"]
    counts = "-".join(str(count) for count in recipe["counts"].values())
    return Path("outputs/data/synthetic_loco") / f"{recipe['preset']}_{height}x{width}_{counts}_seed{recipe['seed']}"


def _refuse_other_set(folder: Path, recipe: Mapping) -> None:
    stamp = folder / RECIPE
    if stamp.exists():
        try:
            there = dict(json.loads(stamp.read_text()))
        except (ValueError, TypeError):
            raise ConfigurationError(f"{stamp}: not the recipe of a drawn set; name another data.root") from None
        if there != recipe:
            differing = ", ".join(f"{key}={there.get(key)}" for key in recipe if there.get(key) != recipe[key])
            raise ConfigurationError(f"data.root={folder}: holds a set drawn with {differing}; name another folder")
    elif (folder / "screw_bag").exists():
        raise ConfigurationError(f"data.root={folder}: holds a screw_bag that was not drawn here; name another folder")
