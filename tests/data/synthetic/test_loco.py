"""The drawn screw bag as a data set: drawn when prepared, used again, and never taken for another recipe's."""

import json
from pathlib import Path

import pytest

from gdino_lab.data.synthetic.loco import RECIPE, synthetic_loco
from gdino_lab.data.synthetic.screw_bag import BagCounts, write_screw_bags
from gdino_lab.errors import ConfigurationError

COUNTS = {"train": 2, "validation": 1, "test_good": 1, "test_logical": 1, "test_structural": 1}


def bags(root, **changes):
    usual = {"category": "screw_bag", "preset": "easy", "seed": 0, "canvas": [48, 64], "counts": COUNTS}
    return synthetic_loco(root, **usual | {"image_size": 48, "prompt": {"screw_bag": ["nut"]}} | changes)


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_it_is_drawn_on_prepare_and_not_before(tmp_path):
    root = tmp_path / "new" / "set"
    loco = bags(root)
    assert loco.train_size() == 2 and not root.exists()
    loco.prepare()
    assert [len(loco.images(split)) for split in ("train", "validation", "test")] == [2, 1, 3]
    assert json.loads((root / RECIPE).read_text()) == {
        "preset": "easy", "seed": 0, "canvas": [48, 64], "counts": COUNTS
    }  # fmt: skip


def test_it_is_used_again_and_not_drawn_again(tmp_path):
    bags(tmp_path).prepare()
    before = state(tmp_path)
    loco = bags(tmp_path)
    loco.prepare()
    loco.prepare()
    assert state(tmp_path) == before and len(loco.images("train")) == 2


def test_it_draws_what_write_screw_bags_draws(tmp_path):
    bags(tmp_path / "a", seed=3).prepare()
    write_screw_bags(tmp_path / "b", preset="easy", seed=3, canvas=(48, 64), counts=BagCounts(**COUNTS))
    first, second = (
        {name: content for name, (content, _) in state(tmp_path / letter / "screw_bag").items()} for letter in "ab"
    )
    assert first == second


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed=0"),
        ({"preset": "hard"}, "preset=easy"),
        ({"canvas": (48, 66)}, "canvas=[48, 64]"),
        ({"counts": COUNTS | {"train": 3}}, "counts="),
    ],
)
def test_another_recipe_is_refused_and_leaves_the_set_alone(tmp_path, changes, named):
    bags(tmp_path).prepare()
    before = state(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        bags(tmp_path, **changes)
    (complaint,) = caught.value.complaints
    assert str(tmp_path) in complaint and named in complaint
    assert state(tmp_path) == before


def test_what_does_not_change_the_pixels_is_no_other_recipe(tmp_path):
    bags(tmp_path).prepare()
    loco = bags(tmp_path, image_size=[64, 96], prompt={"screw_bag": ["washer", "nut"]}, canvas=(48, 64))
    loco.prepare()
    assert (loco.shortest, loco.longest) == (64, 96)


def test_a_screw_bag_that_is_someone_elses_is_refused(tmp_path):
    (tmp_path / "screw_bag/train/good").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="not drawn here"):
        bags(tmp_path)


def test_a_broken_recipe_file_is_refused_by_name(tmp_path):
    bags(tmp_path).prepare()
    (tmp_path / RECIPE).write_text('{"preset": ')
    with pytest.raises(ConfigurationError, match=RECIPE):
        bags(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"preset": "eazy"}, r"data\.preset=eazy.*Did you mean 'easy'\?"),
        ({"canvas": [31, 64]}, r"data\.canvas="),
        ({"canvas": [64]}, r"data\.canvas="),
        ({"canvas": [64, 64, 3]}, r"data\.canvas="),
        ({"canvas": []}, r"data\.canvas="),
        ({"seed": -1}, r"data\.seed=-1"),
        ({"counts": COUNTS | {"train": 0}}, r"data\.counts=.*train"),
        ({"counts": COUNTS | {"tests": 3}}, r"data\.counts=.*tests"),
        ({"counts": {"train": 3}}, r"data\.counts=.*validation"),
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
    changes = [{}, {"seed": 1}, {"preset": "hard"}, {"canvas": [64, 48]}, {"counts": COUNTS | {"train": 3}}]
    roots = [bags(None, **change).root for change in changes]
    assert len(set(roots)) == len(roots) and all(root.parts[0] == "outputs" for root in roots)
    bags(None).prepare()
    assert (tmp_path / roots[0] / RECIPE).is_file()
    with pytest.raises(ConfigurationError, match=r"data\.category=pushpins"):
        bags(None, category="pushpins", prompt={"pushpins": ["pin"]}).prepare()
