"""Activation recompute for Grounding DINO, which transformers does not offer for this model."""

from __future__ import annotations

from functools import partial

from torch import nn
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


def recompute_activations(detector: nn.Module) -> int:
    """Let every layer of LAYERS compute its forward again in backward; returns how many do.

    The generator's state is kept, so dropout and drop-path repeat themselves and gradients are the same.
    Parameter names stay, so checkpoints are interchangeable with those of a model without recompute.
    """
    layers = [module for module in detector.modules() if type(module).__name__ in LAYERS]
    for layer in layers:
        # No check of shapes: ZeRO-3 may have let go of a parameter at one of the two times it is looked at.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, determinism_check="none")
    return len(layers)
