"""Edits: what they promise about shapes, labels and pixels, on any image, and what they do to a bag's parts."""

from functools import cache

import numpy as np
import pytest

from gdino_lab.data import edits
from gdino_lab.data.edits import edit
from gdino_lab.data.parts import find_parts
from gdino_lab.data.synthetic.screw_bag import PRESETS, draw_bag

KINDS = ("clean", "identity", "logical", "structural")


@cache
def bag(seed: int, canvas: tuple[int, int] = (96, 140)) -> np.ndarray:
    image = draw_bag(PRESETS["easy"], canvas, np.random.default_rng(seed)).image
    image.flags.writeable = False  # an edit in place would raise
    return image


def noise(seed: int, canvas: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*canvas, 3), dtype=np.uint8)


def flat(seed: int, canvas: tuple[int, int]) -> np.ndarray:
    return np.full((*canvas, 3), 40 + 10 * (seed % 20), np.uint8)


def bags(seed: int, canvas: tuple[int, int]) -> np.ndarray:
    return bag(seed % 12, canvas)


@pytest.mark.parametrize("canvas", [(32, 32), (41, 67), (96, 140)], ids=str)
@pytest.mark.parametrize("source", [bags, noise, flat])
@pytest.mark.parametrize("kind", KINDS)
def test_every_edit_keeps_its_promises(kind, source, canvas):
    for seed in range(40):
        image, donor = source(seed, canvas), source(seed + 1, canvas)
        before, donor_before = image.copy(), donor.copy()
        edited = edit(image, donor, kind, np.random.default_rng(seed))
        assert edited.image.shape == image.shape and edited.image.dtype == np.uint8
        assert edited.changed.shape == canvas and edited.changed.dtype == bool
        assert np.array_equal(image, before) and np.array_equal(donor, donor_before)
        assert edited.anomalous is (kind in ("logical", "structural"))
        assert edited.changed.any() == edited.anomalous, f"seed {seed}"
        if kind == "clean":
            assert np.array_equal(edited.image, image)
        again = edit(image, donor, kind, np.random.default_rng(seed))
        assert np.array_equal(again.image, edited.image) and np.array_equal(again.changed, edited.changed)


@pytest.mark.parametrize("kind", ["identity", "logical", "structural"])
def test_another_seed_edits_another_way(kind):
    images = {edit(bag(0), bag(1), kind, np.random.default_rng(seed)).image.tobytes() for seed in range(20)}
    assert len(images) >= 18


@pytest.mark.parametrize("kind", ["logical", "structural"])
def test_what_changed_lies_in_the_mask_or_at_its_rim(kind):
    """Erasing and pasting soften a rim around the part; far from the mask nothing moves."""
    for seed in range(60):
        edited = edit(bag(seed % 12), bag(seed % 12 + 1), kind, np.random.default_rng(seed))
        far = ~edits.ndimage.binary_dilation(edited.changed, iterations=4)
        assert np.array_equal(edited.image[far], bag(seed % 12)[far]), f"seed {seed}"


def test_an_unknown_kind_is_refused():
    with pytest.raises(KeyError, match="rust"):
        edit(bag(0), bag(1), "rust", np.random.default_rng(0))


@pytest.mark.parametrize("name", ["_scratch", "_scar", "_stain", "_recoloured"])
@pytest.mark.parametrize("canvas", [(32, 32), (64, 90)], ids=str)
def test_every_structural_edit_marks_something(name, canvas):
    tries = 3000 if name == "_scratch" else 150
    image, made = flat(5, canvas), getattr(edits, name)
    empty = [seed for seed in range(tries) if not made(image.copy(), image, np.random.default_rng(seed)).any()]
    assert not empty, f"{len(empty)} of {tries} seeds mark nothing, for example {empty[:3]}"


@pytest.mark.parametrize("name", ["_missing", "_extra", "_exchanged", "_rescaled"])
def test_every_logical_edit_marks_what_it_changed(name):
    for seed in range(60):
        image, donor, canvas = bag(seed % 12), bag(seed % 12 + 1), bag(seed % 12).copy()
        changed = getattr(edits, name)(canvas, image, find_parts(image), donor, np.random.default_rng(seed))
        assert changed.any() and (canvas != image).any(-1)[changed].any(), f"seed {seed}"


def test_a_donor_of_another_size_still_marks_something():
    narrow, wide = bag(0)[:, :96], bag(1)
    for image, donor in ((wide, narrow), (narrow, wide)):
        for kind in ("logical", "structural"):
            empty = [s for s in range(100) if not edit(image, donor, kind, np.random.default_rng(s)).changed.any()]
            assert not empty, f"{kind}: seeds {empty[:5]} mark nothing"


def found_more(change) -> np.ndarray:
    """Over 200 edits of 40 bags: how many more parts are found after `change` than before."""
    counts = []
    for seed in range(200):
        image, donor = bag(seed % 40), bag((seed + 1) % 40)
        changed = change(image, donor, np.random.default_rng(seed))
        counts.append(len(find_parts(changed)) - len(find_parts(image)))
    return np.array(counts)


def by(function):
    def change(image: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        canvas = image.copy()
        function(canvas, image, find_parts(image), donor, rng)
        return canvas

    return change


def test_a_missing_part_is_one_fewer():
    change = found_more(by(edits._missing))
    assert (change == -1).mean() > 0.9 and abs(change.mean() + 1) < 0.1


def test_an_extra_part_is_one_more():
    change = found_more(by(edits._extra))
    assert change.mean() > 0.25 and change.mean() > 4 * change.std() / np.sqrt(len(change))
    assert (change == 1).mean() > 0.45  # most of the rest touches another part, and the two are found as one


def test_an_identity_edit_keeps_the_number_of_parts():
    change = found_more(lambda image, donor, rng: edit(image, donor, "identity", rng).image)
    assert abs(change.mean()) < 0.35, f"mean change {change.mean():.2f}, {(change < 0).mean():.0%} lose a part"
    assert (change == 0).mean() > 0.6


def test_an_identity_edit_moves_something():
    for seed in range(20):
        image = bag(seed)
        moved = (edit(image, image, "identity", np.random.default_rng(seed)).image != image).any(-1)
        assert moved.sum() > 0.5 * min(part.area for part in find_parts(image))
