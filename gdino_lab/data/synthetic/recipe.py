"""What a drawn set was drawn with: checked before drawing, and kept beside it so that another is never taken for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gdino_lab.data.synthetic.screw_bag import PRESETS
from gdino_lab.errors import ConfigurationError, nearest

RECIPE = "recipe.json"


def checked_recipe(preset: str, seed: int, canvas: Sequence[int], counts: Mapping[str, int]) -> dict:
    """The recipe as it is written to RECIPE.

    Raises:
        ConfigurationError: an unknown preset, a canvas that is too small or a negative seed.
    """
    if preset not in PRESETS:
        raise ConfigurationError(f"data.preset={preset}: allowed are {', '.join(PRESETS)}.{nearest(preset, PRESETS)}")
    if len(canvas) != 2 or min(canvas) < 32:
        raise ConfigurationError(f"data.canvas={list(canvas)}: allowed are height and width of 32 pixels or more")
    if seed < 0:
        raise ConfigurationError(f"data.seed={seed}: allowed is 0 or more")
    return {"preset": preset, "seed": seed, "canvas": list(canvas), "counts": dict(counts)}


def own_folder(kind: str, recipe: Mapping) -> Path:
    """Where a set without a root is drawn: a folder for each recipe."""
    height, width = recipe["canvas"]
    counts = "-".join(str(count) for count in recipe["counts"].values())
    return Path("outputs/data") / kind / f"{recipe['preset']}_{height}x{width}_{counts}_seed{recipe['seed']}"


def write_recipe(folder: Path, recipe: Mapping) -> None:
    (folder / RECIPE).write_text(json.dumps(recipe) + "\n")


def refuse_other_set(folder: Path, recipe: Mapping, drawn: Iterable[str]) -> None:
    """Raises ConfigurationError where `folder` holds another recipe's set, or without a recipe any name of `drawn`."""
    stamp = folder / RECIPE
    if stamp.exists():
        try:
            there = dict(json.loads(stamp.read_text()))
        except (ValueError, TypeError):
            raise ConfigurationError(f"{stamp}: not the recipe of a drawn set; name another data.root") from None
        if there != recipe:
            differing = ", ".join(f"{key}={there.get(key)}" for key in recipe if there.get(key) != recipe[key])
            raise ConfigurationError(f"data.root={folder}: holds a set drawn with {differing}; name another folder")
    elif foreign := next((name for name in drawn if (folder / name).exists()), None):
        raise ConfigurationError(f"data.root={folder}: holds a {foreign} that was not drawn here; name another folder")
