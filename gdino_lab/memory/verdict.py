"""What a forecast means, in words: what dominates, whether ZeRO helps, whether it fits, how many images would."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import OmegaConf

from gdino_lab.errors import ConfigurationError
from gdino_lab.memory.forecast import CUBLAS_WORKSPACE, Forecast, count, growth, states_of
from gdino_lab.memory.states import Sizes
from gdino_lab.plan import zero_stage
from gdino_lab.settings import Settings, Zero, load
from gdino_lab.tasks.protocol import Table, Task

# What CUDA's context and kernels, and NCCL's buffers, take of a card: for one rank and for several (H200, docs/two_gpus.md).
OUTSIDE_OF_ONE, OUTSIDE_OF_SEVERAL = 1.7 * 2**30, 2.1 * 2**30


def table(found: Forecast) -> Table:
    """Every term, GPU and host, of one rank; all ranks are alike."""
    rows = [["GPU", name, gib(size)] for name, size in found.device.items() if size]
    rows.append(["GPU", "peak", gib(found.peak)])
    rows += [["host", name, gib(size)] for name, size in found.host.items() if size]
    worst = found.worst
    return Table(
        f"Predicted memory of a rank, GiB, for {found.micro_batch} image(s) of {worst.height}x{worst.width}",
        ["", "term", "GiB"],
        rows,
        f"The largest batch there can be: a prompt of {worst.tokens} tokens, {worst.boxes} boxes an image. What the peak, "
        f"reached in {found.phase}, is made of.",
    )


def words(settings: Settings, task: Task, found: Forecast, ranks: int) -> list[str]:
    """The verdict, a sentence each."""
    said = [f"{found.dominant()} dominate(s): {gib(found.device[found.dominant()])} of {gib(found.peak)} GiB."]
    said.append(zero_verdict(settings, count(settings, task), ranks))
    if found.limit is None:
        said.append("hardware.memory_gib is not known, so whether it fits is not either.")
        return said
    spare = found.limit - found.peak
    said.append(
        f"It fits {gib(found.limit)} GiB with {gib(spare)} GiB to spare."
        if spare >= 0
        else f"It does NOT fit {gib(found.limit)} GiB: {gib(-spare)} GiB too much."
    )
    said.append(outside_words(settings, found, ranks))
    most = largest_micro_batch(settings, task, found, ranks)
    said.append(f"The largest micro-batch that fits: {most}." if most else "Not even one image fits.")
    return said


def outside_words(settings: Settings, found: Forecast, ranks: int) -> str:
    """What a card has to hold besides, and whether that may be too much for one that the prediction fits."""
    outside, card = OUTSIDE_OF_ONE if ranks == 1 else OUTSIDE_OF_SEVERAL, settings.hardware.memory_gib
    too_much = card is not None and found.fits and found.peak + outside > card * 2**30
    warning = f", so a card of {card:g} GiB may not hold it" if too_much else ""
    return f"CUDA and NCCL take about {outside / 2**30:.1f} GiB besides (on an H200; docs/two_gpus.md){warning}."


def largest_micro_batch(settings: Settings, task: Task, found: Forecast, ranks: int) -> int:
    """Images of the same size that fit the limit, in training and in evaluation."""
    if found.limit < found.peaks["optimizer step"]:  # whatever the images
        return 0
    more = growth(settings, task, found, ranks)
    return max(0, found.micro_batch + min(int((found.limit - found.peaks[phase]) // each) for phase, each in more.items()))


def zero_verdict(settings: Settings, sizes: Sizes, ranks: int) -> str:
    """Whether sharing the states would help, by the formulas alone."""
    chosen, by_stage = zero_stage(settings), {}
    for stage in stages_allowed(settings):
        held = states_of(settings, sizes, ranks, stage)
        by_stage[stage] = sum(held.device.values()) + sum(held.gradients.values()) + CUBLAS_WORKSPACE
    best = min(by_stage, key=by_stage.get)
    if best == chosen or by_stage[best] > 0.95 * by_stage[chosen]:
        return f"ZeRO-{chosen} is as good as any stage here, on {ranks} rank(s)."
    return f"ZeRO-{best} would hold {gib(by_stage[best])} GiB of states instead of {gib(by_stage[chosen])}, on {ranks} rank(s)."


def stages_allowed(settings: Settings) -> list[int]:
    """ZeRO's stages that all else in these settings goes with, and that run as such."""
    allowed = []
    for stage in range(4):
        changed = replace(settings, zero=Zero(stage))
        try:
            load(OmegaConf.structured(changed))
        except ConfigurationError:
            continue
        allowed += [stage] if zero_stage(changed) == stage else []
    return allowed


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
