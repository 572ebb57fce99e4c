"""A drawn screw bag in MVTec LOCO AD's layout: no download, no licence, and known ground truth.

The rule is screw_bag's: two nuts, two washers, one long and one short screw. A logical anomaly breaks the rule with
parts that are each fine; a structural anomaly keeps the rule and damages something.

Lengths are in bag units: one unit is the largest square that lets the bag fit the canvas, about the canvas height.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

CLASS_NAMES = ("long screw", "short screw", "nut", "washer")

Box = tuple[float, float, float, float]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class BagPreset:
    """How much varies from one good bag to the next; every jitter is the half-width of a uniform range."""

    gain: float  # brightness of the whole image, as a fraction
    gradient: float  # light falling off from one side to the other, as a fraction
    bag_shift: float  # bag units, both axes
    bag_turn: float  # degrees
    bag_growth: float  # most that the plastic exceeds its usual size, each side, as a fraction
    part_scale: float  # size of each part, as a fraction
    part_brightness: float  # of each part, as a fraction
    highlights: int  # most reflections on the plastic
    highlight_strength: float  # the brightest of them, 1 = pure white
    noise: float  # standard deviation, grey levels of 255
    gap: float  # clear distance between parts in bag units; negative: they may overlap by that much


PRESETS: dict[str, BagPreset] = {
    "easy": BagPreset(
        gain=0.04, gradient=0.05, bag_shift=0.015, bag_turn=3.0, bag_growth=0.08, part_scale=0.0, part_brightness=0.04,
        highlights=3, highlight_strength=0.45, noise=4.0, gap=0.025,
    ),
    "hard": BagPreset(
        gain=0.10, gradient=0.08, bag_shift=0.03, bag_turn=5.0, bag_growth=0.08, part_scale=0.05, part_brightness=0.07,
        highlights=3, highlight_strength=0.5, noise=5.0, gap=-0.015,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BagCounts:
    """Images a split. Raises ValueError for a count below 1."""

    train: int
    validation: int
    test_good: int
    test_logical: int
    test_structural: int

    def __post_init__(self) -> None:
        if low := {name: count for name, count in vars(self).items() if count < 1}:
            raise ValueError(f"every split needs at least one image, got {low}")


@dataclass(frozen=True)
class Bag:
    """One drawn bag.

    image: (H, W, 3) uint8.
    masks: (defect name, (H, W) bool) pairs, empty for a good bag.
    parts: (one of CLASS_NAMES, (x0, y0, x1, y1) in pixels) pairs; a box covers the whole part, hidden pixels included.
    """

    image: np.ndarray
    masks: list[tuple[str, np.ndarray]]
    parts: list[tuple[str, Box]]


def draw_bag(
    preset: BagPreset,
    canvas: tuple[int, int],
    rng: np.random.Generator,
    defect: str | None = None,
    kinds: Sequence[str] | None = None,
) -> Bag:
    """Draw one bag on a canvas of (height, width) pixels: good, or with one defect of LOGICAL or STRUCTURAL.

    A bag without a rule to break holds `kinds`, any number of CLASS_NAMES, instead of the rule's parts.

    Raises ValueError for an unknown defect, a defect together with `kinds`, a canvas with a side below 32 pixels and
    parts or a gap that leave no room.
    """
    _check_canvas(canvas)
    if defect is not None and defect not in LOGICAL | STRUCTURAL:
        raise ValueError(f"unknown defect {defect!r}, known: {', '.join(LOGICAL | STRUCTURAL)}")
    if defect is not None and kinds is not None:
        raise ValueError(f"{defect} is a defect of the rule's parts, not of others")
    edit, flaw = LOGICAL.get(defect, _Edit()), STRUCTURAL.get(defect, _Flaw())
    wanted = edit.applied(_RULE) if kinds is None else list(kinds)

    sheet = _Sheet(canvas, preset, rng)
    _draw_plastic(sheet, preset, rng)
    flaw.under_parts(sheet, rng)
    parts = _flawed(_scatter(wanted, preset, rng), flaw, rng)
    boxes = [(_SHAPES[part.kind].class_name, _draw_part(sheet, part)) for part in parts]
    flaw.over_parts(sheet, rng)
    _draw_highlights(sheet, preset, rng)

    image, owner = sheet.developed(preset, rng)
    if defect in LOGICAL:
        # What is missing may be anywhere in the bag; what is too many may be any one of its type.
        mask = owner == _label(edit.add) if edit.add else owner > _TABLE
    else:
        mask = owner == _DEFECT
    return Bag(image, [(defect, mask)] if defect else [], boxes)


def write_screw_bags(
    root: Path, *, preset: str, seed: int, canvas: tuple[int, int], counts: BagCounts, workers: int = 1
) -> Path:
    """Write root/screw_bag in MVTec LOCO's layout and return its path; all of it appears at once, or nothing does.

    The files depend on preset, seed, canvas (height, width) and counts alone, and not on workers. The kinds of defect
    take turns, so a test split shorter than LOGICAL or STRUCTURAL shows the first kinds only. Workers are spawned:
    with more than one, a script calls this under ``if __name__ == "__main__"``.

    Raises ValueError for an unknown preset, a negative seed, fewer than one worker or a canvas with a side below 32
    pixels, and FileExistsError where root/screw_bag exists.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}, known: {', '.join(PRESETS)}")
    if seed < 0 or workers < 1:
        raise ValueError(f"seed must be at least 0 and workers at least 1, got {seed} and {workers}")
    _check_canvas(canvas)
    target = root / "screw_bag"
    if target.exists():
        raise FileExistsError(f"{target} exists already; remove it to draw it again")

    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".screw_bag-", dir=root) as staging:
        folder = Path(staging, target.name)
        jobs = list(_jobs(counts))
        for parent in {path.parent for job in jobs for path in (job.image_file, job.mask_file) if path}:
            (folder / parent).mkdir(parents=True, exist_ok=True)
        write = partial(_write_image, folder, PRESETS[preset], seed, canvas)
        if workers == 1:
            for job in jobs:
                write(job)
        else:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                list(pool.map(write, jobs, chunksize=8))
        (folder / "defects_config.json").write_text(json.dumps(_defects_config(canvas), indent=4) + "\n")
        os.replace(folder, target)
    return target


def _check_canvas(canvas: tuple[int, int]) -> None:
    if min(canvas) < 32:
        raise ValueError(f"the canvas (height, width) needs at least 32 pixels a side, got {canvas}")


# ---- What can be wrong; test images show LOGICAL and STRUCTURAL in their order --------------------------------------

_RULE = ("long screw", "short screw", "nut", "nut", "washer", "washer")


@dataclass(frozen=True)
class _Edit:
    """A broken rule: one part taken out, one put in, or both."""

    remove: str | None = None
    add: str | None = None

    def applied(self, rule: tuple[str, ...]) -> list[str]:
        kinds = list(rule)
        if self.remove:
            kinds.remove(self.remove)
        return kinds + [self.add] if self.add else kinds


LOGICAL: dict[str, _Edit] = {
    "missing_nut": _Edit(remove="nut"),
    "missing_washer": _Edit(remove="washer"),
    "missing_long_screw": _Edit(remove="long screw"),
    "missing_short_screw": _Edit(remove="short screw"),
    "extra_nut": _Edit(add="nut"),
    "extra_washer": _Edit(add="washer"),
    "extra_long_screw": _Edit(add="long screw"),
    "extra_short_screw": _Edit(add="short screw"),
    "washer_instead_of_nut": _Edit(remove="nut", add="washer"),
    "nut_instead_of_washer": _Edit(remove="washer", add="nut"),
    "two_short_screws_no_long": _Edit(remove="long screw", add="short screw"),
    "very_short_screw": _Edit(remove="short screw", add="very short screw"),
}


def _nothing(sheet: "_Sheet", rng: np.random.Generator) -> None:
    pass


def _scratch(sheet: "_Sheet", rng: np.random.Generator) -> None:
    along = np.linspace(-0.5, 0.5, 9) * rng.uniform(0.35, 0.6)
    path = np.stack([along, rng.normal(0, 0.006, along.size)], axis=1)
    sheet.line(_posed(path, _point_inside(0.2, rng), rng.uniform(0, np.pi)), (88, 84, 82), 0.014, _DEFECT)


def _contaminate(sheet: "_Sheet", rng: np.random.Generator) -> None:
    rough = rng.uniform(0.035, 0.07) * rng.uniform(0.7, 1.2, (14, 1))
    blob = rough * _circle(1.0, 14) * (1.0, rng.uniform(0.6, 1.0))
    sheet.polygon(_posed(blob, _point_inside(0.05, rng), rng.uniform(0, np.pi)), (92, 66, 38), _DEFECT)


def _tear(sheet: "_Sheet", rng: np.random.Generator) -> None:
    start, width, depth = rng.uniform(-0.45, 0.15), rng.uniform(0.18, 0.3), rng.uniform(0.09, 0.15)
    x = start + width * np.linspace(0, 1, 9)
    inward = depth * np.sin(np.linspace(0, np.pi, 9)) * rng.uniform(0.6, 1.2, 9)
    edge = _BAG_HALF[1] * rng.choice([-1, 1])
    sheet.polygon(np.stack([x, edge - np.sign(edge) * inward], axis=1), _TABLE_COLOUR, _DEFECT)


def _bend(part: "_Part", rng: np.random.Generator) -> "_Part":
    return replace(part, bend=float(rng.choice([-1, 1]) * rng.uniform(0.6, 1.0)))


def _stain(part: "_Part", rng: np.random.Generator) -> "_Part":
    return replace(part, colour=_STAINS[rng.integers(len(_STAINS))])


@dataclass(frozen=True)
class _Flaw:
    """Damage, by the moment it is drawn: under all parts, as a changed part of one of the kinds, or over all parts."""

    under_parts: Callable[["_Sheet", np.random.Generator], None] = _nothing
    over_parts: Callable[["_Sheet", np.random.Generator], None] = _nothing
    part: Callable[["_Part", np.random.Generator], "_Part"] | None = None
    kinds: tuple[str, ...] = ()


STRUCTURAL: dict[str, _Flaw] = {
    "scratch": _Flaw(over_parts=_scratch),
    "contamination": _Flaw(over_parts=_contaminate),
    "torn_bag": _Flaw(under_parts=_tear),
    "bent_screw": _Flaw(part=_bend, kinds=("long screw", "short screw")),
    "colour": _Flaw(part=_stain, kinds=CLASS_NAMES),
}


# ---- Parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """A kind of part, lying along x around the origin, in bag units.

    solid: (N, 2) polygons that make up the part. shine: (M, 2) polygons of its lit face.
    discs: (K, 2) centres of circles with radius `reach` that cover the part, for keeping parts apart.
    """

    class_name: str
    colour: Colour
    solid: list[np.ndarray]
    shine: list[np.ndarray]
    discs: np.ndarray
    reach: float

    @property
    def area(self) -> float:
        return sum(abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2 for x, y in (piece.T for piece in self.solid))


def _circle(radius: float, corners: int) -> np.ndarray:
    angles = 2 * np.pi * np.arange(corners) / corners
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _ring(outer: np.ndarray, inner: np.ndarray) -> list[np.ndarray]:
    """Two halves, since a polygon has no hole."""
    outer, inner = np.concatenate([outer, outer[:1]]), np.concatenate([inner, inner[:1]])
    o, i = len(outer) // 2, len(inner) // 2
    return [np.concatenate([outer[: o + 1], inner[i::-1]]), np.concatenate([outer[o:], inner[: i - 1 : -1]])]


def _screw(class_name: str, length: float) -> _Shape:
    head, shaft, thread = 0.05, 0.021, 0.007  # length of the head; half-width of the core; height of the thread
    turns = max(int(length / 0.03), 3)
    x = np.linspace(head - length / 2, length / 2 - 0.02, 2 * turns)
    upper = np.stack([x, shaft + thread * (np.arange(x.size) % 2)], axis=1)
    half = np.array([[-length / 2, 0.03], [0.015 - length / 2, 0.05], [head - length / 2, 0.05], *upper,
                     [length / 2, 0.012]])  # fmt: skip
    outline = np.concatenate([half, half[::-1] * (1, -1)])
    lit = np.stack([x, np.full_like(x, -0.002)], axis=1)
    shine = np.concatenate([lit, lit[::-1] - (0, 0.011)])
    discs = np.stack([np.linspace(0.05 - length / 2, length / 2 - 0.05, 9), np.zeros(9)], axis=1)
    return _Shape(class_name, (86, 88, 94), [outline], [shine], discs, reach=0.055)


def _flat(class_name: str, colour: Colour, corners: int, radius: float, hole: float) -> _Shape:
    solid = _ring(_circle(radius, corners), _circle(hole, 28))
    shine = _ring(_circle(0.45 * radius + 0.55 * hole, 28), _circle(0.2 * radius + 0.8 * hole, 28))
    return _Shape(class_name, colour, solid, shine, np.zeros((1, 2)), reach=radius)


_SHAPES: dict[str, _Shape] = {
    "long screw": _screw("long screw", 0.50),
    "short screw": _screw("short screw", 0.27),
    "very short screw": _screw("short screw", 0.15),
    "nut": _flat("nut", (104, 92, 66), corners=6, radius=0.080, hole=0.036),
    "washer": _flat("washer", (88, 93, 102), corners=28, radius=0.084, hole=0.046),
}
_STAINS: tuple[Colour, ...] = ((48, 84, 168), (172, 52, 44), (48, 128, 66))


@dataclass(frozen=True)
class _Part:
    """One part in the bag. bend: four times a bent screw's bow, in lengths. flawed: its pixels are the defect."""

    kind: str
    centre: np.ndarray
    angle: float
    scale: float
    colour: Colour
    brightness: float
    bend: float = 0.0
    flawed: bool = False


def _posed(points: np.ndarray, centre: np.ndarray, angle: float | np.ndarray) -> np.ndarray:
    """Turn (N, 2) points by an angle in radians and move them to a centre; (B,) angles with (B, 1, 2) centres batch."""
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.stack([np.stack([cos, sin], axis=-1), np.stack([-sin, cos], axis=-1)], axis=-2)
    return points @ turn + centre


def _scatter(kinds: list[str], preset: BagPreset, rng: np.random.Generator) -> list[_Part]:
    """Lay the parts in random poses, none closer to another than the preset's gap."""
    largest_first = sorted(kinds, key=lambda kind: -_SHAPES[kind].area)
    deals = (_dealt(largest_first, preset.gap, rng) for _ in range(_DEALS))  # an early part can bar a late one
    poses = next((deal for deal in deals if deal is not None), None)
    if poses is None:
        raise ValueError(f"no room for {len(kinds)} parts with a gap of {preset.gap} bag units")
    return [
        _Part(kind, centre, angle, 1 + rng.uniform(-1, 1) * preset.part_scale, _SHAPES[kind].colour,
              1 + rng.uniform(-1, 1) * preset.part_brightness)
        for kind, centre, angle in poses
    ]  # fmt: skip


def _dealt(kinds: list[str], gap: float, rng: np.random.Generator) -> list[tuple[str, np.ndarray, float]] | None:
    poses: list[tuple[str, np.ndarray, float]] = []
    taken, reaches = np.empty((0, 2)), np.empty(0)
    for kind in kinds:
        shape = _SHAPES[kind]
        angles = rng.uniform(0, 2 * np.pi, _TRIES)
        centres = rng.uniform(*_INSIDE, (_TRIES, 1, 2))
        discs = _posed(shape.discs, centres, angles)
        inside = ((discs > _INSIDE[0] + shape.reach) & (discs < _INSIDE[1] - shape.reach)).all(axis=(1, 2))
        distances = np.linalg.norm(discs[:, :, None] - taken, axis=-1)
        free = np.flatnonzero(inside & (distances > shape.reach + reaches + gap).all(axis=(1, 2)))
        if free.size == 0:
            return None
        pick = free[0]
        poses.append((kind, centres[pick, 0], float(angles[pick])))
        taken = np.concatenate([taken, discs[pick]])
        reaches = np.concatenate([reaches, np.full(len(shape.discs), shape.reach)])
    return poses


def _flawed(parts: list[_Part], flaw: _Flaw, rng: np.random.Generator) -> list[_Part]:
    if flaw.part is None:
        return parts
    victim = rng.choice([index for index, part in enumerate(parts) if part.kind in flaw.kinds])
    return [replace(flaw.part(part, rng), flawed=True) if index == victim else part for index, part in enumerate(parts)]


# ---- Drawing --------------------------------------------------------------------------------------------------------

_SUPERSAMPLE = 2
_DEALS, _TRIES = 200, 64  # of a whole bag; of one part
_BAG_HALF = np.array([0.625, 0.40])
_INSIDE = np.array([[-0.59, -0.27], [0.59, 0.37]])  # where parts may lie: below the zip, off the welds
_TABLE_COLOUR, _BAG_COLOUR = (44, 48, 54), (164, 168, 171)
_WELD_COLOUR, _SHADOW_COLOUR = (177, 181, 184), (146, 150, 154)
_TABLE, _PLASTIC, _DEFECT = 0, 1, 255  # labels in the owner map; the kinds of parts lie between


def _label(kind: str) -> int:
    return _PLASTIC + 1 + list(_SHAPES).index(kind)


def _unit_pixels(canvas: tuple[int, int]) -> float:
    return min(canvas[0], canvas[1] / 1.45)


class _Sheet:
    """Three layers at a multiple of the canvas size: colour, who owns each pixel, and light reflected by the plastic.

    Points are (N, 2) in bag units, x right and y down from the bag's centre, in the bag's own turned frame.
    """

    def __init__(self, canvas: tuple[int, int], preset: BagPreset, rng: np.random.Generator) -> None:
        height, width = canvas
        size = (width * _SUPERSAMPLE, height * _SUPERSAMPLE)
        self._unit = _unit_pixels(canvas) * _SUPERSAMPLE
        self._limits = np.array([width, height])
        self._centre = np.array(size) / 2 + rng.uniform(-1, 1, 2) * preset.bag_shift * self._unit
        self._angle = np.deg2rad(rng.uniform(-1, 1) * preset.bag_turn)
        self._images = [Image.new("RGB", size, _TABLE_COLOUR), Image.new("L", size, _TABLE), Image.new("L", size, 0)]
        self._colour, self._owner, self._light = (ImageDraw.Draw(image) for image in self._images)

    def polygon(self, points: np.ndarray, colour: Colour, owner: int | None = None) -> None:
        """Without an owner it only paints: what was there still owns the pixels."""
        flat = self._flat(points)
        self._colour.polygon(flat, fill=colour)
        if owner is not None:
            self._owner.polygon(flat, fill=owner)

    def line(self, points: np.ndarray, colour: Colour, width: float, owner: int | None = None) -> None:
        flat, thick = self._flat(points), self._thickness(width)
        self._colour.line(flat, fill=colour, width=thick, joint="curve")
        if owner is not None:
            self._owner.line(flat, fill=owner, width=thick, joint="curve")

    def shine(self, points: np.ndarray, width: float, strength: float) -> None:
        flat, thick = self._flat(points), self._thickness(width)
        self._light.line(flat, fill=round(255 * strength), width=thick, joint="curve")

    def box(self, points: np.ndarray) -> Box:
        """(x0, y0, x1, y1) around the points, in canvas pixels."""
        pixels = self._pixels(points) / _SUPERSAMPLE
        low, high = np.clip([pixels.min(axis=0), pixels.max(axis=0)], 0, self._limits)
        return (*low.tolist(), *high.tolist())

    def developed(self, preset: BagPreset, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The lit, noisy image (H, W, 3) uint8 and the owner map (H, W) uint8, at canvas size."""
        colour, owner, light = self._images
        light = light.filter(ImageFilter.BoxBlur(0.006 * self._unit)).reduce(_SUPERSAMPLE)
        image = np.asarray(colour.reduce(_SUPERSAMPLE), dtype=np.float32)
        image += (255 - image) * (np.asarray(light, dtype=np.float32)[..., None] / 255)

        height, width = image.shape[:2]
        direction = rng.uniform(0, 2 * np.pi)
        slope = np.cos(direction) * np.linspace(-1, 1, width) + np.sin(direction) * np.linspace(-1, 1, height)[:, None]
        gain = (1 + rng.uniform(-1, 1) * preset.gain) * (1 + rng.uniform(0, 1) * preset.gradient * slope)
        image *= gain.astype(np.float32)[..., None]
        image += preset.noise * rng.standard_normal(image.shape, dtype=np.float32)
        return np.clip(image, 0, 255).round().astype(np.uint8), np.asarray(owner)[::_SUPERSAMPLE, ::_SUPERSAMPLE]

    def _pixels(self, points: np.ndarray) -> np.ndarray:
        return _posed(points * self._unit, self._centre, self._angle)

    def _flat(self, points: np.ndarray) -> list[float]:
        return (self._pixels(points) - 0.5).ravel().tolist()  # pillow's whole numbers are pixel centres

    def _thickness(self, width: float) -> int:
        return max(round(width * self._unit), 1)


def _draw_plastic(sheet: _Sheet, preset: BagPreset, rng: np.random.Generator) -> None:
    # Bags of one make differ in size, or the area that is not table would give every missing part away.
    (x, y), cut = _BAG_HALF * (1 + rng.uniform(0, preset.bag_growth, 2)), 0.02
    corners = np.array([[cut - x, -y], [x - cut, -y], [x, cut - y], [x, y - cut], [x - cut, y], [cut - x, y],
                        [-x, y - cut], [-x, cut - y]])  # fmt: skip
    sheet.polygon(corners, _BAG_COLOUR, _PLASTIC)
    for height in (-0.33, -0.305):  # the zip
        sheet.line(np.array([[-x, height], [x, height]]), _WELD_COLOUR, 0.01)
    weld = corners * (0.975, 0.965)
    sheet.line(np.concatenate([weld, weld[:1]]), _WELD_COLOUR, 0.008)
    for _ in range(rng.integers(3, 7)):
        crease = np.array([_point_inside(0.0, rng), _point_inside(0.0, rng)])
        shade = int(rng.integers(-9, 12))
        sheet.line(crease, tuple(level + shade for level in _BAG_COLOUR), 0.012)


def _draw_part(sheet: _Sheet, part: _Part) -> Box:
    shape = _SHAPES[part.kind]
    length = np.ptp(np.concatenate(shape.solid)[:, 0])

    def placed(points: np.ndarray) -> np.ndarray:
        bow = part.bend * (points[:, :1] ** 2 / length - length / 8) * (0, 1)
        return _posed(part.scale * (points + bow), part.centre, part.angle)

    def lit(factor: float) -> Colour:
        return tuple(min(round(level * factor * part.brightness), 255) for level in part.colour)

    solid = [placed(piece) for piece in shape.solid]
    for piece in solid:
        sheet.polygon(piece + (0.008, 0.012), _SHADOW_COLOUR)
    for piece in solid:
        sheet.polygon(piece, lit(1.0), _DEFECT if part.flawed else _label(part.kind))
    for piece in shape.shine:
        sheet.polygon(placed(piece), lit(1.22))
    return sheet.box(np.concatenate(solid))


def _draw_highlights(sheet: _Sheet, preset: BagPreset, rng: np.random.Generator) -> None:
    for _ in range(rng.integers(preset.highlights + 1)):
        along = np.linspace(-0.5, 0.5, 7) * rng.uniform(0.06, 0.22)
        path = np.stack([along, rng.uniform(-2, 2) * along**2], axis=1)
        streak = _posed(path, _point_inside(0.1, rng), rng.uniform(0, np.pi))
        sheet.shine(streak, rng.uniform(0.01, 0.03), rng.uniform(0.3, 1.0) * preset.highlight_strength)


def _point_inside(margin: float, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(_INSIDE[0] + margin, _INSIDE[1] - margin)


# ---- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """One image to write, with its place in the random stream: the number of its split and its index there."""

    stream: tuple[int, int]
    image_file: Path
    mask_file: Path | None = None
    defect: str | None = None


def _jobs(counts: BagCounts) -> Iterator[_Job]:
    good = {"train/good": counts.train, "validation/good": counts.validation, "test/good": counts.test_good}
    for split, (folder, count) in enumerate(good.items()):
        for index in range(count):
            yield _Job((split, index), Path(folder, f"{index:03d}.png"))
    bad = {
        "logical_anomalies": (list(LOGICAL), counts.test_logical),
        "structural_anomalies": (list(STRUCTURAL), counts.test_structural),
    }
    for split, (group, (kinds, count)) in enumerate(bad.items(), start=len(good)):
        for index in range(count):
            yield _Job(
                stream=(split, index),
                image_file=Path("test", group, f"{index:03d}.png"),
                mask_file=Path("ground_truth", group, f"{index:03d}", "000.png"),
                defect=kinds[index % len(kinds)],
            )


def _write_image(folder: Path, preset: BagPreset, seed: int, canvas: tuple[int, int], job: _Job) -> None:
    rng = np.random.default_rng(np.random.SeedSequence((seed, *job.stream)))
    bag = draw_bag(preset, canvas, rng, job.defect)
    _save(bag.image, folder / job.image_file)
    for name, mask in bag.masks:
        _save(mask * np.uint8(_PIXEL_VALUES[name]), folder / job.mask_file)


def _save(pixels: np.ndarray, file: Path) -> None:
    Image.fromarray(pixels).save(file, format="PNG", compress_level=6)


_PIXEL_VALUES = {name: value for value, name in enumerate([*LOGICAL, *STRUCTURAL], start=236)}


def _defects_config(canvas: tuple[int, int]) -> list[dict[str, str | int | float | bool]]:
    """LOCO's thresholds: one part's pixels where a region is larger than the anomaly in it, else the whole region."""
    part_pixels = {kind: max(round(shape.area * _unit_pixels(canvas) ** 2), 1) for kind, shape in _SHAPES.items()}
    absolute = {name: part_pixels[edit.add or edit.remove] for name, edit in LOGICAL.items()}
    return [
        {
            "defect_name": name,
            "pixel_value": value,
            "saturation_threshold": absolute.get(name, 1.0),
            "relative_saturation": name not in absolute,
        }
        for name, value in _PIXEL_VALUES.items()
    ]
