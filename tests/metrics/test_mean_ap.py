"""COCO's numbers against pycocotools, on random sets, and what holds of them anyway."""

import contextlib
import io
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gdino_lab.metrics.mean_ap import Detections, Truth, mean_ap

OVERALL = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar")


def dataset(images, names, rows) -> COCO:
    made = COCO()
    made.dataset = {
        "images": [{"id": i, "height": 1, "width": 1} for i in range(images)],
        "categories": [{"id": c} for c in range(len(names))],
        "annotations": [row | {"id": number} for number, row in enumerate(rows, 1)],
    }
    made.createIndex()
    return made


def by_pycocotools(truths, detections, names) -> dict[str, float | None]:
    """With its own summary, one class at a time for the numbers of a class; at most 100 detections."""

    def row(image, box, c, **more):
        x0, y0, x1, y1 = map(float, box)
        sides = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0)}
        return {"image_id": image, "category_id": int(c)} | sides | more

    objects, found = [], []
    for i, (truth, detection) in enumerate(zip(truths, detections, strict=True)):
        for number, (box, c, crowd) in enumerate(zip(truth.boxes, truth.classes, truth.crowd, strict=True)):
            recorded = {} if truth.areas is None else {"area": float(truth.areas[number])}
            objects.append(row(i, box, c, iscrowd=int(crowd), **recorded))
        for box, c, score in zip(detection.boxes, detection.classes, detection.scores, strict=True):
            found.append(row(i, box, c, score=float(score)))

    def stats(classes):
        with contextlib.redirect_stdout(io.StringIO()):
            both = [dataset(len(truths), names, rows) for rows in (objects, found)]
            evaluator = COCOeval(*both, "bbox")
            evaluator.params.catIds = classes
            evaluator.evaluate()
            evaluator.accumulate()
            evaluator.summarize()
        return [None if value == -1 else float(value) for value in evaluator.stats]

    overall = stats(list(range(len(names))))
    numbers = dict(zip(OVERALL, [*overall[:6], overall[8]], strict=True))
    for c, name in enumerate(names):
        numbers |= dict(zip((f"ap/{name}", f"ap50/{name}"), stats([c])[:2], strict=True))
    return numbers


def random_boxes(rng, count: int) -> np.ndarray:
    """Of every size that COCO tells apart, in an image of 300 x 300."""
    corner = rng.uniform(0, 200, (count, 2))
    return np.concatenate([corner, corner + rng.choice([10, 30, 60, 100, 150], (count, 2)) * rng.random((count, 2))], 1)


def random_set(seed: int, images: int, names: int, objects: int, found: int, ties: bool, crowds: float):
    """Detections are near objects half of the time, else anywhere."""
    rng = np.random.default_rng(seed)
    truths, detections = [], []
    for _ in range(images):
        count = rng.integers(objects + 1) * (rng.random() < 0.8)
        boxes, classes = random_boxes(rng, count), rng.integers(max(1, names - 1), size=count)  # the last has none
        # A segment has less area than its box, which moves objects from one size to another.
        sides = boxes[:, 2:] - boxes[:, :2]
        areas = None if rng.random() < 0.3 else sides.prod(axis=1) * rng.uniform(0.2, 1, count)
        truths.append(Truth(boxes, classes, rng.random(count) < crowds, 300, 300, areas))
        count = rng.integers(found + 1) * (rng.random() < 0.8)
        near, guesses, kinds = rng.random(count) < 0.5, random_boxes(rng, count), rng.integers(names, size=count)
        if len(boxes):
            source = rng.integers(len(boxes), size=count)
            guesses[near] = (boxes[source] + rng.normal(0, 3, (count, 4)))[near]
            guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2])
            kinds[near] = classes[source][near]
        scores = rng.integers(4, size=count) / 4 if ties else rng.random(count)
        detections.append(Detections(guesses, scores, kinds))
    return truths, detections, [f"class {c}" for c in range(names)]


@st.composite
def sets(draw, ties=st.booleans(), found=st.sampled_from([0, 12, 40, 150])):
    return random_set(
        seed=draw(st.integers(0, 2**32 - 1)),
        images=draw(st.integers(1, 5)),
        names=draw(st.integers(1, 4)),
        objects=draw(st.sampled_from([0, 4, 12, 30])),
        found=draw(found),
        ties=draw(ties),
        crowds=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def assert_same(ours, others):
    assert list(ours) == list(others)
    for name, expected in others.items():
        assert (ours[name] is None) == (expected is None), name
        assert expected is None or ours[name] == pytest.approx(expected, abs=1e-9), name


@given(sets())
@settings(deadline=None, max_examples=120)
def test_it_is_pycocotools(drawn):
    assert_same(mean_ap(*drawn), by_pycocotools(*drawn))


@given(sets(found=st.just(40)), st.sampled_from([1, 3, 10]))
@settings(deadline=None, max_examples=30)
def test_only_the_best_detections_of_a_class_in_an_image_count(drawn, most):
    truths, detections, names = drawn
    kept = []
    for each in detections:
        order = np.argsort(-each.scores, kind="stable")
        best = np.concatenate([order[each.classes[order] == c][:most] for c in range(len(names))])
        kept.append(Detections(each.boxes[best], each.scores[best], each.classes[best]))
    assert_same(mean_ap(truths, detections, names, most), by_pycocotools(truths, kept, names))


def test_more_than_a_hundred_detections_can_count():
    box, far = np.array([[0.0, 0, 50, 50]]), np.array([[200.0, 200, 250, 250]])
    truth = Truth(box, np.array([0]), np.array([False]), 300, 300)
    last = Detections(np.r_[far.repeat(120, 0), box], np.linspace(1, 0.1, 121), np.zeros(121, dtype=int))
    assert mean_ap([truth], [last], ["a"])["ar"] == 0
    assert mean_ap([truth], [last], ["a"], 121)["ar"] == 1


@given(sets(found=st.just(0)))
@settings(deadline=None, max_examples=40)
def test_the_truth_itself_is_perfect(drawn):
    truths, _, names = drawn
    as_found = [Detections(each.boxes, np.ones(len(each.boxes)), each.classes) for each in truths]
    for name, value in mean_ap(truths, as_found, names).items():
        assert value is None or value == pytest.approx(1, abs=1e-12), name


@given(sets(ties=st.just(False)), st.randoms())
@settings(deadline=None, max_examples=40)
def test_the_order_of_images_does_not_matter(drawn, random):
    truths, detections, names = drawn
    order = random.sample(range(len(truths)), len(truths))
    assert_same(mean_ap([truths[i] for i in order], [detections[i] for i in order], names), mean_ap(*drawn))


NOTHING = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=int))
EMPTY = Truth(np.zeros((0, 4)), np.zeros(0, dtype=int), np.zeros(0, dtype=bool), 300, 300)
ONE = Truth(np.array([[0, 0, 20, 20.0]]), np.array([1]), np.array([False]), 300, 300)


def test_nothing_found_is_zero_and_nothing_there_is_undefined():
    numbers = mean_ap([ONE, EMPTY], [NOTHING, NOTHING], ["a", "b"])
    undefined = {"ap_medium", "ap_large", "ap/a", "ap50/a"}
    assert numbers == {name: None if name in undefined else 0.0 for name in numbers}
    assert list(numbers) == [*OVERALL, "ap/a", "ap50/a", "ap/b", "ap50/b"]
    found = Detections(ONE.boxes, np.array([0.5]), ONE.classes)
    for truths, detections in (([EMPTY], [NOTHING]), ([EMPTY], [found]), ([], [])):
        assert set(mean_ap(truths, detections, ["a", "b"]).values()) == {None}
    assert mean_ap([EMPTY], [NOTHING], []) == dict.fromkeys(OVERALL)


def test_lists_of_unequal_length_and_unknown_classes_are_refused():
    with pytest.raises(ValueError):
        mean_ap([ONE], [], ["a", "b"])
    with pytest.raises(ValueError, match="Truth: classes 1 to 1, names for 0 to 0"):
        mean_ap([ONE], [NOTHING], ["a"])
    with pytest.raises(ValueError, match="Detections: classes -1 to -1"):
        mean_ap([EMPTY], [Detections(ONE.boxes, np.array([0.5]), np.array([-1]))], ["a"])


def test_it_prints_and_logs_nothing(capfd, caplog):
    caplog.set_level(logging.INFO)
    mean_ap([ONE], [NOTHING], ["a", "b"])
    assert capfd.readouterr() == ("", "") and not caplog.records
