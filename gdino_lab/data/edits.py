"""Edits of normal images: what an anomaly looks like, taught without ever seeing one.

A part is whatever stands out from its surroundings (a blob), so no annotation is needed. Every edit that removes,
adds or changes a part leaves seams; *identity* edits leave the same seams in an image that stays normal (a part is
erased and the same part pasted elsewhere), so that seams teach nothing.

Arrays are (H, W, 3) uint8 images and (H, W) bool masks. All randomness comes from the generator handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from gdino_lab.data.parts import Part, find_parts

@dataclass(frozen=True)
class Edited:
    """image (H, W, 3) uint8; changed (H, W) bool, the pixels that are anomalous; anomalous, False for identity."""

    image: np.ndarray
    changed: np.ndarray
    anomalous: bool


def edit(image: np.ndarray, donor: np.ndarray, kind: str, rng: np.random.Generator) -> Edited:
    """One random edit of `kind`.

    Args:
        image: the normal image, (H, W, 3) uint8.
        donor: another normal image of the same category, source of foreign parts and texture.
        kind: "clean", "identity", "logical" or "structural".

    Raises:
        KeyError: unknown kind.
    """
    return {"clean": _clean, "identity": _identity, "logical": _logical, "structural": _structural}[kind](
        image, donor, rng
    )


# --- the four kinds -------------------------------------------------------------------------------------------------


def _clean(image: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> Edited:
    return Edited(image, np.zeros(image.shape[:2], bool), False)


def _identity(image: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> Edited:
    """One or two parts moved to another place: same set of parts, same seams as a logical edit."""
    parts = find_parts(image)
    if not parts:
        return _clean(image, donor, rng)
    canvas = image.copy()
    taken = _union(canvas, parts)
    for index in rng.permutation(len(parts))[: rng.integers(1, 3)]:
        part = parts[index]
        patch, mask = _turned(*_cut(image, part), rng)
        _erase(canvas, part, rng)
        taken &= ~_where(canvas, part)
        taken |= _paste(canvas, patch, mask, *_free_place(canvas, parts, taken, mask, rng))
    return Edited(canvas, np.zeros(image.shape[:2], bool), False)


def _logical(image: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> Edited:
    """A part missing, one too many, exchanged for another kind, or of another size."""
    parts = find_parts(image)
    if not parts:
        return _structural(image, donor, rng)
    edits: tuple[Callable, ...] = (_missing, _extra, _exchanged, _rescaled)
    canvas = image.copy()
    changed = edits[rng.choice(len(edits), p=(0.3, 0.3, 0.25, 0.15))](canvas, image, parts, donor, rng)
    return Edited(canvas, changed, True)


def _structural(image: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> Edited:
    """A scratch, a foreign scar, a stain, or a part of another colour."""
    edits: tuple[Callable, ...] = (_scratch, _scar, _stain, _recoloured)
    canvas = image.copy()
    changed = edits[rng.integers(len(edits))](canvas, donor, rng)
    return Edited(canvas, changed, True)


# --- logical edits: each changes `canvas` in place and returns the changed pixels ------------------------------------


def _missing(canvas, image, parts, donor, rng) -> np.ndarray:
    part = parts[rng.integers(len(parts))]
    _erase(canvas, part, rng)
    return _where(canvas, part)


def _extra(canvas, image, parts, donor, rng) -> np.ndarray:
    source, source_parts = (donor, find_parts(donor)) if rng.random() < 0.5 else (image, parts)
    source_parts = source_parts or parts
    part = source_parts[rng.integers(len(source_parts))]
    patch, mask = _turned(*_cut(source if source_parts is not parts else image, part), rng)
    return _paste(canvas, patch, mask, *_free_place(canvas, parts, _union(canvas, parts), mask, rng))


def _exchanged(canvas, image, parts, donor, rng) -> np.ndarray:
    """A part gives way to a copy of the one most unlike it in size among three drawn."""
    old = parts[rng.integers(len(parts))]
    drawn = [parts[index] for index in rng.permutation(len(parts))[:3]]
    new = max(drawn, key=lambda part: abs(np.log(part.area / old.area)))
    patch, mask = _turned(*_cut(image, new), rng)
    _erase(canvas, old, rng)
    centre_y, centre_x = (old.box[0] + old.box[2]) // 2, (old.box[1] + old.box[3]) // 2
    top = int(np.clip(centre_y - mask.shape[0] // 2, 0, max(0, canvas.shape[0] - mask.shape[0])))
    left = int(np.clip(centre_x - mask.shape[1] // 2, 0, max(0, canvas.shape[1] - mask.shape[1])))
    return _paste(canvas, patch, mask, top, left) | _where(canvas, old)


def _rescaled(canvas, image, parts, donor, rng) -> np.ndarray:
    part = parts[rng.integers(len(parts))]
    patch, mask = _cut(image, part)
    factor = rng.choice([rng.uniform(0.45, 0.7), rng.uniform(1.35, 1.6)])
    height, width = (max(2, round(side * factor)) for side in mask.shape)
    height, width = min(height, canvas.shape[0]), min(width, canvas.shape[1])
    patch = _resized(patch, height, width)
    mask = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
    _erase(canvas, part, rng)
    top = int(np.clip(part.box[0], 0, canvas.shape[0] - height))
    left = int(np.clip(part.box[1], 0, canvas.shape[1] - width))
    return _paste(canvas, patch, mask, top, left) | _where(canvas, part)


# --- structural edits: likewise --------------------------------------------------------------------------------------


def _scratch(canvas, donor, rng) -> np.ndarray:
    height, width = canvas.shape[:2]
    start = rng.uniform((0.15 * width, 0.15 * height), (0.85 * width, 0.85 * height))
    steps = rng.normal(0, 0.04 * min(height, width), (rng.integers(4, 9), 2)) + rng.normal(0, 0.06, 2) * min(
        height, width
    )
    line = Image.new("L", (width, height))
    inside = np.clip(start + np.cumsum(steps, axis=0), 0, (width - 1, height - 1))
    points = [tuple(map(float, point)) for point in inside]
    ImageDraw.Draw(line).line(points, fill=255, width=max(1, round(min(height, width) * rng.uniform(0.008, 0.025))))
    mask = np.asarray(line) > 0
    _blend(canvas, mask, rng.integers(0, 256, 3), rng.uniform(0.5, 0.95))
    return mask


def _scar(canvas, donor, rng) -> np.ndarray:
    """A thin strip of another image, turned (CutPaste, Li et al. 2021, the scar variant)."""
    height, width = canvas.shape[:2]
    long, thin = round(min(height, width) * rng.uniform(0.1, 0.3)), max(2, round(min(height, width) * 0.04))
    thin, long = min(thin, donor.shape[0]), min(long, donor.shape[1])
    top, left = rng.integers(0, donor.shape[0] - thin + 1), rng.integers(0, donor.shape[1] - long + 1)
    strip = np.clip(donor[top : top + thin, left : left + long] * rng.uniform(0.4, 1.6, 3), 0, 255).astype(np.uint8)
    patch, mask = _turned(strip, np.ones(strip.shape[:2], bool), rng)
    return _paste(canvas, patch, mask, *_place(canvas, mask, rng))


def _stain(canvas, donor, rng) -> np.ndarray:
    """Smooth noise cut at a high level and blended with a colour (after DRAEM's Perlin masks, Zavrtanik et al. 2021)."""
    height, width = canvas.shape[:2]
    side = rng.integers(4, 8)
    noise = ndimage.zoom(rng.normal(size=(side, side)), (height / side, width / side), order=3)[:height, :width]
    noise[: height // 8], noise[-height // 8 :], noise[:, : width // 8], noise[:, -width // 8 :] = (-9.0,) * 4
    labels, _ = ndimage.label(noise > np.quantile(noise, 0.985))
    mask = labels == labels[np.unravel_index(np.argmax(noise), noise.shape)]
    _blend(canvas, mask, rng.integers(0, 256, 3), rng.uniform(0.4, 0.9))
    return mask


def _recoloured(canvas, donor, rng) -> np.ndarray:
    parts = find_parts(canvas)
    if not parts:
        return _stain(canvas, donor, rng)
    mask = _where(canvas, parts[rng.integers(len(parts))])
    tint = rng.uniform(0.4, 1.6, 3)
    canvas[mask] = np.clip(canvas[mask] * tint, 0, 255).astype(np.uint8)
    return mask


# --- cutting, erasing, pasting --------------------------------------------------------------------------------------


def _where(canvas: np.ndarray, part: Part) -> np.ndarray:
    y0, x0, y1, x1 = part.box
    mask = np.zeros(canvas.shape[:2], bool)
    mask[y0:y1, x0:x1] = part.mask
    return mask


def _cut(image: np.ndarray, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """The part with a rim of one pixel or 1 % of the image: a blob's threshold cuts its soft border off."""
    y0, x0, y1, x1 = _with_rim(image, part)
    return image[y0:y1, x0:x1].copy(), _grown(image, part)[y0:y1, x0:x1]


def _with_rim(image: np.ndarray, part: Part) -> tuple[int, int, int, int]:
    rim = _rim(image)
    y0, x0, y1, x1 = part.box
    return max(0, y0 - rim), max(0, x0 - rim), min(image.shape[0], y1 + rim), min(image.shape[1], x1 + rim)


def _rim(image: np.ndarray) -> int:
    return max(1, round(0.012 * min(image.shape[:2])))


def _grown(image: np.ndarray, part: Part) -> np.ndarray:
    """(H, W) bool: the part's mask, holes filled, grown by the rim; computed in the box only."""
    y0, x0, y1, x1 = _with_rim(image, part)
    local = _where(image, part)[y0:y1, x0:x1]
    grown = np.zeros(image.shape[:2], bool)
    grown[y0:y1, x0:x1] = ndimage.binary_dilation(local, iterations=_rim(image))
    return grown


def _erase(canvas: np.ndarray, part: Part, rng: np.random.Generator) -> None:
    """Fill the part with its surroundings: the border's colours, blurred inwards, with the border's own grain."""
    y0, x0, y1, x1 = part.box
    margin = 3 * _rim(canvas) + 2
    rows = slice(max(0, y0 - margin), min(canvas.shape[0], y1 + margin))
    cols = slice(max(0, x0 - margin), min(canvas.shape[1], x1 + margin))
    hole = ndimage.binary_fill_holes(_grown(canvas, part)[rows, cols])
    window = canvas[rows, cols].astype(np.float32)
    known = ~hole
    if not known.any():
        return
    # Every hole pixel takes its nearest known one, then the hole is blurred so that no streaks remain.
    nearest = ndimage.distance_transform_edt(hole, return_distances=False, return_indices=True)
    filled = window[tuple(nearest)]
    for _ in range(2):
        blurred = ndimage.uniform_filter(filled, (margin, margin, 1), mode="nearest")
        filled[hole] = blurred[hole]
    near = known & ndimage.binary_dilation(hole, iterations=2)
    texture = window - ndimage.uniform_filter(window, (3, 3, 1))
    grain = texture[near].std() if near.any() else 0.0
    noise = rng.normal(0, min(float(grain), 8.0), window.shape)
    window[hole] = np.clip(filled + noise, 0, 255)[hole]
    canvas[rows, cols] = window.astype(np.uint8)


def _turned(patch: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Patch and mask turned by a random angle, the canvas grown to hold them."""
    angle = float(rng.uniform(0, 360))
    turned = Image.fromarray(patch).rotate(angle, Image.Resampling.BILINEAR, expand=True)
    turned_mask = Image.fromarray(mask).rotate(angle, Image.Resampling.NEAREST, expand=True)
    return np.asarray(turned), np.asarray(turned_mask)


def _union(canvas: np.ndarray, parts: list[Part]) -> np.ndarray:
    """(H, W) bool: where parts lie."""
    taken = np.zeros(canvas.shape[:2], bool)
    for part in parts:
        y0, x0, y1, x1 = part.box
        taken[y0:y1, x0:x1] |= part.mask
    return taken


def _free_place(
    canvas: np.ndarray, parts: list[Part], taken: np.ndarray, mask: np.ndarray, rng: np.random.Generator, tries: int = 40
) -> tuple[int, int]:
    """(top, left) inside the box around all parts, where the mask comes closest to touching nothing that is taken."""
    gap = 2 * _rim(canvas)
    wide = ndimage.binary_dilation(np.pad(mask, gap), iterations=gap)
    room = np.pad(taken, gap)  # so that the widened mask fits at every (top, left)
    boxes = np.array([part.box for part in parts])
    y0, x0, y1, x1 = boxes[:, 0].min(), boxes[:, 1].min(), boxes[:, 2].max(), boxes[:, 3].max()
    best, fewest = (int(y0), int(x0)), np.inf
    for _ in range(tries):
        top = int(rng.integers(y0, max(y0 + 1, y1 - mask.shape[0] + 1)))
        left = int(rng.integers(x0, max(x0 + 1, x1 - mask.shape[1] + 1)))
        window = room[top : top + wide.shape[0], left : left + wide.shape[1]]
        covered = int((window & wide[: window.shape[0], : window.shape[1]]).sum())
        if covered < fewest:
            best, fewest = (top, left), covered
        if fewest == 0:
            break
    return best


def _place(canvas: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    return tuple(int(rng.integers(0, max(1, canvas.shape[axis] - mask.shape[axis]))) for axis in (0, 1))


def _paste(canvas: np.ndarray, patch: np.ndarray, mask: np.ndarray, top: int, left: int) -> np.ndarray:
    """Paste with a softened edge, cut at the border; returns the (H, W) bool pixels pasted."""
    height, width = min(mask.shape[0], canvas.shape[0] - top), min(mask.shape[1], canvas.shape[1] - left)
    window = canvas[top : top + height, left : left + width].astype(np.float32)
    inside = mask[:height, :width]
    alpha = ndimage.uniform_filter(inside.astype(np.float32), 3)[..., None] * inside[..., None]
    window += alpha * (patch[:height, :width].astype(np.float32) - window)
    canvas[top : top + height, left : left + width] = np.clip(window, 0, 255).astype(np.uint8)
    pasted = np.zeros(canvas.shape[:2], bool)
    pasted[top : top + height, left : left + width] = inside
    return pasted


def _blend(canvas: np.ndarray, mask: np.ndarray, colour: np.ndarray, strength: float) -> None:
    canvas[mask] = ((1 - strength) * canvas[mask] + strength * colour).astype(np.uint8)


def _resized(array: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(array).resize((width, height), Image.Resampling.BILINEAR))
