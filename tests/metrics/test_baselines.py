"""Trivial scorers: one score an image, and each reacts to what it is named after."""

import numpy as np
import pytest
from PIL import Image

from gdino_lab.data.synthetic.screw_bag import PRESETS, draw_bag
from gdino_lab.metrics.baselines import BASELINES


@pytest.fixture(scope="module")
def bags() -> list[np.ndarray]:
    return [draw_bag(PRESETS["easy"], (96, 140), np.random.default_rng(seed)).image for seed in range(24)]


def scene(blobs: int, background: int = 180, blob: int = 60) -> np.ndarray:
    image = np.full((60, 80, 3), background, np.uint8)
    for index in range(blobs):
        image[10 + 25 * (index // 3) :, 8 + 24 * (index % 3) :][:10, :10] = blob
    return image


def usual() -> list[np.ndarray]:
    return [scene(blobs) for blobs in (1, 2, 2, 3)]


def test_there_are_four():
    assert set(BASELINES) == {"random", "mean pixel", "foreground area", "blob count"}


@pytest.mark.parametrize("name", BASELINES)
def test_one_finite_score_an_image_that_hangs_on_the_image_alone(name, bags):
    normal, images = bags[:10], bags[10:]
    scores = BASELINES[name](normal, images)
    assert scores.shape == (len(images),) and np.isfinite(scores).all() and (scores >= 0).all()
    assert np.array_equal(BASELINES[name](normal, images[::-1]), scores[::-1])
    assert np.array_equal(BASELINES[name](normal[::-1], images[:1]), scores[:1]) or name != "random"
    assert BASELINES[name](normal, []).shape == (0,)


@pytest.mark.parametrize("name", BASELINES)
def test_images_may_differ_in_size_and_the_pixels_stay(name, bags):
    images = [bags[0], np.asarray(Image.fromarray(bags[1]).resize((280, 192))), bags[2][:, ::-1]]
    before = [image.copy() for image in images]
    assert BASELINES[name](bags[3:8], images).shape == (3,)
    assert all(np.array_equal(image, old) for image, old in zip(images, before, strict=True))


def test_random_is_fixed_by_the_pixels_and_spread_over_the_unit_interval(bags):
    score = BASELINES["random"]
    scores = score([], bags)
    assert np.array_equal(scores, score(bags[:3], [image.copy() for image in bags]))
    assert len(set(scores)) == len(bags) and scores.min() < 0.35 and scores.max() > 0.65 and scores.max() < 1
    changed = bags[0].copy()
    changed[0, 0, 0] ^= 1
    assert score([], [changed])[0] != scores[0]
    assert score([], [bags[1][:, ::-1]])[0] == score([], [bags[1][:, ::-1].copy()])[0]  # the view and its copy


@pytest.mark.parametrize("name", ["blob count", "foreground area"])
def test_an_added_and_a_missing_blob_deviate(name):
    two, four, none = BASELINES[name](usual(), [scene(2), scene(4), scene(0)])
    assert two == pytest.approx(0, abs=1e-6)
    assert four == pytest.approx(none, rel=1e-6) and four > 2  # 2 blobs off, the usual deviation is 0.71


def test_blob_count_is_blind_to_size_and_area_to_number():
    large = scene(2)
    large[40:56, 40:70] = 60  # as large as nearly five blobs, and one
    count, area = (BASELINES[name](usual(), [large])[0] for name in ("blob count", "foreground area"))
    assert count == pytest.approx(1 / np.std([1, 2, 2, 3])) and area > 3 * count


def test_specks_are_no_blobs():
    specked = scene(2)
    specked[45, 5:75:9] = 60
    assert BASELINES["blob count"](usual(), [specked])[0] == pytest.approx(0, abs=1e-6)


def test_bright_blobs_count_as_dark_ones_do():
    normal = [scene(blobs, 60, 180) for blobs in (1, 2, 2, 3)]
    for name in ("blob count", "foreground area"):
        dark, bright = BASELINES[name](usual(), [scene(4)]), BASELINES[name](normal, [scene(4, 60, 180)])
        assert np.allclose(dark, bright)


def test_mean_pixel_reacts_to_brightness_both_ways(bags):
    usual_bag = bags[0]
    shifted = [np.clip(usual_bag.astype(int) + step, 0, 255).astype(np.uint8) for step in (-60, -30, 0, 30, 60)]
    darker, dark, same, light, lighter = BASELINES["mean pixel"](bags[1:], shifted)
    assert darker > dark > same and lighter > light > same
    means = np.array([image.mean() for image in bags[1:]])
    assert same == pytest.approx(abs(usual_bag.mean() - means.mean()) / means.std())


def test_without_spread_in_the_normal_images_scores_stay_finite():
    for name, score in BASELINES.items():
        same, other = score([scene(2)] * 3, [scene(2), scene(5)])
        assert np.isfinite(other) and (name == "random" or (same == 0 and other > 1))
