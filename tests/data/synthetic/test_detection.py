"""The drawn detection set: COCO files true to the pixels, whole or not at all, never taken for another recipe's."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gdino_lab.data.detection import read_set
from gdino_lab.data.synthetic import detection
from gdino_lab.data.synthetic.detection import FEWEST, MOST, POOL, synthetic_detection
from gdino_lab.data.synthetic.recipe import RECIPE
from gdino_lab.data.synthetic.screw_bag import CLASS_NAMES, PRESETS, draw_bag
from gdino_lab.errors import ConfigurationError

CANVAS = (48, 72)
COUNTS = {"train": 60, "val": 3}
SMALL = {"train": 2, "val": 1}


def bags(root, **changes):
    usual = {"preset": "easy", "seed": 0, "canvas": CANVAS, "counts": SMALL, "image_size": 48, "strict": True}
    return synthetic_detection(root, **usual | changes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    data = bags(tmp_path_factory.mktemp("bags") / "set", counts=COUNTS)
    data.prepare()
    return data


def test_it_is_drawn_on_prepare_and_not_before(tmp_path):
    root = tmp_path / "new" / "set"
    data = bags(root)
    assert data.train_size() == 2 and not root.parent.exists()
    data.prepare()
    assert set(files_of(root)) == {
        "train/0000.png", "train/0001.png", "val/0000.png", "annotations/train.json", "annotations/val.json", RECIPE
    }  # fmt: skip
    assert [path.name for path in root.parent.iterdir()] == ["set"]
    assert json.loads((root / RECIPE).read_text()) == {
        "preset": "easy", "seed": 0, "canvas": list(CANVAS), "counts": SMALL
    }  # fmt: skip


def test_it_has_no_fault_and_every_number_of_parts(drawn):
    assert drawn.names == list(CLASS_NAMES) and drawn.notices() == []
    assert [len(drawn.images(split)) for split in ("train", "val")] == [60, 3] and drawn.train_size() == 60
    images = drawn.images("train")
    sizes = [len(image.boxes) for image in images]
    assert {0, FEWEST, MOST} <= set(sizes) and not set(sizes) & set(range(1, FEWEST)) and max(sizes) == MOST
    assert 0 < sizes.count(0) <= 6
    seen = np.bincount(np.concatenate([image.classes for image in images]), minlength=4)
    assert (seen > 30).all()
    assert len({tuple(sorted(image.classes)) for image in images}) > 20
    assert all((image.height, image.width) == CANVAS for image in images)


def test_parts_are_darker_than_the_plastic_around_them(drawn):
    for image in drawn.images("train"):
        pixels = np.asarray(Image.open(image.path).convert("L"), float)
        for x0, y0, x1, y1 in image.boxes.round().astype(int):
            assert np.percentile(pixels[y0:y1, x0:x1], 10) < 130


def test_the_files_are_coco_that_anyone_can_read(drawn):
    found = read_set(drawn.root / "annotations/val.json", drawn.root / "val", strict=True)
    assert found.names == list(CLASS_NAMES)
    content = json.loads((drawn.root / "annotations/train.json").read_text())
    assert [annotation["id"] for annotation in content["annotations"]] == list(
        range(1, len(content["annotations"]) + 1)
    )
    for annotation in content["annotations"]:
        x, y, width, height = annotation["bbox"]
        assert x >= 0 and y >= 0 and x + width <= CANVAS[1] + 1e-3 and y + height <= CANVAS[0] + 1e-3
        assert annotation["area"] == pytest.approx(width * height, abs=1e-3)


def test_files_depend_on_the_recipe_and_a_longer_split_starts_the_same(tmp_path, drawn):
    bags(tmp_path / "a").prepare()
    first = files_of(tmp_path / "a")
    bags(tmp_path / "b").prepare()
    assert files_of(tmp_path / "b") == first
    images = {name: data for name, data in first.items() if name.endswith("png")}
    assert images.items() <= files_of(drawn.root).items() and len(set(images.values())) == len(images)
    bags(tmp_path / "c", seed=1).prepare()
    assert not {data for name, data in files_of(tmp_path / "c").items() if name.endswith("png")} & set(images.values())


def test_it_is_used_again_and_not_drawn_again(tmp_path):
    root = tmp_path / "set"
    bags(root).prepare()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    other = pickle.loads(pickle.dumps(bags(root)))
    other.prepare()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert len(other.images("train")) == 2


def test_an_empty_folder_is_filled(tmp_path):
    bags(tmp_path).prepare()
    assert (tmp_path / RECIPE).is_file()


def test_a_failure_midway_leaves_nothing(tmp_path, monkeypatch):
    calls = iter(range(100))

    def failing(*args, **kwargs):
        if next(calls) == 2:
            raise RuntimeError("disk on fire")
        return draw_bag(*args, **kwargs)

    monkeypatch.setattr(detection, "draw_bag", failing)
    with pytest.raises(RuntimeError, match="disk on fire"):
        bags(tmp_path / "set").prepare()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed=0"),
        ({"preset": "hard"}, "preset=easy"),
        ({"canvas": (48, 66)}, "canvas="),
        ({"counts": {"train": 3, "val": 1}}, "counts="),
    ],
)
def test_another_recipe_is_refused_and_leaves_the_set_alone(tmp_path, changes, named):
    bags(tmp_path).prepare()
    before = files_of(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        bags(tmp_path, **changes)
    (complaint,) = caught.value.complaints
    assert str(tmp_path) in complaint and named in complaint and files_of(tmp_path) == before


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigurationError, match=r"notes\.txt that was not drawn here"):
        bags(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"preset": "eazy"}, r"data\.preset=eazy.*Did you mean 'easy'\?"),
        ({"canvas": [31, 64]}, r"data\.canvas="),
        ({"canvas": [64]}, r"data\.canvas="),
        ({"seed": -1}, r"data\.seed=-1"),
        ({"counts": {"train": 0, "val": 1}}, r"data\.counts=.*1 or more"),
        ({"counts": {"train": 3}}, r"data\.counts=.*train, val"),
        ({"counts": SMALL | {"test": 3}}, r"data\.counts=.*train, val"),
        ({"image_size": 8}, r"data\.image_size=8"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused_by_key_and_nothing_is_written(tmp_path, changes, key):
    with pytest.raises(ConfigurationError, match=key):
        bags(tmp_path / "root", **changes)
    assert not (tmp_path / "root").exists()


def test_without_a_root_every_recipe_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = [{}, {"seed": 1}, {"preset": "hard"}, {"canvas": [64, 48]}, {"counts": {"train": 3, "val": 1}}]
    roots = [bags(None, **change).root for change in changes]
    assert len(set(roots)) == len(roots)
    assert all(root.parts[:3] == ("outputs", "data", "synthetic_detection") for root in roots)


@pytest.mark.parametrize("preset", PRESETS)
def test_there_is_room_for_the_largest_parts_of_the_pool(preset):
    for seed in range(40):
        assert len(draw_bag(PRESETS[preset], CANVAS, np.random.default_rng(seed), kinds=POOL[:MOST]).parts) == MOST
