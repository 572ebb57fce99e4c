"""The forecast moves as memory does, and its verdict agrees with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdino_lab.commands.main import composed
from gdino_lab.memory import verdict
from gdino_lab.memory.forecast import TRACES, copied_bytes, forecast
from gdino_lab.memory.states import Sizes
from gdino_lab.settings import instantiate
from gdino_lab.tasks.protocol import Worst

WORST = Worst(128, 192, tokens=16, boxes=6)


def found(*words: str, images: int = 4, task: str = "detection"):
    settings = composed(f"task={task}", "hardware=rtx3090_single", "zero=stage0", "offload=none", *words)
    made = instantiate(settings.task, seed=0)
    return forecast(settings, made, WORST, 1, images), settings, made


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
def test_a_step_is_traced_once_and_told_from_every_other():
    same = [(), ("zero=stage1",), ("bucket=5mb",), ("train.seed=7",), ("hardware.memory_limit_gib=8",), ("precision=tf32",)]
    others = [
        ("precision=bf16",), ("precision=bf16_autocast",), ("activations=recompute",), ("tuning=lora",), ("zero=stage2",),
        ("model.config.dropout=0.3",),
    ]  # fmt: skip
    TRACES.clear()
    assert [len(TRACES) for words in same if found(*words)] == [1] * len(same)
    together = [found(*words)[0] for words in others]
    assert len(TRACES) == 1 + len(others)
    for words, kept in zip(others, together, strict=True):
        TRACES.clear()
        assert found(*words)[0] == kept


def test_the_limit_decides():
    plain, settings, task = found()
    assert plain.limit == 24 * 2**30 and plain.fits
    assert not replace(plain, limit=plain.peak - 1).fits and replace(plain, limit=plain.peak).fits
    assert replace(plain, limit=None).fits is None


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_does_not():
    plain, settings, task = found()
    tight = replace(plain, limit=int(2.7 * plain.peak))
    most = verdict.largest_micro_batch(settings, task, tight, 1)
    assert forecast(settings, task, WORST, 1, most).peak <= 1.02 * tight.limit
    assert forecast(settings, task, WORST, 1, most + 2).peak > tight.limit


def test_words_name_the_dominant_term_and_the_verdict():
    plain, settings, task = found()
    said = " ".join(verdict.words(settings, task, plain, 1))
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
