"""Parts are found where they were drawn, whatever the scale, and sorted into kinds."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from gdino_lab.data.parts import MAX_AREA, MIN_AREA, SEARCH_SIDE, PartKinds, find_parts
from gdino_lab.data.synthetic.screw_bag import PRESETS, draw_bag

SIZE = (120, 160)
# (x0, y0, x1, y1), all pixels inclusive: two bars and a disc.
BAR, TALL, DISC = (20, 20, 44, 35), (60, 60, 69, 99), (110, 30, 129, 49)


def drawn(shapes, background=(200, 200, 200), colour=(60, 60, 60), noise=0.0, seed=0, size=SIZE) -> np.ndarray:
    image = Image.new("RGB", size[::-1], background)
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        box, own = shape if isinstance(shape[0], tuple) else (shape, colour)
        (draw.ellipse if box == DISC else draw.rectangle)(box, fill=own)
    noisy = np.asarray(image) + np.random.default_rng(seed).normal(0, noise, (*size, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def full_mask(part, shape) -> np.ndarray:
    mask = np.zeros(shape[:2], bool)
    y0, x0, y1, x1 = part.box
    mask[y0:y1, x0:x1] = part.mask
    return mask


@pytest.mark.parametrize("shades", [(200, 60), (40, 220), (128, 90)], ids=["dark", "bright", "faint"])
@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_drawn_blobs_are_found_largest_first(shades, noise):
    background, colour = ((shade,) * 3 for shade in shades)
    parts = find_parts(drawn([BAR, TALL, DISC], background, colour, noise))
    assert len(parts) == 3
    assert [part.area for part in parts] == sorted((part.area for part in parts), reverse=True)
    boxes = {(y0, x0, y1 + 1, x1 + 1) for x0, y0, x1, y1 in (BAR, TALL, DISC)}
    for part in parts:
        nearest = min(boxes, key=lambda box: np.abs(np.subtract(box, part.box)).sum())
        assert np.abs(np.subtract(nearest, part.box)).max() <= 1
        boxes.remove(nearest)
        assert part.mask.dtype == bool and part.mask.shape == (part.box[2] - part.box[0], part.box[3] - part.box[1])
        assert part.area == part.mask.sum() > 0


@pytest.mark.parametrize("count", range(7))
def test_the_count_is_that_of_the_blobs(count):
    places = [(x, y, x + 13, y + 13) for y in (20, 70) for x in (20, 60, 100)]
    assert len(find_parts(drawn(places[:count], noise=3.0, seed=count))) == count


@pytest.mark.parametrize("spread", [0.0, 3.0, 15.0, 60.0])
def test_noise_and_nothing_hold_no_parts(spread):
    assert not [part for seed in range(20) for part in find_parts(drawn([], noise=spread, seed=seed))]


def test_specks_the_product_itself_and_what_touches_the_border_are_no_parts():
    speck, product, border = (20, 20, 23, 23), (40, 30, 120, 90), (0, 50, 15, 65)
    pixels = SIZE[0] * SIZE[1]
    assert 16 < MIN_AREA * pixels and 81 * 61 > MAX_AREA * pixels
    for box in (speck, product, border):
        assert find_parts(drawn([box])) == []
    assert len(find_parts(drawn([speck, border, DISC]))) == 1


@pytest.mark.parametrize("size", [(32, 32), (33, 200), (200, 33), (1, 1), (5, 7), (3, 1200)], ids=str)
def test_any_size_is_searched(size):
    assert find_parts(np.full((*size, 3), 90, np.uint8)) == []
    for part in find_parts(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)):
        assert part.box[2] <= size[0] and part.box[3] <= size[1]


def test_an_image_four_times_larger_holds_the_same_parts():
    small = drawn([BAR, TALL, DISC], noise=2.0)
    large = small.repeat(4, 0).repeat(4, 1)
    assert max(large.shape) > SEARCH_SIDE
    by_place = [sorted(find_parts(image), key=lambda part: part.box) for image in (small, large)]
    for one, four in zip(*by_place, strict=True):
        # Scaling down to 192 leaves a soft rim of up to two pixels, 7 of the large image's, outside or in.
        assert np.abs(np.array(four.box) - 4 * np.array(one.box)).max() <= 8
        assert four.area == pytest.approx(16 * one.area, rel=0.3)
        shrunk = full_mask(four, large.shape)[2::4, 2::4]
        own = full_mask(one, small.shape)
        assert (shrunk & own).sum() > 0.7 * (shrunk | own).sum()


def test_screw_bags_show_about_the_same_parts_at_four_times_the_size():
    counts = []
    for seed in range(12):
        bag = Image.fromarray(draw_bag(PRESETS["easy"], (96, 140), np.random.default_rng(seed)).image)
        large = bag.resize((560, 384), Image.Resampling.BICUBIC)
        counts.append((len(find_parts(np.asarray(bag))), len(find_parts(np.asarray(large)))))
    small, large = np.array(counts).T
    assert 4.5 < small.mean() < 6.5 and 4.5 < large.mean() < 6.5  # six parts, some of which touch
    assert np.abs(small - large).mean() < 1


NUTS = [(20, 20, 31, 31), (70, 20, 81, 31), (120, 70, 131, 81)]
BARS = [(20, 80, 59, 87), (80, 50, 119, 57), (110, 100, 149, 107)]


@pytest.fixture(scope="module")
def two_kinds() -> PartKinds:
    return PartKinds((drawn(NUTS[:n] + BARS[n:], noise=3.0, seed=n) for n in (0, 1, 2, 3)), 2)


def test_two_clear_kinds_are_told_apart(two_kinds):
    image = drawn([NUTS[0], NUTS[2], BARS[0], BARS[1]], noise=3.0, seed=9)
    labels = two_kinds.label_map(image)
    assert labels.shape == image.shape[:2] and labels.dtype == np.uint8
    assert two_kinds.kinds == 2 and set(np.unique(labels)) == {0, 1, 2}
    centre = {box: labels[(box[1] + box[3]) // 2, (box[0] + box[2]) // 2] for box in [*NUTS, *BARS]}
    assert centre[NUTS[0]] == centre[NUTS[2]] != centre[BARS[0]] == centre[BARS[1]]
    assert 0 not in (centre[NUTS[0]], centre[BARS[0]]) and centre[NUTS[1]] == centre[BARS[2]] == 0
    where = np.logical_or.reduce([full_mask(part, image.shape) for part in find_parts(image)])
    assert np.array_equal(labels > 0, where)


def test_colour_alone_tells_kinds_apart():
    reds, blues = [(box, (170, 40, 40)) for box in NUTS[:2]], [(NUTS[2], (40, 40, 170))]
    kinds = PartKinds([drawn(reds + blues, noise=2.0, seed=seed) for seed in range(3)], 2)
    labels = kinds.label_map(drawn(reds + blues, noise=2.0, seed=7))
    first, second, third = (labels[y0 + 5, x0 + 5] for x0, y0, _, _ in NUTS)
    assert first == second != third and 0 not in (first, third)


def test_kinds_are_the_same_every_time(two_kinds):
    again = PartKinds((drawn(NUTS[:n] + BARS[n:], noise=3.0, seed=n) for n in (0, 1, 2, 3)), 2)
    image = drawn(NUTS + BARS[:1], noise=3.0, seed=5)
    assert np.array_equal(again.label_map(image), two_kinds.label_map(image))


@pytest.mark.parametrize("images", [[], [np.full((60, 80, 3), 128, np.uint8)]], ids=["no_images", "no_blobs"])
def test_without_blobs_everything_is_background(images):
    kinds = PartKinds(images, 4)
    labels = kinds.label_map(drawn(NUTS))
    assert kinds.kinds == 0 and labels.shape == SIZE and labels.dtype == np.uint8 and not labels.any()


def test_fewer_blobs_than_kinds():
    image = drawn([NUTS[0], BARS[0]], noise=2.0)
    kinds = PartKinds([image], 6)
    assert kinds.kinds == 2
    assert set(np.unique(kinds.label_map(image))) == {0, 1, 2}


def test_an_image_without_parts_is_background_to_known_kinds(two_kinds):
    assert not two_kinds.label_map(drawn([], noise=3.0)).any()
