"""Image files -> RGB arrays -> model tensors. Every odd file is either read right or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from gdino_lab.errors import ConfigurationError

# Channel statistics of the published Grounding DINO checkpoints (ImageNet).
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# EXIF orientations that lay the image on its side.
SIDEWAYS = (5, 6, 7, 8)
SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def read_rgb(path: Path) -> Image.Image:
    """The image as 8-bit RGB, upright.

    Grayscale and palette images become RGB, 16-bit ones keep their high byte, EXIF orientation is applied.

    Raises:
        ConfigurationError: the file is missing, truncated or no image; the message holds its name.
    """
    try:
        with Image.open(path) as image:
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode in SIXTEEN_BIT:
                image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
            if image.mode == "P" and "transparency" in image.info:
                image = image.convert("RGBA")
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(f"{path}: not a readable image ({error})") from None


def read_size(path: Path) -> tuple[int, int]:
    """(height, width) of the image after EXIF orientation; only its header is read.

    Raises:
        ConfigurationError: missing or no image; the message holds its name.
    """
    try:
        with Image.open(path) as image:
            # Of a PNG, image.getexif() would decode every pixel.
            orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
            # Pillow turns a TIFF by itself.
            sideways = orientation in SIDEWAYS and image.format != "TIFF"
            return image.size if sideways else image.size[::-1]
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: missing") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(f"{path}: not a readable image ({error})") from None


def read_mask(path: Path) -> np.ndarray:
    """A defect mask as stored: (H, W) uint8, upright, single channel.

    Raises:
        ConfigurationError: unreadable, or not a single-channel 8-bit image.
    """
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode not in ("L", "P", "1"):
                raise ConfigurationError(f"{path}: a mask has one 8-bit channel, this one is of mode {image.mode}")
            image = ImageOps.exif_transpose(image)
            # The palette index is the value, so no conversion for mode P.
            return np.asarray(image).astype(np.uint8) * (255 if image.mode == "1" else 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(f"{path}: not a readable mask ({error})") from None


def sides_of(image_size: int | Sequence[int]) -> tuple[int, int]:
    """(shortest, longest) side in pixels, from one number for both or the two.

    Raises:
        ConfigurationError: neither, or a side below 32.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or not 32 <= sides[0] <= sides[1]:
        raise ConfigurationError(
            f"data.image_size={image_size}: allowed is one side of 32 pixels or more, or [shortest, longest]"
        )
    return sides


def fitted_size(height: int, width: int, shortest: int, longest: int) -> tuple[int, int]:
    """(height, width) after scaling so that the short side is `shortest` unless the long one would pass `longest`."""
    scale = min(shortest / min(height, width), longest / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def worst_size(sizes: Iterable[tuple[int, int]], shortest: int, longest: int, batch: int) -> tuple[int, int]:
    """(height, width) of the largest input that a batch of images of `sizes` (height, width) can need: of one image the
    one with most pixels, of several the tallest and the widest padded together."""
    fitted = {fitted_size(height, width, shortest, longest) for height, width in set(sizes)}
    if batch == 1:
        return max(fitted, key=lambda size: size[0] * size[1])
    return max(height for height, _ in fitted), max(width for _, width in fitted)


def resize(image: Image.Image, shortest: int, longest: int) -> np.ndarray:
    """(H, W, 3) uint8 at the training resolution, aspect ratio kept."""
    height, width = fitted_size(image.height, image.width, shortest, longest)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0))


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """(H, W, 3) uint8 -> (3, H, W) float32, normalised with MEAN and STD."""
    scaled = (array.astype(np.float32) / 255.0 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def pad_batch(images: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of different sizes (C, h, w) as one zero-padded batch.

    Returns:
        pixel_values (B, C, H, W) and pixel_mask (B, H, W) int64, 1 where a pixel is real.
    """
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    values = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.int64)
    for index, image in enumerate(images):
        values[index, :, : image.shape[1], : image.shape[2]] = image
        mask[index, : image.shape[1], : image.shape[2]] = 1
    return values, mask
