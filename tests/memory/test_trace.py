"""What the trace counts, against what can be counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gdino_lab.memory import trace
from gdino_lab.memory.trace import trace_evaluation, trace_step

ROWS, WIDTH = 1024, 256
UNIT = 4 * ROWS * WIDTH  # bytes of one fp32 activation


class Layers(nn.Module):
    def __init__(self, recompute: bool = False, dropout: float = 0.0):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recompute, self.dropout = recompute, dropout

    def body(self, x):
        return F.dropout(self.second(F.gelu(self.norm(self.first(x)))), self.dropout, self.training)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def traced(module=Layers, weights=torch.float32, autocast=None, keep=True, training=True):
    def batch():
        return {"inputs": {"x": torch.zeros(ROWS, WIDTH, dtype=weights, requires_grad=False)}}

    if not training:
        return trace_evaluation(module, batch, weights, autocast)
    return trace_step(module, batch, weights, autocast, lambda out, _: out.float().sum(), keep)


def test_forward_keeps_what_autograd_needs():
    """norm's input, gelu's input and second's input; the layer's output is let go of once it is summed."""
    small = 2 * 4 * ROWS  # mean and deviation of each row
    found = traced()
    assert found.after_forward == pytest.approx(3 * UNIT + small + 512, abs=2048)
    weights = 4 * (2 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH)
    assert found.gradients == pytest.approx(weights, abs=6 * 512)


def test_half_weights_halve_it():
    assert traced(weights=torch.bfloat16).after_forward == pytest.approx(traced().after_forward / 2, rel=0.02)


def test_autocast_lowers_products_and_raises_the_norm():
    """bf16: first's input and second's; the norm's output, which gelu keeps, stays fp32. Of the weights' copies second's
    stays, first's is not needed for an input without gradient."""
    found = traced(autocast=torch.bfloat16)
    copies = 2 * WIDTH * WIDTH
    first_input, norm_input, gelu_input, second_input = UNIT / 2, UNIT, UNIT, UNIT / 2
    assert found.after_forward == pytest.approx(first_input + norm_input + gelu_input + second_input + copies, rel=0.03)


def test_dropout_keeps_a_byte_an_element():
    """A GPU's fused dropout keeps a mask of bytes, the CPU's own a mask of floats."""
    more = traced(lambda: Layers(dropout=0.5)).after_forward - traced().after_forward
    assert more == pytest.approx(UNIT / 4, abs=2048)


def test_recompute_keeps_nothing_and_works_in_backward():
    kept, again = traced(), traced(lambda: Layers(recompute=True))
    assert again.after_forward < 0.01 * kept.after_forward
    assert again.peak > 3 * UNIT and again.gradients == kept.gradients


def test_gradients_that_leave_are_not_counted():
    """With offload each gradient goes as soon as it is there."""
    kept, gone = traced(), traced(keep=False)
    assert gone.gradients == 0 and gone.after_forward == kept.after_forward and gone.peak <= kept.peak


def test_the_peak_is_reached_in_backward_where_most_is_live():
    found = traced()
    assert found.after_forward < found.peak < found.after_forward + 4 * UNIT
    assert "aten." in found.peak_at


def test_a_trace_twice_is_the_same_and_leaves_no_seed_behind():
    state = torch.get_rng_state()
    assert traced() == traced()
    assert torch.equal(state, torch.get_rng_state())


class Sharing(nn.Module):
    """Calls whose results share their arguments' memory, with and without saying so."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("wide", torch.ones(WIDTH, 16 * WIDTH))

    def forward(self, x):
        for _ in range(2):
            x = self.layer(x.view(2, -1, WIDTH).transpose(0, 1)).transpose(0, 1)
            x = x + (x @ self.wide).mean(2, keepdim=True)  # the most at once; a product's last view does not say that it is one
            x = x.reshape(-1, WIDTH).add_(1)
            x = x + x.expand(2, *x.shape).sum(0)
        left, right = x.split(WIDTH // 2, dim=1)
        return torch.cat([right, left], 1).topk(WIDTH // 4).values


@pytest.mark.parametrize("module", [Sharing, lambda: Layers(recompute=True, dropout=0.5)])
@pytest.mark.parametrize("how", [{}, {"autocast": torch.bfloat16}, {"weights": torch.float16}, {"training": False}], ids=str)
def test_results_looked_up_count_as_those_computed(module, how: dict, monkeypatch: pytest.MonkeyPatch):
    trace.RESULTS.clear()
    first, again = traced(module, **how), traced(module, **how)
    monkeypatch.setattr(trace, "_result", lambda func, args, kwargs: func(*args, **kwargs))
    assert first == again == traced(module, **how)


def test_equal_numbers_of_other_types_are_told_apart():
    places = torch.zeros(3, dtype=torch.uint8, device="meta")
    for number in (1, 1.0, True):
        for _ in range(2):
            assert trace._result(torch.ops.aten.mul.Tensor, (places, number), {}).dtype == (places * number).dtype


@pytest.mark.parametrize("recompute", [False, True])
def test_an_evaluation_holds_a_layer_at_a_time(recompute: bool):
    """At most gelu's input and output at once, with second's input let go of when its output is there; no dropout."""
    found = traced(lambda: Layers(recompute, dropout=0.5), training=False)
    assert found.peak == pytest.approx(2 * UNIT, rel=0.02) and found.after_forward == UNIT and found.gradients == 0


def test_an_evaluation_is_autocast_too():
    """first's bf16 output, and the norm's input and output in fp32; the weights' copies stay until forward is over."""
    found = traced(autocast=torch.bfloat16, training=False)
    copy = 2 * WIDTH * WIDTH
    assert found.peak == pytest.approx((0.5 + 1 + 1) * UNIT + copy, rel=0.03)
    assert found.after_forward == pytest.approx(0.5 * UNIT + 2 * copy, abs=4096)
