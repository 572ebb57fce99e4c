"""How anomalous new images of one category are, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from transformers import PreTrainedConfig

from gdino_lab.data.images import pad_batch, resize, to_tensor
from gdino_lab.metrics.calibration import Calibration
from gdino_lab.models.anomaly_detector import heatmap, level_sizes
from gdino_lab.models.prompts import Prompt, padded
from gdino_lab.tasks.protocol import Batch, Outputs


@dataclass(frozen=True)
class Anomaly:
    """score: in standard deviations of normal images; map: (H, W) fp32 in [0, 1] at the size that the model sees."""

    score: float
    map: np.ndarray


class AnomalyPredictor:
    """See Predictor in gdino_lab/tasks/protocol.py.

    Args:
        columns: turns a model's outputs into raw score columns, (1,) or (1, d) each.
        config: the detector's.
        shortest, longest: sides in pixels that the model sees.
    """

    def __init__(
        self,
        calibration: Calibration,
        columns: Callable[[Outputs], dict[str, np.ndarray]],
        config: PreTrainedConfig,
        prompt: Prompt,
        pad_id: int,
        shortest: int,
        longest: int,
    ):
        self.calibration, self.columns, self.config = calibration, columns, config
        self.prompt, self.pad_id = prompt, pad_id
        self.shortest, self.longest = shortest, longest

    def batch(self, image: Image.Image) -> Batch:
        pixel_values, pixel_mask = pad_batch([to_tensor(resize(image, self.shortest, self.longest))])
        text = padded([self.prompt], self.pad_id)
        return {"inputs": {"pixel_values": pixel_values, "pixel_mask": pixel_mask, **text}}

    def prediction(self, outputs: Outputs, batch: Batch) -> Anomaly:
        height, width = batch["inputs"]["pixel_values"].shape[-2:]
        score = self.calibration.scores(self.columns(outputs))["score"]
        where = heatmap(outputs["local_logits"], level_sizes(self.config, height, width), height, width)
        return Anomaly(float(score[0]), where[0].cpu().numpy())

    def facts(self, prediction: Anomaly) -> dict[str, Any]:
        """anomalous: the score is above that of every normal image held out in training."""
        return {"score": round(prediction.score, 6), "anomalous": prediction.score > self.calibration.highest}

    def overlay(self, image: Image.Image, prediction: Anomaly, threshold: float) -> Image.Image:
        """The map in red over the image, the score in a corner."""
        heat = Image.fromarray((255 * prediction.map).astype(np.uint8)).resize(image.size, Image.Resampling.BILINEAR)
        drawn = Image.composite(Image.new("RGB", image.size, (230, 20, 20)), image, heat.point(lambda value: value * 0.7))
        verdict = "anomalous" if self.facts(prediction)["anomalous"] else "normal"
        font = ImageFont.load_default(max(9, round(min(image.size) / 30)))
        said = f"{prediction.score:.2f} {verdict}"
        ImageDraw.Draw(drawn).text((4, 4), said, "white", font, stroke_width=1, stroke_fill="black")
        return drawn
