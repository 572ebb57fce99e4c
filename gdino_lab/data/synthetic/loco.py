"""The drawn screw bag as a data set: written by itself when first used, read like any other LOCO category."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gdino_lab.data.loco import LocoData
from gdino_lab.data.synthetic.recipe import RECIPE, checked_recipe, own_folder, refuse_other_set, write_recipe
from gdino_lab.data.synthetic.screw_bag import BagCounts, write_screw_bags
from gdino_lab.errors import ConfigurationError


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
    recipe = checked_recipe(preset, seed, canvas, counts)
    asked = [category] if isinstance(category, str) else list(category)
    if asked not in (["screw_bag"], ["all"]):
        raise ConfigurationError(f"data.category={category}: the drawn set has screw_bag only")
    try:
        bag_counts = BagCounts(**counts)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"data.counts={dict(counts)}: {error}") from None
    folder = Path(root) if root is not None else own_folder("synthetic_loco", recipe)
    refuse_other_set(folder, recipe, ["screw_bag"])
    draw = partial(_draw, folder, recipe, bag_counts)
    return LocoData(folder, category, image_size, prompt, draw=draw, draw_size=bag_counts.train)


def _draw(folder: Path, recipe: Mapping, counts: BagCounts) -> None:
    """Write the set unless it is there; at module level, so that data processes can be handed a LocoData."""
    if (folder / RECIPE).exists():
        return
    height, width = recipe["canvas"]
    # A small bag is drawn faster than a process starts.
    workers = (os.cpu_count() or 1) if height * width > 250_000 else 1
    try:
        write_screw_bags(
            folder, preset=recipe["preset"], seed=recipe["seed"], canvas=(height, width), counts=counts, workers=workers
        )
    except OSError:
        if not (folder / "screw_bag").exists():  # else another run has drawn the same meanwhile
            raise
    write_recipe(folder, recipe)
