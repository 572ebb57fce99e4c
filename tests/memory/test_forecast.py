"""The forecast moves as memory does, and its verdict agrees with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdino_lab.commands.main import composed
from gdino_lab.memory import verdict
from gdino_lab.memory.forecast import TRACES, copied_bytes, count, forecast
from gdino_lab.memory.states import Sizes
from gdino_lab.memory.trace import Trace
from gdino_lab.settings import instantiate
from gdino_lab.tasks.protocol import Worst

WORST = Worst(128, 192, tokens=16, boxes=6)


def found(*words: str, images: int = 4, task: str = "detection"):
    batches = f"train.micro_batch={images}", f"train.effective_batch={images}"
    settings = composed(f"task={task}", "hardware=rtx3090_single", "zero=stage0", "offload=none", *batches, *words)
    made = instantiate(settings.task, seed=0)
    return forecast(settings, made, WORST, 1), settings, made


@pytest.mark.slow
def test_what_takes_less_is_said_to_take_less():
    plain = found()[0]
    assert plain.peak == sum(plain.device.values()) and plain.dominant() == "activations"
    assert found("activations=recompute")[0].peak < plain.peak
    assert found("precision=bf16_autocast")[0].peak < plain.peak
    assert found("precision=bf16")[0].for_images < 0.6 * plain.for_images  # buckets outweigh a nano's states
    assert found(images=8)[0].for_images == pytest.approx(2 * plain.for_images, rel=0.1)


def test_the_anomaly_task_is_traced_too():
    assert found("activations=recompute", task="anomaly", images=1)[0].peak > 0


def test_offload_moves_bytes_to_the_host():
    here, there = found("zero=stage2")[0], found("zero=stage2", "offload=optimizer")[0]
    assert there.peak < here.peak
    assert list(here.host) == ["checkpoint being written"] and sum(there.host.values()) > sum(here.host.values())


@pytest.mark.slow
def test_step_and_evaluation_are_traced_once_and_told_from_every_other():
    same = [
        (), ("zero=stage1",), ("bucket=5mb",), ("train.seed=7",), ("hardware.memory_limit_gib=8",), ("precision=tf32",),
        ("train.ema_decay=0.9",),
    ]  # fmt: skip
    others = [("precision=bf16",), ("activations=recompute",), ("tuning=lora",), ("zero=stage2",)]
    TRACES.clear()
    assert [len(TRACES) for words in same if found(*words)] == [2] * len(same)
    told_apart = [found(*words)[0] for words in others]
    assert len(TRACES) == 2 + 2 * len(others) - 1  # ZeRO-2 is evaluated as ZeRO-0 is
    TRACES.clear()
    assert found(*others[-1])[0] == told_apart[-1]


def test_an_average_is_held_all_the_time_and_what_it_replaces_in_evaluation():
    (plain, settings, task), averaged = found(), found("train.ema_decay=0.999")[0]
    moving = count(settings, task).moving
    more = {phase: averaged.peaks[phase] - plain.peaks[phase] for phase in plain.peaks}
    assert more == {"forward and backward": 4 * moving, "optimizer step": 4 * moving, "evaluation": 8 * moving}
    assert averaged.peak >= plain.peak + 4 * moving and averaged.resident == plain.resident + 4 * moving


@pytest.mark.slow
def test_the_peak_of_a_frozen_model_is_in_evaluation():
    """Which takes two micro-batches where training keeps activations, and one where it does not."""
    frozen = found("tuning=frozen", task="anomaly")[0]
    assert frozen.phase == "evaluation" and frozen.dominant() == "evaluation" and "activations" not in frozen.device
    assert frozen.peak == sum(frozen.device.values()) == frozen.peaks["evaluation"] > frozen.peaks["forward and backward"]
    again = found("tuning=frozen", "activations=recompute", task="anomaly")[0]
    beyond = [each.peaks["evaluation"] - each.resident for each in (frozen, again)]
    assert beyond[0] > 1.8 * beyond[1]


def test_evaluation_is_of_the_shape_that_its_batches_can_have(monkeypatch):
    """Images of several forms padded together; see gdino_lab/probe.py."""
    monkeypatch.setattr("gdino_lab.memory.forecast.trace_of", lambda *_, **__: Trace(0, 0, 0, ""))
    _, settings, task = found(images=1)
    padded = Worst(192, 192, tokens=16, boxes=6)
    task.worst = {2: padded}.__getitem__
    assert forecast(settings, task, WORST, 1).evaluated == padded
    settings.activations.recompute = True  # evaluation takes one image too
    assert forecast(settings, task, WORST, 1).evaluated == WORST


def test_gradients_of_earlier_passes_are_there_in_the_last():
    """At stage 0; what backward then adds to them is let go of at once."""
    (plain, settings, task), passes = found(), found("train.effective_batch=8")[0]
    moving = count(settings, task).moving
    assert passes.device["gradients"] == 4 * moving
    assert plain.peak < passes.peak <= plain.peak + 4 * moving
    assert passes.peaks["optimizer step"] == pytest.approx(plain.peaks["optimizer step"], rel=0.01)


def test_the_limit_decides():
    plain, settings, task = found()
    assert plain.limit == 24 * 2**30 and plain.fits
    assert not replace(plain, limit=plain.peak - 1).fits and replace(plain, limit=plain.peak).fits
    assert replace(plain, limit=None).fits is None


@pytest.mark.slow
@pytest.mark.parametrize(("task", "words"), [("detection", ()), ("anomaly", ("tuning=frozen", "train.ema_decay=0.9"))])
def test_the_largest_micro_batch_fits_and_one_more_does_not(task: str, words: tuple):
    """Also where evaluation is what does not fit."""
    plain, settings, task = found(*words, task=task)
    tight = replace(plain, limit=int(2.7 * plain.peak))
    most = verdict.largest_micro_batch(settings, task, tight, 1)
    assert forecast(settings, task, WORST, 1, most).peak <= 1.02 * tight.limit
    assert forecast(settings, task, WORST, 1, most + 2).peak > tight.limit


def test_no_micro_batch_fits_where_the_optimizers_step_does_not():
    plain, settings, task = found()
    tight = replace(plain, limit=plain.peaks["optimizer step"] - 1)
    assert verdict.largest_micro_batch(settings, task, tight, 1) == 0


@pytest.mark.parametrize(
    ("words", "ranks", "stages"),
    [
        ((), 1, [0, 1, 2, 3]),
        (("precision=bf16", "zero=stage2"), 1, [1, 2, 3]),
        (("precision=fp16", "zero=stage0"), 2, [1, 2, 3]),
        (("zero=stage2", "offload=optimizer"), 1, [1, 2, 3]),
        (("zero=stage3", "offload=optimizer_and_params"), 1, [3]),
        (("tuning=lora", "activations=recompute"), 2, [0, 1, 2]),
    ],
)
def test_only_stages_that_run_as_such_are_advised(words: tuple, ranks: int, stages: list[int]):
    settings = composed("task=detection", "hardware=rtx3090_single", "zero=stage0", "offload=none", *words)
    assert verdict.stages_allowed(settings) == stages
    said = verdict.zero_verdict(settings, Sizes(10**9, 10**9, 10**6), ranks)
    assert int(said[len("ZeRO-")]) in stages


def test_half_weights_are_not_advised_stage_0():
    """Where they would run as ZeRO-1, which holds as much as ZeRO-2 on one rank."""
    settings = composed("hardware=rtx3090_single", "offload=none", "precision=bf16", "zero=stage2")
    assert "ZeRO-2 is as good as any" in verdict.zero_verdict(settings, Sizes(10**8, 10**8, 10**6), 1)


def test_words_name_the_dominant_term_and_the_verdict():
    plain, settings, task = found()
    said = " ".join(verdict.words(settings, task, plain, 1))
    assert "reached in forward and backward" in verdict.table(plain).note
    assert "activations dominate" in said and "It fits 24.00 GiB" in said and "ZeRO-0 is as good as any" in said
    assert verdict.outside_words(settings, plain, 1) in said
    said = " ".join(verdict.words(settings, task, replace(plain, limit=plain.peak // 2), 1))
    assert "does NOT fit" in said
    assert "Not even one image fits" in " ".join(verdict.words(settings, task, replace(plain, limit=2**20), 1))


def test_what_is_taken_besides_may_be_too_much_for_the_card():
    plain, settings, task = found()
    for spare, ranks, warned in ((1.6, 1, True), (1.8, 1, False), (1.8, 2, True), (2.2, 2, False), (-0.1, 1, False)):
        tight = replace(plain, peak=int((24 - spare) * 2**30))
        assert ("a card of 24 GiB may not hold it" in verdict.outside_words(settings, tight, ranks)) == warned


def test_a_copy_of_the_checkpoint_is_counted_for_each_rank():
    sizes = Sizes(total=1000, moving=600, largest=10)
    assert copied_bytes(sizes, 2, ranks=1, averaging=False) == 12 * 600 + 2 * 400
    assert copied_bytes(sizes, 4, ranks=2, averaging=True) == (16 * 600 + 4 * 400) // 2
