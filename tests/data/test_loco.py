"""LocoData: which images it lists, and what it refuses before training, by the file's name and all at once."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gdino_lab.data.loco import GOOD, LOGICAL, MOST_COMPLAINTS, STRUCTURAL, LocoData
from gdino_lab.data.synthetic.screw_bag import BagCounts, write_screw_bags
from gdino_lab.errors import ConfigurationError

PROMPT = {name: ["nut", "washer"] for name in ("screw_bag", "pushpins", "juice_bottle")}
COUNTS = BagCounts(train=3, validation=2, test_good=2, test_logical=2, test_structural=2)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("loco")
    write_screw_bags(root, preset="easy", seed=0, canvas=(48, 64), counts=COUNTS)
    for other in ("pushpins", "juice_bottle"):
        shutil.copytree(root / "screw_bag", root / other)
    return root


@pytest.fixture
def root(drawn, tmp_path) -> Path:
    """A copy to break."""
    return shutil.copytree(drawn, tmp_path / "loco")


def data(root, category="screw_bag", image_size=64, prompt=PROMPT, **more) -> LocoData:
    return LocoData(root, category, image_size, prompt, **more)


def complaints(loco: LocoData) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        loco.prepare()
    return caught.value.complaints


def mask_of(root: Path, group: str = LOGICAL, stem: str = "000") -> Path:
    return root / "screw_bag" / "ground_truth" / group / stem / "000.png"


def test_a_sound_set_has_no_complaints_and_lists_every_image(drawn):
    loco = data(drawn)
    loco.prepare()
    assert loco.train_size() == 3
    assert [len(loco.images(split)) for split in ("train", "validation", "test")] == [3, 2, 6]
    assert [image.kind for image in loco.images("test")] == [GOOD] * 2 + [LOGICAL] * 2 + [STRUCTURAL] * 2
    for split in ("train", "validation", "test"):
        for image in loco.images(split):
            assert image.path.is_file() and image.split == split and image.category == "screw_bag"
            assert image.path.parts[-4:-1] == ("screw_bag", split, image.kind)
            expected = () if image.kind == GOOD else (mask_of(drawn, image.kind, image.path.stem),)
            assert image.masks == expected and all(mask.is_file() for mask in image.masks)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("pushpins", ["pushpins"]),
        (["screw_bag", "pushpins"], ["screw_bag", "pushpins"]),
        (("pushpins", "screw_bag"), ["pushpins", "screw_bag"]),
        ("all", ["juice_bottle", "pushpins", "screw_bag"]),
    ],
)
def test_any_subset_of_categories(drawn, asked, expected):
    loco = data(drawn, asked)
    loco.prepare()
    assert loco.categories == expected
    assert [image.category for image in loco.images("train")] == [name for name in expected for _ in range(3)]
    assert loco.train_size() == 3 * len(expected)


def test_files_beside_the_images_are_no_images_and_no_categories(root):
    for path in (root / "readme.txt", root / "licences" / "LICENSE", root / "screw_bag/train/good/Thumbs.db"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    (root / "screw_bag/train/good/._000.png").write_bytes(b"what macOS leaves behind")
    loco = data(root, "all")
    loco.prepare()
    assert loco.categories == ["juice_bottle", "pushpins", "screw_bag"] and loco.train_size() == 9


def test_several_masks_an_image_stay_apart_and_may_overlap(root):
    second = mask_of(root).with_name("001.png")
    shutil.copy(mask_of(root), second)
    loco = data(root)
    loco.prepare()
    first_logical = next(image for image in loco.images("test") if image.kind == LOGICAL)
    assert first_logical.masks == (mask_of(root), second)


def test_upper_case_endings_and_jpegs_count(root):
    good = root / "screw_bag/train/good"
    os.rename(good / "000.png", good / "000.PNG")
    with Image.open(good / "001.png") as image:
        image.save(good / "001.jpeg")
    (good / "001.png").unlink()
    loco = data(root)
    loco.prepare()
    assert loco.train_size() == 3


def test_unknown_categories_are_named_with_the_nearest_and_what_is_there(drawn):
    prompt = PROMPT | {"screwbag": ["a"], "bottle": ["b"]}
    found = complaints(data(drawn, ["screwbag", "pushpins", "bottle"], prompt=prompt))
    assert len(found) == 2
    assert "screwbag" in found[0] and "Did you mean 'screw_bag'?" in found[0]
    assert all("juice_bottle, pushpins, screw_bag" in complaint for complaint in found)


@pytest.mark.parametrize("phrases", [{}, {"screw_bag": []}], ids=["none", "empty"])
def test_a_category_without_phrases_is_refused(drawn, phrases):
    (found,) = complaints(data(drawn, ["screw_bag", "pushpins"], prompt={"pushpins": ["pin"]} | phrases))
    assert "data.prompt" in found and "screw_bag" in found


def test_a_missing_root_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").touch()
        (found,) = complaints(data(path))
        assert found.startswith(f"data.root={path}:")


def test_a_root_without_categories_is_named(tmp_path):
    (found,) = complaints(data(tmp_path, "all"))
    assert str(tmp_path) in found


@pytest.mark.parametrize("size", [31, [64], [64, 32], [16, 64], [32, 64, 96], []], ids=str)
def test_image_sizes_that_cannot_be_are_refused(drawn, size):
    with pytest.raises(ConfigurationError, match=r"data\.image_size"):
        data(drawn, image_size=size)


@pytest.mark.parametrize("size", [32, [32, 32], [64, 96]], ids=str)
def test_one_number_or_two_give_the_sides(drawn, size):
    loco = data(drawn, image_size=size)
    assert [loco.shortest, loco.longest] == (size if isinstance(size, list) else [size, size])


@pytest.mark.parametrize("split", ["train/good", "validation/good", "test/good", f"test/{LOGICAL}"])
@pytest.mark.parametrize("how", ["empty", "missing"])
def test_an_empty_split_is_named(root, split, how):
    folder = root / "screw_bag" / split
    shutil.rmtree(folder)
    if how == "empty":
        folder.mkdir()
    # Without any train/ the folder is no category at all; here train/ itself stays.
    (found,) = complaints(data(root))
    assert found.startswith(f"{folder}:")


@pytest.mark.parametrize(
    "content", [None, "{", "[1, 2]", "7", '[{"defect_name": "x"}]', '[{"pixel_value": null}]', '{"pixel_value": 3}', ""]
)
def test_a_missing_or_malformed_defects_config_is_named(root, content):
    path = root / "screw_bag/defects_config.json"
    path.unlink() if content is None else path.write_text(content)
    (found,) = complaints(data(root))
    assert found.startswith(f"{path}:")


def test_a_truncated_image_is_named(root):
    path = root / "screw_bag/validation/good/001.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (found,) = complaints(data(root))
    assert found.startswith(f"{path}:")
    data(root, "pushpins").prepare()  # another category's files are not its business


def test_a_mask_of_another_size_is_named_with_both_sizes(root):
    with Image.open(mask_of(root)) as mask:
        mask.resize((64, 47), Image.Resampling.NEAREST).save(mask_of(root))
    (found,) = complaints(data(root))
    assert found.startswith(f"{mask_of(root)}:") and "64x47" in found and "64x48" in found


def test_a_turned_mask_fits_only_its_turned_image(root):
    with Image.open(mask_of(root)) as mask:
        mask.transpose(Image.Transpose.ROTATE_90).save(mask_of(root))
    (found,) = complaints(data(root))
    assert "48x64" in found and "64x48" in found


@pytest.mark.parametrize("value", [1, 42, 235])
def test_a_mask_value_that_defects_config_does_not_know_is_named(root, value):
    with Image.open(mask_of(root)) as mask:
        pixels = np.array(mask)
    pixels[3, 4] = value
    Image.fromarray(pixels).save(mask_of(root))
    (found,) = complaints(data(root))
    assert found.startswith(f"{mask_of(root)}:") and f" {value} " in found and "236" in found


def test_a_mask_that_is_no_single_channel_image_is_named(root):
    with Image.open(mask_of(root)) as mask:
        mask.convert("RGB").save(mask_of(root))
    (found,) = complaints(data(root))
    assert found.startswith(f"{mask_of(root)}:")


def test_an_anomalous_image_without_a_mask_is_named(root):
    shutil.rmtree(mask_of(root, STRUCTURAL, "001").parent)
    (found,) = complaints(data(root))
    assert found.startswith(f"{root / 'screw_bag/test' / STRUCTURAL / '001.png'}:")
    assert f"ground_truth/{STRUCTURAL}/001" in found


def test_all_files_that_are_wrong_are_named_at_once(root):
    truncated = root / "screw_bag/train/good/002.png"
    truncated.write_bytes(b"")
    elsewhere = root / "pushpins/test/good/000.png"
    elsewhere.write_text("no image")
    mask_of(root).write_text("no mask")
    shutil.rmtree(mask_of(root, STRUCTURAL).parent)
    found = complaints(data(root, ["screw_bag", "pushpins"]))
    wrong = [truncated, mask_of(root), root / "screw_bag/test" / STRUCTURAL / "000.png", elsewhere]
    assert len(found) == len(wrong)
    assert all(any(complaint.startswith(f"{path}:") for complaint in found) for path in wrong)


def test_all_folders_that_are_wrong_are_named_at_once(root):
    empty = [root / "screw_bag/validation/good", root / "pushpins/test" / LOGICAL]
    for folder in empty:
        shutil.rmtree(folder)
    (root / "pushpins/defects_config.json").unlink()
    found = complaints(data(root, ["screw_bag", "pushpins"]))
    wrong = [*empty, root / "pushpins/defects_config.json"]
    assert sorted(complaint.split(":")[0] for complaint in found) == sorted(map(str, wrong))


def test_a_flood_of_complaints_is_cut_and_counted(root):
    good = root / "screw_bag/train/good"
    for number in range(MOST_COMPLAINTS + 7):
        (good / f"{number:03d}.png").write_bytes(b"broken")
    found = complaints(data(root))
    assert len(found) == MOST_COMPLAINTS + 1 and found[-1] == "... and 7 more"


def test_non_ascii_paths_are_read_and_named(drawn, tmp_path):
    root = shutil.copytree(drawn, tmp_path / "Prüfteile – größe 1" / "ねじ")
    data(root).prepare()
    path = root / "screw_bag/test/good/000.png"
    path.write_bytes(b"broken")
    (found,) = complaints(data(root))
    assert found.startswith(f"{path}:")


def test_a_set_that_draws_itself_is_drawn_on_prepare_only(drawn, tmp_path):
    root, calls = tmp_path / "later", []

    def draw():
        calls.append(1)
        shutil.copytree(drawn, root)

    loco = data(root, draw=draw, draw_size=3)
    assert loco.train_size() == 3 and not calls and not root.exists()
    loco.prepare()
    assert calls == [1] and len(loco.images("train")) == 3


def test_the_config_may_hold_more_than_is_needed(root):
    path = root / "screw_bag/defects_config.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), {"pixel_value": 9, "comment": "ours"}]))
    data(root).prepare()
