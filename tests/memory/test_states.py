"""Bytes a parameter of every way to hold states, as they were read off the allocator."""

from __future__ import annotations

import pytest

from gdino_lab.memory.states import AT_ONCE, Sizes, states

P, L, BUCKET = 1_000_000, 100_000, 1000
SIZES = Sizes(P, P, L)


def device(
    stage, weight_bytes=4, ranks=1, optimizer=False, parameters=False, sizes=SIZES, averaging=False, accumulating=False
):
    return states(sizes, weight_bytes, stage, ranks, optimizer, parameters, BUCKET, averaging, accumulating)


@pytest.mark.parametrize(
    ("stage", "weight_bytes", "ranks", "bytes_a_parameter"),
    [
        (0, 4, 1, 12), (0, 4, 2, 12),
        (1, 4, 1, 16), (2, 4, 1, 16), (1, 2, 1, 14), (2, 2, 1, 14),
        (2, 4, 2, 10), (2, 2, 4, 5),
        (3, 4, 1, 20), (3, 2, 1, 16), (3, 4, 2, 10), (3, 2, 4, 4),
    ],
)  # fmt: skip
def test_resident_bytes_a_parameter(stage, weight_bytes, ranks, bytes_a_parameter):
    held = device(stage, weight_bytes, ranks).device
    assert sum(held.values()) - held.get("buckets", 0) == bytes_a_parameter * P


@pytest.mark.parametrize("weight_bytes", [2, 4])
def test_optimizer_offload_leaves_weights_and_a_staging_buffer(weight_bytes):
    held = device(2, weight_bytes, optimizer=True)
    assert held.device == {"weights": weight_bytes * P, "offload staging": weight_bytes * L}
    assert not held.traced_gradients and "gradients" not in held.gradients
    assert sum(held.host.values()) == (16 + weight_bytes) * P


def test_parameter_offload_moves_the_weights():
    held = device(3, 4, 2, optimizer=True, parameters=True)
    assert "weights" not in held.device and held.host["weights"] == 4 * P // 2


def test_gradients_stay_where_the_stage_leaves_them():
    assert device(0).traced_gradients and device(1).traced_gradients and not device(2).traced_gradients
    assert device(2, 4, 2).gradients["gradients"] == 4 * P // 2
    assert "gradients" in device(3).device


def test_frozen_parameters_have_weights_only():
    held = device(0, sizes=Sizes(P, P // 100, L)).device
    assert held == {"weights": 4 * P, "optimizer": 8 * P // 100}


@pytest.mark.parametrize("ranks", [1, 2])
def test_stage_0_reduces_in_a_flat_copy_of_the_gradients(ranks: int):
    assert device(0, ranks=ranks).step == 4 * P  # 20 bytes a parameter with weights, moments and gradients
    assert device(0, ranks=ranks, sizes=Sizes(10**9, 10**9, L)).step == 4 * AT_ONCE


@pytest.mark.parametrize(
    ("stage", "weight_bytes", "ranks", "optimizer", "share"),
    [(0, 4, 2, False, 1), (1, 2, 2, False, 1), (2, 4, 2, True, 1), (3, 4, 1, False, 1), (3, 2, 2, True, 2)],
)
def test_an_average_is_fp32_and_lies_where_the_weights_do(stage, weight_bytes, ranks, optimizer, share):
    """gdino_lab/models/average.py; while it is evaluated the weights are set aside beside it."""
    moving = Sizes(P, P // 2, L)
    plain, averaged = (device(stage, weight_bytes, ranks, optimizer, False, moving, averaging) for averaging in (False, True))
    assert averaged.device == plain.device | {"weight average": 4 * P // 2 // share} and averaged.host == plain.host
    assert averaged.evaluation == plain.evaluation | {"weights set aside": weight_bytes * P // 2 // share}


def test_an_average_of_offloaded_weights_is_on_the_host():
    held = device(3, 2, 2, True, True, averaging=True)
    assert held.host["weight average"] == 4 * P // 2
    assert "weight average" not in held.device and "weights set aside" not in held.evaluation


def test_weights_are_gathered_in_evaluation_too_and_gradients_are_not_there():
    assert device(3, 4, 2).evaluation == {"gathered weights": 10 * 4 * BUCKET}
    assert device(2, 4, 2).evaluation == {} and device(0, accumulating=True).evaluation == {}


def test_gradients_of_earlier_passes_stay_below_stage_2():
    for stage, optimizer in ((0, False), (1, False), (1, True)):
        held = device(stage, 2, optimizer=optimizer, accumulating=True)
        assert held.gradients["gradients"] == 2 * P and not held.traced_gradients
    assert device(2, accumulating=True) == device(2) and device(3, accumulating=True) == device(3)
