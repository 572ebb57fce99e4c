"""The drawn screw bags: LOCO's layout to the letter, reproducible to the byte, true to their own ground truth."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from gdino_lab.data.synthetic import screw_bag
from gdino_lab.data.synthetic.screw_bag import (
    CLASS_NAMES,
    LOGICAL,
    PRESETS,
    STRUCTURAL,
    BagCounts,
    draw_bag,
    write_screw_bags,
)

CANVAS = (64, 90)
COUNTS = BagCounts(train=3, validation=2, test_good=2, test_logical=len(LOGICAL), test_structural=len(STRUCTURAL))
TINY = BagCounts(train=1, validation=1, test_good=1, test_logical=1, test_structural=1)
GOOD_BAG = Counter({"long screw": 1, "short screw": 1, "nut": 2, "washer": 2})


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write(root: Path, **changes) -> Path:
    return write_screw_bags(root, **{"preset": "easy", "seed": 7, "canvas": CANVAS, "counts": COUNTS} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("bags"))


@pytest.mark.parametrize("counts", [TINY, COUNTS], ids=["tiny", "all_kinds"])
def test_layout_is_exactly_that_of_loco(tmp_path, counts):
    written = write(tmp_path, counts=counts)
    groups = {"logical_anomalies": counts.test_logical, "structural_anomalies": counts.test_structural}
    sizes = {"train/good": counts.train, "validation/good": counts.validation, "test/good": counts.test_good}
    sizes |= {f"test/{group}": count for group, count in groups.items()}
    expected = {f"{split}/{index:03d}.png" for split, count in sizes.items() for index in range(count)}
    expected |= {f"ground_truth/{group}/{index:03d}/000.png" for group, n in groups.items() for index in range(n)}
    assert written == tmp_path / "screw_bag"
    assert set(files_of(written)) == expected | {"defects_config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["screw_bag"]


def test_files_depend_on_the_seed_and_not_on_the_run_or_the_workers(tmp_path, folder):
    first = files_of(folder)
    assert files_of(write(tmp_path / "again")) == first
    assert files_of(write(tmp_path / "two_workers", workers=2)) == first

    other = files_of(write(tmp_path / "other_seed", seed=8))
    assert other.keys() == first.keys()
    assert not [name for name in first if name.endswith("png") and "truth" not in name and other[name] == first[name]]


def test_no_two_images_are_alike_and_a_longer_split_starts_the_same(tmp_path, folder):
    images = {name: data for name, data in files_of(folder).items() if not name.startswith("ground_truth")}
    assert len(set(images.values())) == len(images)
    shorter = files_of(write(tmp_path, counts=TINY))
    assert all(files_of(folder)[name] == data for name, data in shorter.items())


def test_masks_carry_their_defect_and_every_kind_occurs(folder):
    config = {entry["pixel_value"]: entry for entry in json.loads((folder / "defects_config.json").read_text())}
    assert len(config) == len(LOGICAL) + len(STRUCTURAL)
    assert set(config) <= set(range(236, 256))

    seen = Counter()
    for file in sorted((folder / "ground_truth").rglob("*.png")):
        group, index = file.parts[-3:-1]
        with Image.open(file) as image, Image.open(folder / "test" / group / f"{index}.png") as picture:
            assert (image.mode, picture.mode) == ("L", "RGB")
            assert image.size == picture.size == CANVAS[::-1]
            zero, value = np.unique(np.asarray(image)).tolist()
        assert zero == 0
        seen[config[value]["defect_name"]] += 1
    assert seen == Counter([*LOGICAL, *STRUCTURAL])


def test_thresholds_are_a_parts_pixels_or_the_whole_region(folder):
    for entry in json.loads((folder / "defects_config.json").read_text()):
        assert list(entry) == ["defect_name", "pixel_value", "saturation_threshold", "relative_saturation"]
        threshold, logical = entry["saturation_threshold"], entry["defect_name"] in LOGICAL
        assert entry["relative_saturation"] is not logical
        if logical:
            assert isinstance(threshold, int) and 0 < threshold < 0.05 * CANVAS[0] * CANVAS[1]
        else:
            assert isinstance(threshold, float) and threshold == 1.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("canvas", [(32, 32), (64, 200), (96, 132), (110, 160), (800, 1333)], ids=str)
def test_good_bag_has_the_rules_parts_inside_the_canvas(preset, canvas):
    bag = draw_bag(PRESETS[preset], canvas, np.random.default_rng(0))
    assert bag.image.shape == (*canvas, 3) and bag.image.dtype == np.uint8
    assert bag.masks == []
    assert Counter(name for name, _ in bag.parts) == GOOD_BAG
    for _, (x0, y0, x1, y1) in bag.parts:
        assert 0 <= x0 < x1 <= canvas[1] and 0 <= y0 < y1 <= canvas[0]


def test_boxes_hug_what_is_drawn():
    """Nothing but the noise varies, so each blob darker than the bag is one part, and its extent is the part's box."""
    for seed in range(5):
        plain = screw_bag.BagPreset(0, 0, 0, 0, 0, 0, 0, highlights=0, highlight_strength=0, noise=0, gap=0.05)
        bag = draw_bag(plain, (220, 320), np.random.default_rng(seed))
        inner = bag.image.mean(axis=2)[25:195, 25:295]
        blobs, count = ndimage.label(inner < 130)
        assert count == 6
        extents = np.array([(x.start, y.start, x.stop, y.stop) for y, x in ndimage.find_objects(blobs)]) + 25
        for _, box in bag.parts:
            assert np.abs(extents - box).max(axis=1).min() < 2.5


@pytest.mark.parametrize("defect", [*LOGICAL, *STRUCTURAL])
def test_defect_changes_the_parts_and_the_mask_as_it_says(defect):
    for seed in range(4):
        bag = draw_bag(PRESETS["hard"], CANVAS, np.random.default_rng(seed), defect)
        ((name, mask),) = bag.masks
        assert name == defect and mask.shape == CANVAS and mask.dtype == bool
        change = Counter(name for name, _ in bag.parts)
        change.subtract(GOOD_BAG)
        assert {name for name in change} == set(CLASS_NAMES)
        change = {name: number for name, number in change.items() if number}
        edit = LOGICAL.get(defect)
        if edit is None or defect == "very_short_screw":
            assert change == {}
        else:
            assert change == {edit.add: 1} | {edit.remove: -1} if edit.add and edit.remove else len(change) == 1
        bag_only = edit is not None and edit.add is None
        assert (mask.mean() > 0.3) if bag_only else (0 < mask.mean() < 0.15)


def test_an_extra_part_marks_all_of_its_type():
    preset = PRESETS["easy"]  # no overlaps: as many regions as parts
    for defect, regions in {"extra_nut": 3, "washer_instead_of_nut": 3, "two_short_screws_no_long": 2}.items():
        ((_, mask),) = draw_bag(preset, (110, 160), np.random.default_rng(3), defect).masks
        assert ndimage.label(mask)[1] == regions
        assert ndimage.label(~mask)[1] == 1 + (regions if "screw" not in defect else 0)  # one hole in each ring


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "medium"}, "unknown preset 'medium'"),
        ({"canvas": (31, 90)}, "32 pixels"),
        ({"workers": 0}, "workers"),
        ({"seed": -1}, "seed"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "root", **changes)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("kinds", [[], ["nut"], ["washer", "long screw", "washer"]], ids=str)
def test_a_bag_may_hold_other_parts_than_the_rules(kinds):
    bag = draw_bag(PRESETS["easy"], CANVAS, np.random.default_rng(0), kinds=kinds)
    assert sorted(name for name, _ in bag.parts) == sorted(kinds) and bag.masks == []
    with pytest.raises(ValueError, match="missing_nut"):
        draw_bag(PRESETS["easy"], CANVAS, np.random.default_rng(0), "missing_nut", kinds)


def test_unknown_defects_and_empty_splits_are_refused():
    with pytest.raises(ValueError, match="unknown defect 'rust'"):
        draw_bag(PRESETS["easy"], CANVAS, np.random.default_rng(0), "rust")
    with pytest.raises(ValueError, match="test_good.: 0"):
        BagCounts(train=1, validation=1, test_good=0, test_logical=1, test_structural=1)


def test_a_failure_midway_leaves_nothing(tmp_path, monkeypatch):
    calls = iter(range(100))

    def failing(*args):
        if next(calls) == 5:
            raise RuntimeError("disk on fire")
        return draw_bag(*args)

    monkeypatch.setattr(screw_bag, "draw_bag", failing)
    with pytest.raises(RuntimeError, match="disk on fire"):
        write(tmp_path)
    assert next(calls) == 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_in_a_worker_leaves_nothing(tmp_path, monkeypatch, workers):
    monkeypatch.setitem(PRESETS, "crowded", replace(PRESETS["easy"], gap=0.9))
    with pytest.raises(ValueError, match="no room for 6 parts"):
        write(tmp_path, preset="crowded", workers=workers)
    assert list(tmp_path.iterdir()) == []


def test_existing_bags_are_never_overwritten(tmp_path):
    before = files_of(write(tmp_path, counts=TINY))
    with pytest.raises(FileExistsError):
        write(tmp_path, counts=TINY, seed=9)
    assert files_of(tmp_path / "screw_bag") == before
