"""The memory of a run before it starts: states by formula, activations traced, the verdict in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gdino_lab.errors import ConfigurationError
from gdino_lab.memory.states import MASTER, MOMENTS, Sizes, states
from gdino_lab.memory.trace import Trace, trace_step
from gdino_lab.models import grounding_dino
from gdino_lab.models.recompute import recompute_activations
from gdino_lab.plan import BYTES, bucket_elements, zero_stage
from gdino_lab.scoring import DTYPES
from gdino_lab.settings import Settings, instantiate
from gdino_lab.tasks.protocol import Task, Worst

# cuBLAS takes this once and keeps it, through the same allocator (seen on an H200).
CUBLAS_WORKSPACE = 66 * 2**20
# How far a prediction was off at most, as a share of what was measured (docs/memory.md).
KNOWN_ERROR = 0.05
# Of this process, by all that a step depends on: the rungs of a ladder, and the run that one becomes, often take the same one.
TRACES: dict[str, Trace] = {}


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank.

    device: by term, of what is there at the peak; its sum is `peak`.
    host: by term.
    resident: there from step to step, and while backward runs, however many images there are.
    for_images: the batch and what forward and backward of it need at most.
    micro_batch: images that this is for.
    limit: bytes the device may take, None where that is unknown.
    """

    device: dict[str, int]
    host: dict[str, int]
    peak: int
    resident: int
    for_images: int
    micro_batch: int
    limit: int | None
    worst: Worst

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.peak <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "dominant": self.dominant()}

    def dominant(self) -> str:
        """The largest term."""
        return max(self.device, key=self.device.get)


def forecast(settings: Settings, task: Task, worst: Worst, ranks: int, micro_batch: int | None = None) -> Forecast:
    """Predict the peak of a training step.

    Args:
        task: bound to data or not.
        worst: shape of the largest batch.
        ranks: over all machines.
        micro_batch: images, by default the settings'.
    """
    images = micro_batch or settings.train.micro_batch
    sizes = count(settings, task)
    offload, weight_bytes = settings.offload, BYTES[settings.precision.weights]
    held = states(
        sizes, weight_bytes, zero_stage(settings), ranks, offload.optimizer, offload.parameters, bucket_elements(settings)
    )
    trace = trace_of(settings, task, worst, images, held.traced_gradients)
    resident = held.device | {"cuBLAS workspace": CUBLAS_WORKSPACE}
    batch = {"batch": input_bytes(settings, task.blank_batch(images, worst))}
    # The peak is in forward and backward, or while the optimizer steps.
    traced = batch | {"activations": trace.after_forward, "workspace": trace.peak - trace.after_forward}
    computing = traced | held.gradients
    stepping = {"gradients": trace.gradients + held.gradients.get("gradients", 0), "optimizer step": held.step}
    at_peak = max((computing, stepping), key=lambda terms: sum(terms.values()))
    device = {name: resident.get(name, 0) + at_peak.get(name, 0) for name in (*resident, *at_peak)}
    return Forecast(
        device,
        held.host | {"checkpoint being written": copied_bytes(sizes, weight_bytes, ranks, settings.train.ema_decay > 0)},
        sum(device.values()),
        sum(resident.values()) + sum(held.gradients.values()),
        sum(traced.values()),
        images,
        limit_of(settings),
        worst,
    )


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


def trace_of(settings: Settings, task: Task, worst: Worst, images: int, keep_gradients: bool) -> Trace:
    weights, autocast = settings.precision.weights, settings.precision.autocast
    parts = settings.model, settings.tuning, settings.task, weights, autocast, settings.activations
    if (step := repr((*parts, worst, images, keep_gradients))) in TRACES:
        return TRACES[step]

    def batch() -> dict[str, Any]:
        made = task.blank_batch(images, worst)
        made["inputs"]["pixel_values"] = made["inputs"]["pixel_values"].to(DTYPES[weights])
        return made

    def loss(outputs: Any, made: dict[str, Any]) -> Tensor:
        return sum(task.losses(outputs, made, max(1, task.count(made))).values())

    task.assign = first_come
    TRACES[step] = trace_step(
        lambda: skeleton_of(settings, task), batch, loss, DTYPES[weights], DTYPES.get(autocast), keep_gradients
    )
    return TRACES[step]


def first_come(costs: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Pairs of the right number, for tensors without values; see `gdino_lab.losses.detection.least_cost`."""
    pairs = sum(min(costs.shape[2], boxes) for boxes in counts)
    return torch.zeros(costs.shape[0], 3, pairs, dtype=torch.int64)


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
