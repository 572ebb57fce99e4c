"""Where a rectangle is after a transform, its pixels say so too; the generator alone decides."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gdino_lab.data.images import fitted_size
from gdino_lab.data.transforms import LEAST_SIDE, Augment, crop, flip, jitter_colour, mentions_a_side, resize
from gdino_lab.errors import ConfigurationError

COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255)], np.uint8)
STILL = Augment(scales=(1, 1), flip=0, crop=0, min_visible=0.5, colour=0)
WILD = Augment(scales=(0.6, 1.5), flip=0.5, crop=0.5, min_visible=0.3, colour=0)


@st.composite
def scenes(draw) -> tuple[Image.Image, np.ndarray]:
    """Up to three rectangles of pure colours, one in each third of a black image, and their boxes."""
    third, height = draw(st.integers(20, 50)), draw(st.integers(40, 120))
    count = draw(st.integers(0, 3))
    pixels = np.zeros((height, 3 * third, 3), np.uint8)
    boxes = np.zeros((count, 4), np.float32)
    for index in range(count):
        x0 = index * third + draw(st.integers(0, third - 12))
        y0 = draw(st.integers(0, height - 12))
        x1 = draw(st.integers(x0 + 12, (index + 1) * third))
        y1 = draw(st.integers(y0 + 12, height))
        pixels[y0:y1, x0:x1] = COLOURS[index]
        boxes[index] = x0, y0, x1, y1
    return Image.fromarray(pixels), boxes


def assert_boxes_are_where_the_colours_are(image, boxes, kept=None, nearest: float = 0) -> None:
    pixels = np.asarray(image).astype(int)
    for index, box in enumerate(boxes):
        if kept is not None and not kept[index]:
            continue
        coloured = pixels[..., index] > 127  # half of an interpolated edge
        assert coloured.any()
        rows, columns = np.flatnonzero(coloured.any(axis=1)), np.flatnonzero(coloured.any(axis=0))
        extent = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        assert np.abs(np.subtract(extent, box)).max() <= nearest, (extent, box)


@given(scenes())
def test_flip(scene):
    image, boxes = scene
    before = boxes.copy()
    mirrored, moved = flip(image, boxes)
    assert_boxes_are_where_the_colours_are(mirrored, moved)
    assert np.array_equal(boxes, before) and moved.dtype == np.float32
    again, back = flip(mirrored, moved)
    assert np.array_equal(np.asarray(again), np.asarray(image)) and np.array_equal(back, boxes)


@given(scenes(), st.integers(40, 200), st.integers(0, 200))
def test_resize(scene, shortest, more):
    image, boxes = scene
    resized, moved = resize(image, boxes, shortest, shortest + more)
    height, width = fitted_size(image.height, image.width, shortest, shortest + more)
    assert resized.size == (width, height) and moved.dtype == np.float32
    assert_boxes_are_where_the_colours_are(resized, moved, nearest=1)
    assert np.allclose(moved, boxes * np.tile([width / image.width, height / image.height], 2), atol=1e-3)


@given(scenes(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_crop(scene, seed, min_visible):
    image, boxes = scene
    part, moved, kept = crop(image, boxes, min_visible, np.random.default_rng(seed))
    assert moved.dtype == np.float32 and kept.dtype == bool and moved.shape == boxes.shape
    assert all(LEAST_SIDE * whole <= side <= whole for side, whole in zip(part.size, image.size, strict=True))
    assert_boxes_are_where_the_colours_are(part, moved, kept)
    pixels = np.asarray(part)
    for index, (x0, y0, x1, y1) in enumerate(boxes):
        visible = np.count_nonzero(pixels[..., index])
        assert kept[index] == (visible > 0 and visible >= min_visible * (x1 - x0) * (y1 - y0))


@given(st.integers(0, 2**32 - 1))
def test_a_box_that_is_wholly_inside_the_crop_keeps_all_of_itself(seed):
    rng = np.random.default_rng(seed)
    corners = rng.uniform(40, 60, (20, 2, 2)).astype(np.float32)
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    part, moved, kept = crop(Image.new("RGB", (100, 100)), boxes, 1.0, rng)
    inside = ((moved > 0) & (moved < np.tile(part.size, 2))).all(axis=1)
    assert kept[inside].all()


@given(scenes(), st.integers(0, 2**32 - 1), st.integers(40, 120))
def test_all_together(scene, seed, shortest):
    image, boxes = scene
    pixels, moved, kept = WILD(image, boxes, True, shortest, 2 * shortest, np.random.default_rng(seed))
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and max(pixels.shape) <= 2 * shortest
    assert moved.shape == boxes.shape and kept.shape == (len(boxes),)
    # A sliver may interpolate away.
    wide = kept & ((moved[:, 2:] - moved[:, :2]) >= 3).all(axis=1)
    assert_boxes_are_where_the_colours_are(pixels, moved, wide, nearest=1.01)
    again = WILD(image, boxes, True, shortest, 2 * shortest, np.random.default_rng(seed))
    assert all(np.array_equal(one, other) for one, other in zip((pixels, moved, kept), again, strict=True))


@given(scenes(), st.integers(0, 2**32 - 1))
def test_no_mirror_image_where_it_may_not_be(scene, seed):
    image, boxes = scene
    always = replace(STILL, flip=1)
    pixels, moved, _ = always(image, boxes, False, image.height, 400, np.random.default_rng(seed))
    plain, _ = resize(image, boxes, image.height, 400)
    assert np.array_equal(pixels, np.asarray(plain))
    mirrored, moved, _ = always(image, boxes, True, image.height, 400, np.random.default_rng(seed))
    assert np.array_equal(mirrored, pixels[:, ::-1])


def test_without_any_strength_nothing_but_the_size_changes():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    boxes = np.array([[1, 2, 30, 40]], np.float32)
    pixels, moved, kept = STILL(image, boxes, True, 40, 60, np.random.default_rng(1))
    assert np.array_equal(pixels, np.asarray(image)) and np.array_equal(moved, boxes) and kept.all()
    pixels, moved, _ = STILL(image, boxes, True, 80, 120, np.random.default_rng(1))
    assert pixels.shape == (80, 120, 3) and np.array_equal(moved, 2 * boxes)


def test_probabilities_and_scales_are_what_they_say():
    image, boxes = Image.new("RGB", (60, 40)), np.array([[0, 0, 10, 10]], np.float32)
    views = [
        replace(WILD, crop=0)(image, boxes, True, 40, 90, np.random.default_rng(seed)) for seed in range(400)
    ]
    sides = np.array([min(pixels.shape[:2]) for pixels, _, _ in views])
    assert sides.min() == 24 and sides.max() == 60
    assert 0.4 < np.mean([moved[0, 0] > 0 for _, moved, _ in views]) < 0.6


@given(st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_colour_changes_the_light_by_no_more_than_asked(strength, seed):
    image = Image.new("RGB", (4, 4), (120, 120, 120))  # gray: contrast and saturation leave it alone
    changed = np.asarray(jitter_colour(image, strength, np.random.default_rng(seed)))
    assert np.abs(changed.astype(int) - 120).max() <= 120 * strength + 1


def test_colour_changes_brightness_contrast_and_saturation():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(60, 200, (20, 20, 3), dtype=np.uint8))
    views = np.array([np.asarray(jitter_colour(image, 0.5, rng), float) for _ in range(50)])
    assert views.mean(axis=(1, 2, 3)).std() > 10
    assert views.mean(axis=3).std(axis=(1, 2)).std() > 3
    assert np.ptp(views, axis=3).mean(axis=(1, 2)).std() > 3
    assert np.array_equal(np.asarray(jitter_colour(image, 0, rng)), np.asarray(image))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"scales": (0, 1)}, "scales"),
        ({"scales": (1.2, 0.8)}, "scales"),
        ({"scales": (1,)}, "scales"),
        ({"scales": 1.0}, "scales"),
        ({"scales": "ab"}, "scales"),
        ({"scales": ("a", "b")}, "scales"),
        ({"scales": (1, float("inf"))}, "scales"),
        ({"scales": (float("nan"), 1)}, "scales"),
        ({"flip": 1.1}, "flip"),
        ({"flip": True}, "flip"),
        ({"crop": -0.1}, "crop"),
        ({"min_visible": float("nan")}, "min_visible"),
        ({"colour": "a"}, "colour"),
        ({"colour": None}, "colour"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_key(changes, key):
    with pytest.raises(ConfigurationError) as caught:
        replace(WILD, **changes)
    (complaint,) = caught.value.complaints
    assert complaint.startswith(f"task.augment.{key}=")


def test_all_values_out_of_range_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Augment(scales=[2], flip=2, crop=2, min_visible=2, colour=2)
    assert [complaint.split("=")[0].split(".")[-1] for complaint in caught.value.complaints] == [
        "scales", "flip", "crop", "min_visible", "colour"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["left", "the man on the Right.", "LEFT-most", "turn_left", "right2", "a (left) b"])
def test_texts_that_mention_a_side(text):
    assert mentions_a_side(text)


@pytest.mark.parametrize("text", ["", "bright", "leftover cake", "a copyright", "nut", "rightéd", "cleft"])
def test_texts_that_do_not(text):
    assert not mentions_a_side(text)
