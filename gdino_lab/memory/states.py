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
    steps.  host: in the machine's memory.  evaluation: more, while the model is evaluated; gradients and buckets are
    gone then.
    """

    device: dict[str, int]
    gradients: dict[str, int]
    traced_gradients: bool
    step: int
    host: dict[str, int]
    evaluation: dict[str, int]


def states(
    sizes: Sizes, weight_bytes: int, stage: int, ranks: int, offload_optimizer: bool, offload_parameters: bool, bucket: int,
    averaging: bool, accumulating: bool,
) -> States:  # fmt: skip
    """
    Args:
        weight_bytes: of one weight, 4 or 2; gradients have the weights' dtype.
        stage: DeepSpeed's ZeRO stage.
        ranks: over which stages 1 to 3 share.
        bucket: elements of a reduction bucket.
        averaging: whether a moving average of the weights is kept, where each weight lies.
        accumulating: whether an optimizer step takes several passes.
    """
    half = weight_bytes < 4
    moving, share = sizes.moving, -(-sizes.moving // ranks)
    weights = weight_bytes * sizes.total
    own = share if stage == 3 else moving
    average = {"weight average": MASTER * own} if averaging else {}
    # The weights step aside for their average.
    evaluation = {"weights set aside": weight_bytes * own} if averaging and not offload_parameters else {}
    # Stages 0 and 1 reduce in the last pass only; until then the gradients of those before stay whole.
    earlier = {"gradients": weight_bytes * moving} if accumulating and stage < 2 else {}
    if stage == 0:
        flat = weight_bytes * min(moving, AT_ONCE)
        device = {"weights": weights, "optimizer": MOMENTS * moving} | average
        return States(device, earlier, not earlier, flat, {}, evaluation)
    optimizer = {"fp32 copies": MASTER * share, "optimizer": MOMENTS * share}
    buckets = {"buckets": weight_bytes * bucket}
    step = max(2 * weight_bytes + (4 if half else 0), 4) * share
    if stage < 3:
        device = {"weights": weights} | average
        if offload_optimizer:
            device |= {"offload staging": weight_bytes * sizes.largest}
            host = optimizer | {"gradients": (4 + weight_bytes) * share}
            return States(device, earlier | buckets, False, 0, host, evaluation)
        if stage == 1:
            return States(device | optimizer, earlier | buckets, not earlier, step - weight_bytes * share, {}, evaluation)
        partition = {"gradients": weight_bytes * share}
        return States(device | optimizer, partition | buckets, False, step, {}, evaluation)
    gathered = {"gathered weights": 0 if ranks == 1 else min(weight_bytes * sizes.total, 10 * weight_bytes * bucket)}
    evaluation |= gathered
    device, host = buckets, {}
    (host if offload_parameters else device).update({"weights": -(-weights // ranks)} | average)
    if offload_optimizer:
        host |= optimizer | {"gradients": weight_bytes * share}
        return States(device, gathered, False, 0, host, evaluation)
    device = device | optimizer | {"gradients": weight_bytes * share}
    return States(device, gathered, False, 4 * share, host, evaluation)
