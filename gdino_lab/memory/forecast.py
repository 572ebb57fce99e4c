"""The memory of a run before it starts: states by formula, activations traced, the verdict in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gdino_lab.errors import ConfigurationError
from gdino_lab.memory.states import MASTER, MOMENTS, Sizes, States, states
from gdino_lab.memory.trace import Trace, trace_evaluation, trace_step
from gdino_lab.models import grounding_dino
from gdino_lab.models.recompute import recompute_activations
from gdino_lab.plan import BYTES, bucket_elements, zero_stage
from gdino_lab.scoring import DTYPES, images_at_once, to_device
from gdino_lab.settings import Settings, instantiate
from gdino_lab.tasks.protocol import Task, Worst

# cuBLAS takes this once and keeps it, through the same allocator (seen on an H200).
CUBLAS_WORKSPACE = 66 * 2**20
# How far a prediction was off at most, as a share of what was measured (docs/memory.md).
KNOWN_ERROR = 0.05
# Of this process, by all that a step or an evaluation depends on: the rungs of a ladder, and the run that one becomes, often
# take the same ones.
TRACES: dict[str, Trace] = {}


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank.

    device: by term, of what is there at the peak; its sum is `peak`.
    host: by term.
    peaks: of each phase of a run; the largest is `peak`.
    resident: there from step to step, and while backward runs, however many images there are.
    for_images: the batch and what forward and backward of it need at most.
    micro_batch: images that this is for.
    limit: bytes the device may take, None where that is unknown.
    worst, evaluated: shapes of the largest batch of training and of evaluation.
    """

    device: dict[str, int]
    host: dict[str, int]
    peak: int
    peaks: dict[str, int]
    resident: int
    for_images: int
    micro_batch: int
    limit: int | None
    worst: Worst
    evaluated: Worst

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.peak <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "dominant": self.dominant()}

    @property
    def phase(self) -> str:
        """When the peak is reached."""
        return max(self.peaks, key=self.peaks.get)

    def dominant(self) -> str:
        """The largest term."""
        return max(self.device, key=self.device.get)


def forecast(settings: Settings, task: Task, worst: Worst, ranks: int, micro_batch: int | None = None) -> Forecast:
    """Predict the peak of a run: of its training steps and its evaluations.

    Args:
        task: bound to data or not.
        worst: shape of the largest batch.
        ranks: over all machines.
        micro_batch: images, by default the settings'.
    """
    images = micro_batch or settings.train.micro_batch
    at_once = images * images_at_once(settings) // settings.train.micro_batch
    evaluated = worst if at_once == images else worst_evaluated(task, at_once, worst)
    sizes = count(settings, task)
    held = states_of(settings, sizes, ranks, zero_stage(settings))
    trace = trace_of(settings, task, worst, images, held.traced_gradients)
    resident = held.device | {"cuBLAS workspace": CUBLAS_WORKSPACE}
    batch = {"batch": input_bytes(settings, task.blank_batch(images, worst))}
    traced = batch | {"activations": trace.after_forward, "workspace": trace.peak - trace.after_forward}
    evaluating = {
        "batch": input_bytes(settings, task.blank_batch(at_once, evaluated)),
        "evaluation": trace_of(settings, task, evaluated, at_once, keep_gradients=None).peak,
    }
    phases = {
        "forward and backward": traced | held.gradients,
        "optimizer step": {"gradients": trace.gradients + held.gradients.get("gradients", 0), "optimizer step": held.step},
        "evaluation": evaluating | held.evaluation,
    }
    peaks = {phase: sum(resident.values()) + sum(terms.values()) for phase, terms in phases.items()}
    at_peak = phases[max(peaks, key=peaks.get)]
    weight_bytes = BYTES[settings.precision.weights]
    return Forecast(
        {name: resident.get(name, 0) + at_peak.get(name, 0) for name in (*resident, *at_peak)},
        held.host | {"checkpoint being written": copied_bytes(sizes, weight_bytes, ranks, settings.train.ema_decay > 0)},
        max(peaks.values()),
        peaks,
        sum(resident.values()) + sum(held.gradients.values()),
        sum(traced.values()),
        images,
        limit_of(settings),
        worst,
        evaluated,
    )


def growth(settings: Settings, task: Task, found: Forecast, ranks: int) -> dict[str, float]:
    """Bytes that one more image in a micro-batch adds to the peak of each phase that depends on it, from traces of twice as
    many."""
    keep_gradients = states_of(settings, count(settings, task), ranks, zero_stage(settings)).traced_gradients

    def each(shape: Worst, keep_gradients: bool | None) -> float:
        once, twice = (
            input_bytes(settings, task.blank_batch(images, shape)) + trace_of(settings, task, shape, images, keep_gradients).peak
            for images in (found.micro_batch, 2 * found.micro_batch)
        )
        return (twice - once) / found.micro_batch

    evaluated = images_at_once(settings) / settings.train.micro_batch
    return {
        "forward and backward": each(found.worst, keep_gradients),
        "evaluation": evaluated * each(found.evaluated, keep_gradients=None),
    }


def states_of(settings: Settings, sizes: Sizes, ranks: int, stage: int) -> States:
    """What these settings hold at a ZeRO stage."""
    train, offload = settings.train, settings.offload
    return states(
        sizes, BYTES[settings.precision.weights], stage, ranks, offload.optimizer, offload.parameters, bucket_elements(settings),
        averaging=train.ema_decay > 0, accumulating=train.effective_batch > train.micro_batch * ranks,
    )  # fmt: skip


def count(settings: Settings, task: Task) -> Sizes:
    """Parameters of the module that these settings train."""
    with torch.device("meta"):
        module = skeleton_of(settings, task)
    moving = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    return Sizes(sum(parameter.numel() for parameter in module.parameters()), sum(moving), max(moving, default=0))


def copied_bytes(sizes: Sizes, weight_bytes: int, ranks: int, averaging: bool) -> int:
    """Of this rank's share of a checkpoint, which is copied to the host to be written while training goes on."""
    moving = (MASTER + MOMENTS + (MASTER if averaging else 0)) * sizes.moving
    return -(-(moving + weight_bytes * (sizes.total - sizes.moving)) // ranks)


def skeleton_of(settings: Settings, task: Task) -> nn.Module:
    arguments = {name: value for name, value in settings.model.items() if name != "_target_"}
    detector = instantiate(settings.tuning).prepare(grounding_dino.skeleton(**arguments))
    if settings.activations.recompute:
        recompute_activations(detector)
    return task.attach(detector)


def trace_of(settings: Settings, task: Task, worst: Worst, images: int, keep_gradients: bool | None) -> Trace:
    """Of a training step; of an evaluation batch where `keep_gradients` is None."""
    weights, autocast = settings.precision.weights, settings.precision.autocast
    parts = settings.model, settings.tuning, settings.task, weights, autocast, settings.activations
    if (what := repr((*parts, worst, images, keep_gradients))) in TRACES:
        return TRACES[what]

    def batch() -> dict[str, Any]:
        return to_device(task.blank_batch(images, worst), torch.device("meta"), DTYPES[weights])

    def loss(outputs: Any, made: dict[str, Any]) -> Tensor:
        return sum(task.losses(outputs, made, max(1, task.count(made))).values())

    task.assign = first_come
    shared = (lambda: skeleton_of(settings, task)), batch, DTYPES[weights], DTYPES.get(autocast)
    TRACES[what] = trace_evaluation(*shared) if keep_gradients is None else trace_step(*shared, loss, keep_gradients)
    return TRACES[what]


def first_come(costs: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Pairs of the right number, for tensors without values; see `gdino_lab.losses.detection.least_cost`."""
    pairs = sum(min(costs.shape[2], boxes) for boxes in counts)
    return costs.new_zeros(costs.shape[0], 3, pairs, dtype=torch.int64)


def input_bytes(settings: Settings, batch: dict[str, Any]) -> int:
    tensors = [value for value in (*batch.values(), *batch["inputs"].values()) if isinstance(value, Tensor)]
    pixels = batch["inputs"]["pixel_values"]
    saved = pixels.nbytes - pixels.numel() * BYTES[settings.precision.weights]
    return sum(tensor.nbytes for tensor in tensors) - saved


def limit_of(settings: Settings) -> int | None:
    hardware = settings.hardware
    limits = [each for each in (hardware.memory_gib, hardware.memory_limit_gib) if each is not None]
    return int(min(limits) * 2**30) if limits else None


def worst_of(settings: Settings, task: Task, data: Any) -> tuple[Worst, str | None]:
    """The largest batch of the data, or where there are none yet the largest that the settings allow, and a word on it."""
    try:
        return task.worst(settings.train.micro_batch), None
    except (ConfigurationError, AttributeError):
        assumed = Worst(data.shortest, data.longest, tokens=64, boxes=50)
        return assumed, (
            f"The data are not there yet: images of {assumed.height}x{assumed.width}, prompts of {assumed.tokens} tokens and "
            f"{assumed.boxes} boxes an image are assumed."
        )


def worst_evaluated(task: Task, images: int, worst: Worst) -> Worst:
    """The largest batch of `images`, or where the data are not there yet one of `worst`."""
    try:
        return task.worst(images)
    except (ConfigurationError, AttributeError):
        return worst
