"""The detection task: samples, targets, scores; chunks of classes; captions; the guard set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gdino_lab.data.detection import DetectionData
from gdino_lab.errors import ConfigurationError
from gdino_lab.models.grounding_dino import random_weights_processor
from gdino_lab.tasks.detection import DetectionTask

WEIGHTS = {"class": 2.0, "box": 5.0, "giou": 2.0}
STILL = {"scales": [1.0, 1.0], "flip": 0.0, "crop": 0.0, "min_visible": 0.3, "colour": 0.0}
PROCESSOR = random_weights_processor()


def task_with(**changes) -> DetectionTask:
    arguments = {
        "loss_weights": WEIGHTS, "match_weights": WEIGHTS, "focal_alpha": 0.25, "augment": STILL, "chunk_classes": False,
        "class_score": "mean", "max_detections": 100, "guard": None, "guard_images": None, "seed": 0,
    }  # fmt: skip
    return DetectionTask(**(arguments | changes))


def coco_file(folder: Path, name: str, categories: dict[int, str], boxes: list[list[tuple]], size=(40, 64)) -> Path:
    """A COCO file with an image for each list of (category id, x, y, w, h[, crowd])."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for index, found in enumerate(boxes):
        file = f"{name}_{index}.png"
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / file)
        images.append({"id": 100 - index, "file_name": file, "height": size[0], "width": size[1]})
        for category, x, y, w, h, *crowd in found:
            annotations.append(
                {"id": len(annotations) + 1, "image_id": 100 - index, "category_id": category, "bbox": [x, y, w, h],
                 "area": w * h, "iscrowd": int(bool(crowd))}
            )  # fmt: skip
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": key, "name": value} for key, value in categories.items()],
    }
    (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / f"{name}.json"


CATEGORIES = {42: "nut", 7: "long screw"}
BOXES = [
    [(42, 10, 10, 20, 12), (7, 30, 4, 20, 30)],
    [],
    [(7, 5, 5, 10, 10, "crowd"), (42, 40, 20, 10, 16)],
]


def data_in(folder: Path, train: str = "train.json", val: str = "train.json", strict: bool = True) -> DetectionData:
    return DetectionData(folder, train, None, val, None, [40, 64], strict)


@pytest.fixture
def data(tmp_path: Path) -> DetectionData:
    coco_file(tmp_path, "train", CATEGORIES, BOXES)
    return data_in(tmp_path)


def test_targets_are_the_class_tokens_and_box_fractions_of_each_image(data):
    task = task_with()
    assert task.check(data, PROCESSOR) == []
    train = task.train_set()
    batch = task.collate([train[0, index] for index in range(3)])
    assert batch["counts"] == (2, 0, 1) and task.count(batch) == 3  # the crowd is nothing to learn
    assert data.names == ["long screw", "nut"]
    names = [PROCESSOR.tokenizer.convert_ids_to_tokens(row.tolist()) for row in batch["inputs"]["input_ids"]]
    for image, box, words in ((0, 0, ["nut"]), (0, 1, ["long", "screw"]), (2, 0, ["nut"])):
        positions = batch["tokens"][image, box].nonzero().flatten().tolist()
        assert [names[image][position] for position in positions] == words
    torch.testing.assert_close(batch["boxes"][0, 0], torch.tensor([20 / 64, 16 / 40, 20 / 64, 12 / 40]))
    assert not batch["tokens"][1].any() and not batch["boxes"][1].any()


def test_samples_depend_on_seed_epoch_and_index_alone(data):
    augment = STILL | {"flip": 0.5, "crop": 0.5, "colour": 0.5, "scales": [0.7, 1.0]}
    sets = []
    for _ in range(2):
        task = task_with(augment=augment)
        task.bind(data, PROCESSOR)
        sets.append(task.train_set())
    for epoch in range(4):
        one, two = sets[0][epoch, 0], sets[1][epoch, 0]
        assert torch.equal(one.pixels, two.pixels) and torch.equal(one.boxes, two.boxes) and one.prompt == two.prompt
    assert any(not torch.equal(sets[0][0, 0].boxes, sets[0][epoch, 0].boxes) for epoch in range(1, 8))


@pytest.mark.parametrize(("name", "flips"), [("left shoe", False), ("leftover", True)])
def test_no_mirror_image_where_a_name_says_left(tmp_path, name, flips):
    coco_file(tmp_path, "train", {1: name}, [[(1, 2, 2, 10, 10)]])
    task = task_with(augment=STILL | {"flip": 1.0})
    task.bind(data_in(tmp_path), PROCESSOR)
    centre = task.train_set()[0, 0].boxes[0, 0].item()
    assert centre == pytest.approx((64 - 7 if flips else 7) / 64)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("crop", [0.0, 1.0])
def test_no_training_batch_is_larger_than_the_worst(tmp_path, batch, crop):
    coco_file(tmp_path, "train", CATEGORIES, BOXES, size=(40, 90))
    coco_file(tmp_path, "val", CATEGORIES, [[]], size=(70, 50))
    task = task_with(augment=STILL | {"crop": crop, "scales": [0.8, 1.1], "flip": 0.5})
    task.bind(data_in(tmp_path, val="val.json"), PROCESSOR)
    worst, train = task.worst(batch), task.train_set()
    for epoch in range(60):
        inputs = task.collate([train[epoch, index] for index in range(batch)])["inputs"]
        height, width = inputs["pixel_values"].shape[-2:]
        assert height * width <= worst.height * worst.width and inputs["input_ids"].shape[1] <= worst.tokens
        assert batch == 1 or (height <= worst.height and width <= worst.width)
    assert worst.boxes == 2
    assert [*task.blank_batch(batch, worst)["inputs"]["pixel_values"].shape] == [batch, 3, worst.height, worst.width]


def perfect_records(task: DetectionTask) -> list[dict]:
    """What a perfect detector would leave."""
    records = []
    for index, (split, position, chunk) in enumerate(task.evaluation_set().entries):
        image = task.images(split)[position]
        asked = task.evaluation_set().prompts[split][chunk].classes
        kept = np.isin(image.classes, asked)
        records.append(
            {"index": index, "boxes": image.boxes[kept], "scores": np.ones(kept.sum()), "classes": image.classes[kept]}
        )
    return records


def test_the_truth_as_prediction_scores_one_with_any_category_ids(data):
    task = task_with()
    task.bind(data, PROCESSOR)
    found = task.evaluate(perfect_records(task))
    assert found.metrics["ap"] == found.metrics["ap50"] == found.selection == 1.0
    assert found.metrics["ap/nut"] == found.metrics["ap/long screw"] == 1.0


def test_the_guard_set_has_its_own_classes_and_numbers(data, tmp_path):
    guard = coco_file(tmp_path / "other", "guard", {3: "cat", 1: "dog"}, [[(3, 0, 0, 9, 9)], [(1, 5, 5, 9, 9)]])
    task = task_with(guard=str(guard))
    task.check(data, PROCESSOR)
    records = perfect_records(task)
    assert len(records) == 5
    found = task.evaluate(records)
    assert found.metrics["ap"] == found.metrics["guard/ap"] == 1.0 == found.metrics["guard/ap/dog"]
    worse = [record | {"boxes": record["boxes"] + 30} if record["index"] == 3 else record for record in records]
    found = task.evaluate(worse)
    assert found.selection == found.metrics["ap"] == 1.0 and found.metrics["guard/ap"] == 0.5
    table = task.tables({"tuned": found, "untuned": found})[0]
    assert table.columns[-1] == "guard AP" and table.rows[0][-1] == "50.0"
    # One split alone, as `eval` asks.
    assert [entry[0] for entry in task.evaluation_set("guard").entries] == ["guard", "guard"]


def test_more_classes_than_a_prompt_holds(tmp_path):
    categories = {index: f"part {index}" for index in range(150)}
    boxes = [[(index, 2, 2, 10, 10), (149 - index, 20, 20, 9, 9)] for index in (0, 60, 140)]
    coco_file(tmp_path, "train", categories, boxes)
    with pytest.raises(ConfigurationError, match="outgrow it at 'part .*task.chunk_classes=true"):
        task_with().check(data_in(tmp_path), PROCESSOR)
    task = task_with(chunk_classes=True)
    task.check(data_in(tmp_path), PROCESSOR)
    sample = task.train_set()[0, 0]
    assert len(sample.prompt.input_ids) <= 256 and set(sample.classes) == {0, 149}
    assert sample.prompt != task.train_set()[1, 0].prompt  # other negatives in another epoch
    entries = task.evaluation_set().entries
    assert len(entries) == 3 * len(task.evaluation_set().prompts["val"]) > 3
    assert task.evaluate(perfect_records(task)).metrics["ap"] == 1.0


def test_an_image_whose_own_classes_have_no_room_is_named(tmp_path):
    categories = {index: f"part {index}" for index in range(150)}
    coco_file(tmp_path, "train", categories, [[(index, 2, 2, 10, 10) for index in range(150)]])
    with pytest.raises(ConfigurationError, match="image 100: the names of its classes alone"):
        task_with(chunk_classes=True).check(data_in(tmp_path), PROCESSOR)


def test_captions_and_classes_in_one_batch(tmp_path):
    coco_file(tmp_path, "val", CATEGORIES, BOXES)
    caption = "a nut beside a long screw"
    lines = [
        {"filename": "val_0.png", "height": 40, "width": 64, "detection": {"instances": [{"bbox": [1, 1, 9, 9], "label": 1, "category": "nut"}]}},
        {"filename": "val_1.png", "height": 40, "width": 64, "grounding": {"caption": caption, "regions": [
            {"bbox": [30, 4, 50, 34], "phrase": "long screw", "tokens_positive": [[15, 25]]}]}},
        {"filename": "val_2.png", "height": 40, "width": 64, "detection": {"instances": [{"bbox": [1, 1, 9, 9], "label": 0, "category": "long screw"}]}},
    ]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = task_with()
    assert task.check(data_in(tmp_path, "train.jsonl", "val.json"), PROCESSOR) == []
    train = task.train_set()
    batch = task.collate([train[0, index] for index in range(3)])
    tokens = [PROCESSOR.tokenizer.convert_ids_to_tokens(row.tolist()) for row in batch["inputs"]["input_ids"]]
    found = [[tokens[row][place] for place in batch["tokens"][row, 0].nonzero().flatten()] for row in range(3)]
    assert found == [["nut"], ["long", "screw"], ["long", "screw"]]


def test_a_caption_that_is_too_long_is_named(tmp_path):
    coco_file(tmp_path, "val", CATEGORIES, BOXES)
    line = {"filename": "val_0.png", "height": 40, "width": 64, "grounding": {"caption": "nut " * 300, "regions": [
        {"bbox": [1, 1, 9, 9], "phrase": "nut", "tokens_positive": [[0, 3]]}]}}  # fmt: skip
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigurationError, match="train.jsonl: image 1: the caption has 303 tokens"):
        task_with().check(data_in(tmp_path, "train.jsonl", "val.json"), PROCESSOR)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_weights": {"class": 1.0}}, "task.loss_weights.box is missing"),
        ({"match_weights": WEIGHTS | {"gious": 1.0}}, "task.match_weights.gious: .*Did you mean 'giou'"),
        ({"loss_weights": WEIGHTS | {"box": -1.0}}, "task.loss_weights.box=-1.0"),
        ({"focal_alpha": 1.5}, "task.focal_alpha=1.5"),
        ({"class_score": "median"}, "task.class_score=median"),
        ({"max_detections": 0}, "task.max_detections=0"),
        ({"augment": STILL | {"flip": 2.0}}, "task.augment.flip"),
        ({"augment": STILL | {"flop": 2.0}}, "task.augment: .*flop"),
    ],
)
def test_refused(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        task_with(**changes)
