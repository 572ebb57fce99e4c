"""What a restored model must answer and score."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gdino_lab.proof import FULL, HALF, TF32, differing_answers, differing_score, digest_of, tolerance_of

PLAIN = {"weights": "fp32", "autocast": None, "tf32": False}


def test_a_digest_ignores_order_and_what_is_no_answer():
    logits = torch.tensor([[1.0, -2.0, -math.inf], [0.5, 3.0, -math.inf]])
    found = digest_of({"logits": logits, "ids": torch.arange(3), "nothing": None})
    assert found == digest_of({"logits": logits.flip(0)})
    assert found["logits"] == pytest.approx([0.625, 1.625, math.sqrt((1 + 4 + 0.25 + 9) / 4)])


@given(st.floats(1e-6, 0.5), st.sampled_from([FULL, TF32, HALF]))
def test_answers_may_differ_by_the_tolerance_and_no_more(off: float, tolerance: float):
    then = {"a": [0.0, 2.0, 2.0], "b": [1.0, 1.0, 1.0]}
    now = {"a": [0.0, 2.0 * (1 + off), 2.0], "b": [1.0, 1.0, 1.0]}
    complaints = differing_answers(then, now, tolerance)
    if abs(off / tolerance - 1) > 1e-6:
        assert bool(complaints) == (off > tolerance)
    if complaints:
        assert "output a" in complaints[0] and "2 in the checkpoint" in complaints[0]


@pytest.mark.parametrize("broken", [{"a": [math.nan] * 3}, {}])
def test_no_number_is_no_proof(broken: dict):
    assert differing_answers({"a": [1.0, 1.0, 1.0]}, broken, HALF)


@pytest.mark.parametrize(("now", "fine"), [(65.53, True), (65.0, True), (48.79, False), (None, False), (math.nan, False)])
def test_a_score_far_from_the_checkpoints_is_told_with_both_numbers(now, fine: bool):
    complaints = differing_score(65.53, now, 0.01)
    assert bool(complaints) != fine
    if not fine:
        assert "65.53" in complaints[0] and str(now) in complaints[0]


def test_the_coarser_precision_decides():
    half, tf32 = PLAIN | {"autocast": "bf16"}, PLAIN | {"tf32": True}
    assert tolerance_of(PLAIN, PLAIN) == FULL
    assert tolerance_of(tf32, PLAIN) == TF32
    assert tolerance_of(PLAIN, half) == tolerance_of(tf32, half) == HALF
