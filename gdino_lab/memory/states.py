"""What weights, gradients and optimizer states take under DeepSpeed 0.19, by formula.

Each formula was checked against the allocator on an H200 (docs/memory.md). P: parameters, P_t those that move, L the
largest, N ranks; b bytes of a weight, g of its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

MASTER, MOMENTS = 4, 8  # bytes a parameter: the fp32 copy, and Adam's two moments
AT_ONCE = 500_000_000  # gradients that stage 0 copies into one flat tensor to reduce them, on one rank too


@dataclass(frozen=True)
class Sizes:
    """total, moving and largest: parameters in all, that move, of the largest tensor that moves."""

    total: int
    moving: int
    largest: int


@dataclass(frozen=True)
class States:
    """Bytes of one rank, by term.

    device: there from step to step.  gradients: on the device while backward runs, beyond what the trace counts.
    traced_gradients: whether backward leaves each gradient where autograd puts it.  step: more, while the optimizer
    steps.  host: in the machine's memory.
    """

    device: dict[str, int]
    gradients: dict[str, int]
    traced_gradients: bool
    step: int
    host: dict[str, int]


def states(
    sizes: Sizes, weight_bytes: int, stage: int, ranks: int, offload_optimizer: bool, offload_parameters: bool, bucket: int
) -> States:
    """
    Args:
        weight_bytes: of one weight, 4 or 2; gradients have the weights' dtype.
        stage: DeepSpeed's ZeRO stage.
        ranks: over which stages 1 to 3 share.
        bucket: elements of a reduction bucket.
    """
    half = weight_bytes < 4
    moving, share = sizes.moving, -(-sizes.moving // ranks)
    weights = weight_bytes * sizes.total
    if stage == 0:
        flat = weight_bytes * min(moving, AT_ONCE)
        return States({"weights": weights, "optimizer": MOMENTS * moving}, {}, True, flat, {})
    optimizer = {"fp32 copies": MASTER * share, "optimizer": MOMENTS * share}
    buckets = {"buckets": weight_bytes * bucket}
    step = max(2 * weight_bytes + (4 if half else 0), 4) * share
    if stage < 3:
        device = {"weights": weights}
        if offload_optimizer:
            host = optimizer | {"gradients": (4 + weight_bytes) * share}
            return States(device | {"offload staging": weight_bytes * sizes.largest}, buckets, False, 0, host)
        if stage == 1:
            return States(device | optimizer, buckets, True, step - weight_bytes * share, {})
        partition = {"gradients": weight_bytes * share}
        return States(device | optimizer, partition | buckets, False, step, {})
    gathered = {"gathered weights": 0 if ranks == 1 else min(weight_bytes * sizes.total, 10 * weight_bytes * bucket)}
    weights = -(-weights // ranks)
    device, host = buckets, {}
    (host if offload_parameters else device)["weights"] = weights
    if offload_optimizer:
        host |= optimizer | {"gradients": weight_bytes * share}
        return States(device, gathered, False, 0, host)
    device = device | optimizer | {"gradients": weight_bytes * share}
    return States(device, gathered, False, 4 * share, host)
