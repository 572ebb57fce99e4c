"""DetectionData: every fault is found before training, named or repaired; what is left is true to the files."""

import json
import logging
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gdino_lab.data.annotations import Annotation, Fault
from gdino_lab.data.detection import MOST_COMPLAINTS, TOLERANCE, DetectionData, _fitted, read_set
from gdino_lab.data.images import read_rgb, read_size
from gdino_lab.errors import ConfigurationError

ORIENTATION = 0x0112  # EXIF tag
WIDTH, HEIGHT = 40, 30
CATEGORIES = [{"id": 5, "name": "nut"}, {"id": 2, "name": "washer"}]


def coco(images: int = 2, boxes: int = 2, categories=CATEGORIES) -> dict:
    """A sound file; its annotations are numbered from 1 and go round the images and the categories."""
    return {
        "images": [
            {"id": number, "file_name": f"{number}.png", "height": HEIGHT, "width": WIDTH} for number in range(images)
        ],
        "annotations": [
            {
                "id": number + 1,
                "image_id": number % images,
                "category_id": categories[number % len(categories)]["id"],
                "bbox": [number, 2, 10, 12],
            }
            for number in range(images * boxes)
        ],
        "categories": categories,
    }


class Root:
    """A set on disk that a test can change before it is read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {"train": coco(), "val": coco(1)}
        for split in self.files:
            (folder / split).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (WIDTH, HEIGHT), (number, 0, 0)).save(folder / split / f"{number}.png")

    def data(self, **changes) -> DetectionData:
        for split, content in self.files.items():
            if isinstance(content, dict):
                self.path(split).write_text(json.dumps(content))
            else:
                self.path(split).write_text("".join(json.dumps(line) + "\n" for line in content))
        usual = {"train_images": "train", "val_images": "val", "image_size": 64, "strict": True}
        paths = {f"{split}_annotations": self.path(split).name for split in self.files}
        return DetectionData(self.folder, **paths | usual | changes)

    def path(self, split: str) -> Path:
        return self.folder / f"{split}.{'json' if isinstance(self.files[split], dict) else 'jsonl'}"

    def annotation(self, number: int, split: str = "train") -> dict:
        return self.files[split]["annotations"][number - 1]


@pytest.fixture
def root(tmp_path) -> Root:
    return Root(tmp_path / "set")


def complaints(data: DetectionData) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        data.prepare()
    assert not any("\n" in complaint for complaint in caught.value.complaints)
    return caught.value.complaints


def boxes(data: DetectionData, split: str = "train") -> list[list[list[float]]]:
    return [image.boxes.tolist() for image in data.images(split)]


def test_a_sound_set_has_no_complaints_and_lists_every_box(root, caplog):
    data = root.data()
    data.prepare()
    assert data.names == ["washer", "nut"] and data.train_size() == 2 and data.notices() == [] and not caplog.records
    first, second = data.images("train")
    assert (first.id, first.path, first.height, first.width) == (0, root.folder / "train/0.png", HEIGHT, WIDTH)
    assert first.boxes.tolist() == [[0, 2, 10, 14], [2, 2, 12, 14]] and first.classes.tolist() == [1, 1]
    assert second.classes.tolist() == [0, 0] and first.caption is None and first.phrases == ()
    assert (first.boxes.dtype, first.classes.dtype, first.crowd.dtype) == (np.float32, np.int64, bool)
    assert [image.id for image in data.images("val")] == [0]


def test_validation_classes_are_matched_by_name(root):
    root.files["val"] = coco(1, 2, [{"id": 1, "name": "nut"}, {"id": 77, "name": "washer"}])
    data = root.data()
    (image,) = data.images("val")
    assert [data.names[place] for place in image.classes] == ["nut", "washer"]


def test_a_validation_class_that_training_lacks_is_refused_even_under_repair(root):
    root.files["val"] = coco(1, 1, [{"id": 2, "name": "washr"}, {"id": 5, "name": "nut"}])
    (found,) = complaints(root.data(strict=False))
    assert found.startswith(f"{root.path('val')}: class 'washr'") and "washer, nut" in found
    assert "Did you mean 'washer'?" in found


def test_images_without_boxes_are_negatives(root):
    root.files["train"]["annotations"] = []
    data = root.data()
    data.prepare()
    assert [image.boxes.shape for image in data.images("train")] == [(0, 4), (0, 4)]
    assert data.names == ["washer", "nut"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_without_images_is_refused(root, split):
    root.files[split] |= {"images": [], "annotations": []}
    (found,) = complaints(root.data(strict=False))
    assert found.startswith(f"{root.path(split)}: holds no image")


def test_crowds_stay_and_are_marked(root):
    root.annotation(1)["iscrowd"] = 1
    assert [image.crowd.tolist() for image in root.data().images("train")] == [[True, False], [False, False]]


# ---- Faults ---------------------------------------------------------------------------------------------------------


def _change(**values):
    return lambda root: root.annotation(1).update(values)


def _no_file(root):
    (root.folder / "train/1.png").unlink()


def _no_image(root):
    (root.folder / "train/1.png").write_text("no image")


def _other_size(root):
    root.files["train"]["images"][1]["height"] = HEIGHT + 1


def _twin(root):
    root.files["train"]["images"].append({"id": 1, "file_name": "3.png"})


FIRST, SECOND, THIRD, FOURTH = ([number, 2, number + 10, 14] for number in (0.0, 1.0, 2.0, 3.0))
SOUND = [[FIRST, THIRD], [SECOND, FOURTH]]
DROPPED = [[THIRD], [SECOND, FOURTH]]
FAULTS = {
    "missing": (_no_file, Fault.FILE, "image 1: .*1.png: missing", [SOUND[0]]),
    "unreadable": (_no_image, Fault.FILE, "image 1: .*1.png: not a readable image", [SOUND[0]]),
    "size": (_other_size, Fault.SIZE, "image 1: recorded as 40x31, .*1.png has 40x30", SOUND),
    "image id": (_twin, Fault.IMAGE_ID, "id 1 is '1.png' and '3.png'", SOUND),
    "annotation id": (_change(id=2), Fault.ANNOTATION_ID, "annotation 2:", SOUND),
    "unknown image": (_change(image_id=9), Fault.UNKNOWN_IMAGE, "annotation 1: image_id 9", DROPPED),
    "unknown class": (_change(category_id=9), Fault.UNKNOWN_CLASS, "annotation 1: .* 9 .*2 washer, 5 nut", DROPPED),
    "no box": (_change(bbox=None), Fault.NO_BOX, "annotation 1:", DROPPED),
    "flat": (_change(bbox=[1, 1, 0, 5]), Fault.DEGENERATE, r"annotation 1: box \[1, 1, 1, 6\] .*of 40x30", DROPPED),
    "turned": (_change(bbox=[9, 9, -5, -5]), Fault.DEGENERATE, "annotation 1:", DROPPED),
    "elsewhere": (_change(bbox=[90, 1, 5, 5]), Fault.DEGENERATE, "annotation 1:", DROPPED),
    "nan": (_change(bbox=[1, 1, float("nan"), 5]), Fault.DEGENERATE, "annotation 1:", DROPPED),
    "infinite": (_change(bbox=[1, 1, float("inf"), 5]), Fault.DEGENERATE, "annotation 1:", DROPPED),
    "outside": (
        _change(bbox=[-3, 5, 50, 10]),
        Fault.OUTSIDE,
        r"annotation 1: box \[-3, 5, 47, 15\]",
        [[[0, 5, WIDTH, 15], THIRD], SOUND[1]],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_by_name_and_repaired_on_demand(root, name, caplog):
    break_it, fault, named, left = FAULTS[name]
    break_it(root)
    head, found = complaints(root.data())
    assert "data.strict=false" in head and f"{fault.what}: 1" in head
    assert found.startswith(f"{fault.what}: {root.path('train')}: ") and re.search(named, found), found

    data = root.data(strict=False)
    with caplog.at_level(logging.WARNING):
        data.prepare()
    assert boxes(data) == left and data.train_size() == len(left)
    (notice,) = data.notices()
    assert notice.startswith(f"{fault.what}: 1 ({fault.repair}): ") and re.search(named, notice)
    assert [record.getMessage() for record in caplog.records] == [notice]


def test_all_faults_of_both_files_are_told_at_once_with_their_counts(root):
    for number in (1, 2):
        root.annotation(number)["bbox"] = [0, 0, 0, 0]
    root.annotation(1, "val")["category_id"] = 1
    (root.folder / "val/0.png").unlink()
    head, *found = complaints(root.data())
    assert f"{Fault.DEGENERATE.what}: 2" in head and f"{Fault.UNKNOWN_CLASS.what}: 1" in head
    assert len(found) == 4 and sum(str(root.path("val")) in complaint for complaint in found) == 2


def test_a_flood_of_faults_is_cut_and_counted(root):
    root.files["train"] = coco(2, 20)
    for annotation in root.files["train"]["annotations"]:
        annotation["bbox"] = [0, 0, 0, 0]
    head, *found = complaints(root.data())
    assert f"{Fault.DEGENERATE.what}: 40" in head
    assert len(found) == MOST_COMPLAINTS + 1 and found[-1] == f"... and {40 - MOST_COMPLAINTS} more"
    (notice,) = root.data(strict=False).notices()
    assert notice.startswith(f"{Fault.DEGENERATE.what}: 40 ") and notice.count("annotation ") == 5


def test_where_a_repair_leaves_nothing_the_reason_is_told(root):
    for number in range(2):
        (root.folder / f"train/{number}.png").unlink()
    (found,) = complaints(root.data(strict=False))
    assert found.startswith(f"{root.path('train')}: holds no image") and "0.png: missing" in found


numbers = st.floats(-60, 60, width=32) | st.floats() | st.integers(-60, 60).map(float)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=6))
def test_every_kept_box_lies_inside_and_has_an_area(recorded):
    annotations = [Annotation("here", box, 0) for box in recorded]
    fitted, kept, faults = _fitted(annotations, HEIGHT, WIDTH)
    assert fitted.dtype == np.float32 and fitted.shape == (len(recorded), 4)
    for box, new, stays, fault in zip(recorded, fitted, kept, faults, strict=True):
        if stays:
            assert 0 <= new[0] < new[2] <= WIDTH and 0 <= new[1] < new[3] <= HEIGHT
            moved = np.abs(np.subtract(box, np.clip(box, 0, (WIDTH, HEIGHT, WIDTH, HEIGHT)))).max()
            assert fault is (Fault.OUTSIDE if moved > TOLERANCE else None)
        else:
            assert fault is Fault.DEGENERATE


@pytest.mark.parametrize("beyond", [0.2, TOLERANCE])
def test_a_pixel_beyond_the_edge_is_clipped_without_a_word(root, beyond):
    root.annotation(1)["bbox"] = [-beyond, -beyond, WIDTH + 2 * beyond, HEIGHT + 2 * beyond]
    data = root.data()
    data.prepare()
    assert boxes(data)[0][0] == [0, 0, WIDTH, HEIGHT]


# ---- Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_those_of_the_upright_image(tmp_path, format, orientation):
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    path = tmp_path / f"image.{format}"
    Image.new("RGB", (WIDTH, HEIGHT)).save(path, exif=tags)
    assert read_size(path) == ((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT))
    assert read_size(path) == read_rgb(path).size[::-1]


def test_a_missing_file_or_folder_is_named(root, tmp_path):
    data = root.data()
    for split in ("train", "val"):
        root.path(split).unlink()
    assert complaints(data) == [f"{root.path(split)}: missing" for split in ("train", "val")]
    assert complaints(root.data(label_map="map.json")) == [f"{root.folder / 'map.json'}: missing"]
    (found,) = complaints(root.data(train_images="nowhere"))
    assert found.startswith(f"{root.folder / 'nowhere'}: no such folder")
    nowhere = DetectionData(tmp_path / "no", "a.json", None, "b.json", None, 64, True)
    assert complaints(nowhere) == [f"data.root={tmp_path / 'no'}: no such folder"]


def test_a_file_that_is_no_text_is_named(root):
    data = root.data()
    root.path("val").write_bytes(b"\xff\xfe\x00")
    (found,) = complaints(data)
    assert found.startswith(f"{root.path('val')}: ")


def test_a_byte_order_mark_and_non_ascii_names_are_read(root):
    (root.folder / "train/0.png").rename(root.folder / "train/größe ねじ.png")
    root.files["train"]["images"][0]["file_name"] = "größe ねじ.png"
    data = root.data()
    root.path("train").write_text(json.dumps(root.files["train"], ensure_ascii=False), encoding="utf-8-sig")
    data.prepare()
    assert data.images("train")[0].path.name == "größe ねじ.png"


def test_absolute_paths_stay(root, tmp_path):
    root.data()
    paths = {
        f"{split}_{what}": path
        for split in ("train", "val")
        for what, path in (("annotations", root.path(split)), ("images", root.folder / split))
    }
    DetectionData(tmp_path / "elsewhere", **paths, image_size=64, strict=True).prepare()


@pytest.mark.parametrize("place", [".", "images", "..", "../images"])
def test_images_are_found_around_the_annotation_file(tmp_path, place):
    own = tmp_path / "set" / "annotations"
    own.mkdir(parents=True)
    folder = own / place
    folder.mkdir(exist_ok=True)
    for number in range(2):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / f"{number}.png")
    (own / "guard.json").write_text(json.dumps(coco()))
    guard = read_set(own / "guard.json", None, strict=True)
    assert guard.names == ["washer", "nut"] and len(guard.images) == 2 and guard.notices == []
    assert all(image.path.is_file() for image in guard.images)
    assert len(read_set(own / "guard.json", folder, strict=True).images) == 2


def test_a_single_set_is_refused_or_repaired_too(root):
    root.annotation(1)["bbox"] = [0, 0, 0, 0]
    root.data()
    with pytest.raises(ConfigurationError, match="annotation 1"):
        read_set(root.path("train"), root.folder / "train", strict=True)
    repaired = read_set(root.path("train"), root.folder / "train", strict=False)
    assert [len(image.boxes) for image in repaired.images] == [1, 2] and len(repaired.notices) == 1
    with pytest.raises(ConfigurationError, match="missing"):
        read_set(root.folder / "no.json", None, strict=False)
    with pytest.raises(ConfigurationError, match=r"\.jsonl"):
        read_set(root.folder / "no.csv", None, strict=False)
    root.files["train"] = coco() | {"images": [], "annotations": []}
    root.data()
    with pytest.raises(ConfigurationError, match="holds no image"):
        read_set(root.path("train"), None, strict=False)


# ---- Both formats ---------------------------------------------------------------------------------------------------


def od(number: int, *categories: str) -> dict:
    instances = [{"bbox": [1, 2, 11, 12], "category": category} for category in categories]
    return {"filename": f"{number}.png", "detection": {"instances": instances}}


def vg(number: int, caption: str, *phrases: str) -> dict:
    regions = [{"bbox": [1, 2, 11, 12], "phrase": phrase} for phrase in phrases]
    return {"filename": f"{number}.png", "grounding": {"caption": caption, "regions": regions}}


def test_lines_train_and_coco_validates(root):
    root.files["train"] = [od(0, "nut", "washer"), vg(1, "a nut on a table", "table"), od(2)]
    data = root.data()
    data.prepare()
    assert data.names == ["nut", "washer"] and data.train_size() == 3
    plain, captioned, negative = data.images("train")
    assert plain.classes.tolist() == [0, 1] and plain.caption is None
    assert captioned.caption == "a nut on a table" and captioned.phrases == (((11, 16),),)
    assert captioned.classes.tolist() == [0] and len(negative.boxes) == 0
    (image,) = data.images("val")
    assert [data.names[place] for place in image.classes] == ["nut", "washer"]


def test_captions_alone_take_the_names_of_validation(root):
    root.files["train"] = [vg(0, "two nuts", "nuts")]
    assert root.data().names == ["washer", "nut"]
    root.files["val"] = [od(0, "bolt")]
    assert root.data().names == ["bolt"]


def test_captions_in_validation_are_refused_by_line_even_under_repair(root):
    root.files["train"] = [od(0, "nut")]
    root.files["val"] = [od(0, "nut"), vg(1, "a nut", "nut")]
    (found,) = complaints(root.data(strict=False))
    assert found.startswith(f"{root.path('val')}: line 2 ") and "mAP" in found


def test_a_label_map_gives_the_names(root):
    (root.folder / "map.json").write_text('{"1": "nut", "0": "bolt", "2": "washer"}')
    root.files["train"] = [od(0, "nut")]
    assert root.data(label_map="map.json").names == ["bolt", "nut", "washer"]


def test_faults_of_lines_are_repaired_too(root):
    root.files["train"] = [vg(0, "a nut", "bolt", "nut"), od(1, "nut")]
    root.files["train"][1]["detection"]["instances"][0]["bbox"] = [0, 0, 900, 9]
    root.files["val"] = [od(0, "nut")]
    assert len(complaints(root.data())) == 3
    data = root.data(strict=False)
    assert boxes(data) == [[[1, 2, 11, 12]], [[0, 0, WIDTH, 9]]] and len(data.notices()) == 2


# ---- The object -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [31, [64], [64, 32], [16, 64], [32, 64, 96], []], ids=str)
def test_image_sizes_that_cannot_be_are_refused(root, size):
    with pytest.raises(ConfigurationError, match=r"data\.image_size"):
        root.data(image_size=size)


@pytest.mark.parametrize("size", [32, [32, 32], [64, 96]], ids=str)
def test_one_number_or_two_give_the_sides(root, size):
    data = root.data(image_size=size)
    assert [data.shortest, data.longest] == (size if isinstance(size, list) else [size, size])


def test_other_endings_are_refused_by_key(root):
    with pytest.raises(ConfigurationError) as caught:
        root.data(train_annotations="train.csv", val_annotations=None)
    first, second = caught.value.complaints
    assert first.startswith("data.train_annotations=train.csv") and second.startswith("data.val_annotations=None")
    assert ".json, .jsonl, .odvg" in first


def test_files_are_read_once_and_travel_with_the_object(root):
    data = root.data()
    data.prepare()
    for path in root.folder.rglob("*.*"):
        path.unlink()
    other = pickle.loads(pickle.dumps(data))
    assert other.names == data.names and other.train_size() == 2 and boxes(other) == boxes(data)


def test_an_object_not_yet_read_travels_and_reads_for_itself(root):
    data = pickle.loads(pickle.dumps(root.data()))
    assert boxes(data) == SOUND


def _drawn(source: Path, target: Path) -> None:
    target.write_text(source.read_text())


def test_a_set_that_draws_itself_is_drawn_on_prepare_only(root):
    root.data()
    hidden = root.path("train").rename(root.folder / "hidden")
    data = root.data(draw=partial(_drawn, hidden, root.path("train")), draw_size=9)
    root.path("train").unlink()
    assert data.train_size() == 9 and not root.path("train").exists()
    with pytest.raises(ConfigurationError, match="missing"):
        data.images("train")
    data.prepare()
    assert len(data.images("train")) == 2
