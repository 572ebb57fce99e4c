"""Image files of every odd kind are read right or refused by name; sizes, tensors and batches are what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gdino_lab.data.images import MEAN, STD, fitted_size, pad_batch, read_mask, read_rgb, resize, to_tensor
from gdino_lab.errors import ConfigurationError

GRAY = (np.arange(24, dtype=np.uint8) * 10).reshape(4, 6)
RGB = np.dstack([GRAY, 255 - GRAY, GRAY // 2])
ROTATED = 0x0112  # EXIF tag of the orientation


def saved(path, image: Image.Image, **options):
    image.save(path, **options)
    return path


def pixels(path) -> np.ndarray:
    image = read_rgb(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ROTATED] = orientation
    return tags


@pytest.mark.parametrize("name", ["gray.png", "gray.bmp", "gray.tif"])
def test_grayscale_becomes_three_equal_channels(tmp_path, name):
    assert np.array_equal(pixels(saved(tmp_path / name, Image.fromarray(GRAY))), np.dstack([GRAY] * 3))


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_keep_their_high_byte(tmp_path, name):
    deep = GRAY.astype(np.uint16) * 256 + 201
    path = saved(tmp_path / name, Image.fromarray(deep))
    with Image.open(path) as image:
        assert image.mode == "I;16"
    assert np.array_equal(pixels(path), np.dstack([GRAY] * 3))


@pytest.mark.parametrize("transparency", [None, 2, bytes([255, 0, 128])], ids=["none", "one_index", "table"])
def test_palette_becomes_its_colours(tmp_path, transparency):
    image = Image.frombytes("P", GRAY.shape[::-1], (GRAY // 80).tobytes())
    colours = np.array([[250, 10, 20], [30, 240, 50], [70, 80, 230], [0, 0, 0]], np.uint8)
    image.putpalette(colours.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(tmp_path / "palette.png", image, **options)
    with Image.open(path) as stored:
        assert stored.mode == "P" and ("transparency" in stored.info) == (transparency is not None)
    assert np.array_equal(pixels(path), colours[GRAY // 80])


def test_alpha_is_dropped_and_never_blended(tmp_path):
    assert np.array_equal(pixels(saved(tmp_path / "rgba.png", Image.fromarray(np.dstack([RGB, GRAY])))), RGB)
    gray_alpha = Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(255 - GRAY)])
    assert np.array_equal(pixels(saved(tmp_path / "la.png", gray_alpha)), np.dstack([GRAY] * 3))


def test_cmyk_becomes_rgb(tmp_path):
    path = saved(tmp_path / "press.tif", Image.fromarray(RGB).convert("CMYK"))
    with Image.open(path) as image:
        assert image.mode == "CMYK"
    assert np.abs(pixels(path).astype(int) - RGB).max() <= 1


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.tif"])
def test_exif_orientation_6_is_turned_upright(tmp_path, name):
    array = np.zeros((40, 64, 3), np.uint8)
    array[:16, :16, 0] = 255  # the red corner is at the top left as stored, at the top right when upright
    upright = pixels(saved(tmp_path / name, Image.fromarray(array), exif=exif(6)))
    assert upright.shape == (64, 40, 3)
    assert np.abs(upright.astype(int) - np.rot90(array, -1)).mean() < 4  # JPEG rings at the corner's edge
    assert upright[2, -3, 0] > 200 and upright[2, 2, 0] < 60


def test_paths_with_spaces_and_other_letters(tmp_path):
    folder = tmp_path / "Schraubenbeutel – größe 1" / "ねじ"
    folder.mkdir(parents=True)
    assert np.array_equal(pixels(saved(folder / "bild ä ö é.png", Image.fromarray(RGB))), RGB)


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "cut.bmp", "cut.tif"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
def test_truncated_files_are_refused_by_name(tmp_path, name, kept):
    noise = np.random.default_rng(0).integers(0, 256, (60, 60), dtype=np.uint8)
    path = saved(tmp_path / name, Image.fromarray(noise))
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    for read in (read_rgb, read_mask):
        with pytest.raises(ConfigurationError, match=name):
            read(path)


def test_what_is_no_image_is_refused_by_name(tmp_path):
    text = tmp_path / "notes.png"
    text.write_text("not an image at all")
    for path in (text, tmp_path / "missing.png", tmp_path):
        for read in (read_rgb, read_mask):
            with pytest.raises(ConfigurationError, match=path.name):
                read(path)


@pytest.mark.parametrize("read", [read_rgb, read_mask])
def test_an_image_past_pillows_limit_is_refused_by_name(tmp_path, monkeypatch, read):
    path = saved(tmp_path / "huge.png", Image.new("L", (60, 60)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ConfigurationError, match=r"huge\.png"):
        read(path)


def test_masks_are_returned_as_stored(tmp_path):
    values = np.array([[0, 236, 255], [1, 0, 128]], np.uint8)
    palette = Image.frombytes("P", (3, 2), values.tobytes())
    palette.putpalette(bytes(range(255, -1, -1)) * 3)  # colours are not the values
    for name, image in (("l.png", Image.fromarray(values)), ("p.png", palette)):
        mask = read_mask(saved(tmp_path / name, image))
        assert mask.dtype == np.uint8 and np.array_equal(mask, values)
    mask = read_mask(saved(tmp_path / "1.png", Image.fromarray(values > 100)))
    assert mask.dtype == np.uint8 and np.array_equal(mask, np.where(values > 100, 255, 0))
    turned = read_mask(saved(tmp_path / "turned.png", Image.fromarray(values), exif=exif(6)))
    assert np.array_equal(turned, np.rot90(values, -1))


@pytest.mark.parametrize(
    ("mode", "array"),
    [("RGB", RGB), ("RGBA", np.dstack([RGB, GRAY])), ("I;16", GRAY.astype(np.uint16) * 256)],
    ids=["RGB", "RGBA", "I;16"],
)
def test_masks_with_more_than_one_8_bit_channel_are_refused_by_name(tmp_path, mode, array):
    with pytest.raises(ConfigurationError, match=rf"wrong\.png.*mode {mode}$"):
        read_mask(saved(tmp_path / "wrong.png", Image.fromarray(array)))


sides = st.integers(1, 4000)


@given(sides, sides, st.integers(32, 1500), st.integers(0, 1500))
def test_fitted_size_meets_the_shortest_side_and_never_passes_the_longest(height, width, shortest, more):
    longest = shortest + more
    fitted = fitted_size(height, width, shortest, longest)
    assert all(isinstance(side, int) and 1 <= side <= longest for side in fitted)
    assert min(fitted) == shortest or max(fitted) == longest
    assert min(fitted) <= shortest
    scale = max(fitted) / max(height, width)
    for new, old in zip(fitted, (height, width), strict=True):
        # Half a pixel of rounding on this side, and that of the long side scaled down.
        assert abs(new - old * scale) <= 1.0 or new == 1
    assert fitted_size(width, height, shortest, longest) == fitted[::-1]


def test_resize_keeps_the_picture():
    ramp = np.linspace(0, 255, 300).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp[None, :, None], (200, 300, 3)).copy())
    for shortest, longest, size in ((100, 160, (100, 150)), (400, 700, (400, 600)), (400, 450, (300, 450))):
        array = resize(image, shortest, longest)
        assert array.shape == (*size, 3) and array.dtype == np.uint8
        assert np.abs(array[7, :, 1].astype(float) - np.linspace(0, 255, size[1])).max() < 3


def test_to_tensor_normalises_channels_and_puts_them_first():
    tensor = to_tensor(RGB)
    assert tensor.shape == (3, 4, 6) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    for y, x, c in np.ndindex(RGB.shape):
        assert tensor[c, y, x].item() == pytest.approx((int(RGB[y, x, c]) / 255 - MEAN[c]) / STD[c], abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4), st.integers(1, 3))
def test_pad_batch_puts_each_image_at_the_top_left_and_marks_it(sizes, channels):
    images = [torch.rand(channels, *size) + 1 for size in sizes]
    values, mask = pad_batch(images)
    height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
    assert values.shape == (len(sizes), channels, height, width) and values.dtype == torch.float32
    assert mask.shape == (len(sizes), height, width) and mask.dtype == torch.int64
    for image, padded, real, (h, w) in zip(images, values, mask, sizes, strict=True):
        assert torch.equal(padded[:, :h, :w], image)
        assert real.sum() == h * w and real[:h, :w].all()
        assert (padded[:, real == 0] == 0).all()


def test_pad_batch_keeps_the_kind_of_number():
    values, _ = pad_batch([torch.ones(1, 2, 3, dtype=torch.uint8), torch.full((1, 3, 2), 7, dtype=torch.uint8)])
    assert values.dtype == torch.uint8 and values.sum() == 6 + 42
