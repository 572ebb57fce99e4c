"""COCO files of every kind are read right, or refused by file and key; any JSON at all is one of the two."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdino_lab.data.annotations import Fault, Listing
from gdino_lab.data.formats.coco import parse_coco
from gdino_lab.errors import ConfigurationError

SOURCE = Path("some/instances.json")
IMAGES = [
    {"id": 7, "file_name": "a.jpg", "height": 40, "width": 60},
    {"id": "x1", "file_name": "deep/b.png", "height": 30, "width": 20},
    {"id": 2, "file_name": "empty.png"},
]
CATEGORIES = [{"id": 90, "name": "washer"}, {"id": 3, "name": "nut", "supercategory": "part"}]
ANNOTATIONS = [
    {"id": 1, "image_id": "x1", "category_id": 90, "bbox": [1, 2, 3, 4.5]},
    {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 60, 40], "iscrowd": 1, "segmentation": {}},
    {"id": 3, "image_id": 7, "category_id": 90, "bbox": [5, 5, 1, 1], "iscrowd": 0},
]


def content(**changes) -> dict:
    return {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES} | changes


def parse(**changes) -> Listing:
    return parse_coco(json.dumps(content(**changes)), SOURCE)


def complaints(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse_coco(text, SOURCE)
    assert all(complaint.startswith(f"{SOURCE}") and "\n" not in complaint for complaint in caught.value.complaints)
    return caught.value.complaints


def test_names_follow_the_ids_and_images_the_file():
    listing = parse()
    assert listing.names == ["nut", "washer"] and listing.problems == []
    assert [(image.id, image.file, image.size) for image in listing.images] == [
        (7, "a.jpg", (40, 60)), ("x1", "deep/b.png", (30, 20)), (2, "empty.png", None)
    ]  # fmt: skip
    first, second, third = listing.images
    assert [(each.box, each.label, each.crowd) for each in first.annotations] == [
        ((0, 0, 60, 40), 0, True), ((5, 5, 6, 6), 1, False)
    ]  # fmt: skip
    assert [(each.box, each.label, each.crowd) for each in second.annotations] == [((1, 2, 4, 6.5), 1, False)]
    assert third.annotations == [] and third.caption is None


@given(st.permutations(IMAGES), st.permutations(ANNOTATIONS), st.permutations(CATEGORIES))
def test_the_order_of_a_file_changes_no_box(images, annotations, categories):
    listing = parse(images=images, annotations=annotations, categories=categories)
    assert listing.names == ["nut", "washer"]
    assert [image.id for image in listing.images] == [image["id"] for image in images]
    boxes = {image.id: sorted((each.box, each.label) for each in image.annotations) for image in listing.images}
    assert boxes == {7: [((0, 0, 60, 40), 0), ((5, 5, 6, 6), 1)], "x1": [((1, 2, 4, 6.5), 1)], 2: []}


@pytest.mark.parametrize(
    ("changes", "fault", "named", "left"),
    [
        ({"image_id": 99}, Fault.UNKNOWN_IMAGE, "annotation 3: image_id 99", 2),
        ({"image_id": "7"}, Fault.UNKNOWN_IMAGE, "image_id '7'", 2),
        ({"category_id": 4}, Fault.UNKNOWN_CLASS, "annotation 3: category_id 4 .* 3 nut, 90 washer", 2),
        ({"bbox": []}, Fault.NO_BOX, "annotation 3: has no bbox", 2),
        ({"bbox": None, "segmentation": [[1, 1, 2, 1, 2, 2]]}, Fault.NO_BOX, "annotation 3: .*segmentation", 2),
        ({"id": 1}, Fault.ANNOTATION_ID, "annotation 1:", 3),
    ],
    ids=str,
)
def test_what_a_repair_can_mend_is_a_problem(changes, fault, named, left):
    listing = parse(annotations=[*ANNOTATIONS[:2], ANNOTATIONS[2] | changes])
    (problem,) = listing.problems
    assert problem.fault is fault and problem.text.startswith(f"{SOURCE}: ")
    assert re.search(named, problem.text), problem.text
    assert sum(len(image.annotations) for image in listing.images) == left


def test_of_two_images_with_one_id_the_first_stays():
    listing = parse(images=[*IMAGES, {"id": 7, "file_name": "again.jpg"}])
    assert [image.file for image in listing.images] == ["a.jpg", "deep/b.png", "empty.png"]
    ((fault, text),) = listing.problems
    assert fault is Fault.IMAGE_ID and "7" in text and "'a.jpg'" in text and "'again.jpg'" in text


def test_many_categories_are_shortened():
    categories = [{"id": number, "name": f"part {number}"} for number in range(100)]
    (problem,) = parse(categories=categories, annotations=[ANNOTATIONS[0] | {"category_id": 100}]).problems
    assert "19 part 19" in problem.text and "20 part 20" not in problem.text and "100 in all" in problem.text


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
@pytest.mark.parametrize("value", [None, {}, "list", [3]], ids=str)
def test_a_key_that_is_no_list_of_objects_is_refused(key, value):
    (found,) = complaints(json.dumps(content(**{key: value})))
    assert key in found


def test_all_missing_keys_are_named_at_once():
    assert len(complaints("{}")) == 3


@pytest.mark.parametrize(
    ("key", "changes", "named"),
    [
        ("images", {"id": None}, "images[0]: id"),
        ("images", {"id": 1.5}, "images[0]: id"),
        ("images", {"file_name": 3}, "images[0]: file_name"),
        ("images", {"height": "40"}, "images[0]: height"),
        ("categories", {"id": "90"}, "categories[0]: id"),
        ("categories", {"name": None}, "categories[0]: name"),
        ("categories", {"name": " "}, "categories[0]: name"),
        ("annotations", {"image_id": None}, "annotations[0]: image_id"),
        ("annotations", {"category_id": True}, "annotations[0]: category_id"),
        ("annotations", {"bbox": [1, 2, 3]}, "annotations[0]: bbox"),
        ("annotations", {"bbox": [1, 2, "3", 4]}, "annotations[0]: bbox"),
        ("annotations", {"bbox": {"x": 3}}, "annotations[0]: bbox"),
        ("annotations", {"iscrowd": "no"}, "annotations[0]: iscrowd"),
        ("annotations", {"id": [1]}, "annotations[0]: id"),
    ],
)
def test_wrong_types_are_refused_by_key(key, changes, named):
    first, *others = content()[key]
    (found,) = complaints(json.dumps(content(**{key: [first | changes, *others]})))
    assert named in found


@pytest.mark.parametrize(
    ("twin", "named"),
    [
        ({"id": 4, "name": "nut"}, ("'nut'", "3", "4")),
        ({"id": 4, "name": "Nut "}, ("'Nut'", "3", "4")),
        ({"id": 3, "name": "bolt"}, ("id 3", "'nut'", "'bolt'")),
    ],
)
def test_categories_that_cannot_be_told_apart_are_refused(twin, named):
    (found,) = complaints(json.dumps(content(categories=[*CATEGORIES, twin])))
    assert all(word in found for word in named)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "[" * 100_000, "{'images': []}"], ids=lambda t: t[:9])
def test_what_is_no_object_is_refused(text):
    complaints(text)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))
keys = ["id", "image_id", "category_id", "bbox", "file_name", "name", "height", "width", "iscrowd", "segmentation"]
usual = st.sampled_from([1, 2, "a.png", "nut", [1, 1, 5, 5], [0.0, 1e308, 1e308, 1e308], 0])
records = st.lists(st.dictionaries(st.sampled_from(keys), usual | values, max_size=8) | values, max_size=3)


@given(st.fixed_dictionaries({"images": records, "annotations": records, "categories": records}) | values)
def test_any_json_is_read_or_refused(value):
    text = json.dumps(value)
    try:
        listing = parse_coco(text, SOURCE)
    except ConfigurationError as error:
        assert error.complaints and all(str(SOURCE) in complaint for complaint in error.complaints)
    else:
        labels = [each.label for image in listing.images for each in image.annotations]
        assert all(0 <= label < len(listing.names) for label in labels)
