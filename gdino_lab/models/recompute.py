"""Activation recompute for Grounding DINO, which transformers does not offer for this model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# The layers that hold nearly all activations: backbone, text tower, encoder, decoder.
LAYERS = (
    "SwinLayer",
    "BertLayer",
    "GroundingDinoEncoderLayer",
    "GroundingDinoDecoderLayer",
    "MMGroundingDinoEncoderLayer",
    "MMGroundingDinoDecoderLayer",
)
# What needs most memory while one layer is computed again: deformable attention samples every point of every head. Heads
# do not mix in it, so some at a time give the same numbers to the last bit.
ATTENTION = "MultiScaleDeformableAttention"
HEADS_AT_ONCE = 4


def recompute_activations(detector: nn.Module) -> int:
    """Let every layer of LAYERS compute its forward again in backward; returns how many do.

    The generator's state is kept, so dropout and drop-path repeat themselves and gradients are the same.
    Parameter names stay, so checkpoints are interchangeable with those of a model without recompute.
    """
    layers = [module for module in detector.modules() if type(module).__name__ in LAYERS]
    for layer in layers:
        layer.forward = again(layer.forward)
    for module in detector.modules():
        if type(module).__name__.endswith(ATTENTION):
            module.forward = partial(some_heads_at_once, again(module.forward))
    return len(layers)


def again(forward: Callable) -> Callable:
    """`forward`, keeping nothing and computed again in backward."""
    # No check of shapes: ZeRO-3 may have let go of a parameter at one of the two times it is looked at.
    return partial(checkpoint, forward, use_reentrant=False, determinism_check="none")


def some_heads_at_once(
    attention: Callable,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: list[tuple],
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """transformers' MultiScaleDeformableAttention over groups of heads.

    Args:
        value: (B, S, heads, d); sampling_locations: (B, Q, heads, levels, points, 2); attention_weights: (B, Q, heads,
            levels, points).

    Returns:
        (B, Q, heads * d).
    """
    groups: list[Any] = [
        each.split(HEADS_AT_ONCE, 2) for each in (value, sampling_locations, attention_weights)
    ]
    outputs = [
        attention(
            part, value_spatial_shapes, value_spatial_shapes_list, level_start_index, places, weights, im2col_step
        )
        for part, places, weights in zip(*groups, strict=True)
    ]
    return torch.cat(outputs, -1)
