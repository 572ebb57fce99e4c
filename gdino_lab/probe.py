"""The worst case first: the largest batch the data holds, so that what does not fit fails now and not in hour three."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from gdino_lab.engine import backward_and_step, discard, set_autocast_scale
from gdino_lab.plan import Plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.scoring import images_at_once, to_device
from gdino_lab.settings import Settings
from gdino_lab.tasks.protocol import Batch, Worst
from gdino_lab.trainer import Run, build
from gdino_lab.usage import Phases

log = logging.getLogger(__name__)


def wanted(settings: Settings) -> bool:
    """As train.probe says; auto: on a GPU."""
    asked = settings.train.probe.lower()
    return asked == "true" or (asked == "auto" and settings.hardware.device == "cuda")


def probe(settings: Settings, plan: Plan, folder: RunFolder, beat: Callable[..., None]) -> None:
    """Train and evaluate on the worst case in an engine that is thrown away with all it did, so the run that follows is the
    same without. Collective.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    beat("try the worst case")
    worst = take_worst_steps(settings, plan, folder)
    gc.collect()
    largest = f"{plan.micro_batch} x {worst.height}x{worst.width} pixels, {worst.tokens} tokens, {worst.boxes} boxes an image"
    if settings.hardware.device != "cuda":
        log.info("the worst case fits: %s", largest)
        return
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    log.info("the worst case fits: %s; at most %.2f GiB", largest, peak / 2**30)
    if (left := torch.cuda.memory_allocated()) > max(0.05 * peak, 2**28):
        log.warning("%.2f GiB of the worst case are still held; train.probe=false saves them", left / 2**30)


def take_worst_steps(settings: Settings, plan: Plan, folder: RunFolder) -> Worst:
    """Two optimizer steps, since Adam's moments are there from the second on, of at most two passes each, since the
    gradients of the first are there in the second; then an evaluation batch."""
    passes = min(2, plan.accumulation)
    changed = {"gradient_accumulation_steps": passes, "train_batch_size": plan.micro_batch * passes * plan.world_size}
    if "fp16" in plan.deepspeed:
        changed["fp16"] = plan.deepspeed["fp16"] | {"loss_scale": 1.0}
    brief = replace(plan, accumulation=passes, deepspeed=plan.deepspeed | changed)
    with saying_nothing():
        run = build(replace(settings, tracker={}), brief, folder, lambda: False, Phases(), resumed=True)  # any weights will do
    set_autocast_scale(run.engine, 1.0)

    worst = run.task.worst(plan.micro_batch)
    run.engine.train()
    for _ in range(2 * passes):
        batch = worst_batch(run, plan.micro_batch, worst)
        terms = run.task.losses(run.engine(**batch["inputs"]), batch, max(1, run.task.count(batch)))
        backward_and_step(run.engine, 0 * sum(terms.values()))  # gradients of any size take as much; none overflows
        del batch, terms
    run.engine.eval()
    images = images_at_once(settings)
    with run.averaged(), torch.no_grad():
        run.engine(**worst_batch(run, images, run.task.worst(images))["inputs"])
    discard(run.engine)
    return worst


def worst_batch(run: Run, images: int, worst: Worst) -> Batch:
    batch = run.task.blank_batch(images, worst)
    batch["inputs"]["pixel_values"].normal_()  # of images in one colour not all gradients are finite
    return to_device(batch, run.device, run.dtype)


@contextmanager
def saying_nothing() -> Iterator[None]:
    """What is wrong is said all the same; the rest will be, when the run itself is built."""
    ours = logging.getLogger("gdino_lab")
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(logging.NOTSET)
