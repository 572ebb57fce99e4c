"""Full fine-tuning of Grounding DINO on the GPU you have."""

__version__ = "0.1.0"
