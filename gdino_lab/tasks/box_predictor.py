"""Boxes on new images: asked for by class name, one class a box."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from gdino_lab.data.images import pad_batch, resize, to_tensor
from gdino_lab.losses.boxes import corners
from gdino_lab.metrics.mean_ap import Detections
from gdino_lab.models.box_detector import class_scores
from gdino_lab.models.prompts import Prompt, Vocabulary, padded
from gdino_lab.tasks.protocol import Batch, Outputs


class BoxPredictor:
    """See Predictor in gdino_lab/tasks/protocol.py.

    Args:
        shortest, longest: sides in pixels that the model sees.
        class_score: "mean" or "max" over the tokens of a class.
        most: boxes an image, the best by score.
    """

    def __init__(
        self, vocabulary: Vocabulary, pad_id: int, shortest: int, longest: int, class_score: str, most: int
    ):
        self.vocabulary, self.pad_id = vocabulary, pad_id
        self.shortest, self.longest = shortest, longest
        self.class_score, self.most = class_score, most

    def batch(self, image: Image.Image) -> Batch:
        """The image once for each prompt that the classes need."""
        prompts = [self.vocabulary.prompt(chunk) for chunk in self.vocabulary.chunks()]
        pixel_values, pixel_mask = pad_batch([to_tensor(resize(image, self.shortest, self.longest))] * len(prompts))
        text = padded(prompts, self.pad_id)
        return {
            "inputs": {"pixel_values": pixel_values, "pixel_mask": pixel_mask, **text},
            "class_tokens": class_tokens(prompts, text["input_ids"].shape[1]),
            "identity": [(index, prompt.classes, (image.height, image.width)) for index, prompt in enumerate(prompts)],
        }

    def prediction(self, outputs: Outputs, batch: Batch) -> Detections:
        return merge(found_boxes(outputs, batch, self.class_score, self.most), self.most)

    def facts(self, prediction: Detections) -> dict[str, Any]:
        """Boxes are [x0, y0, x1, y1] in pixels, the best first."""
        return {
            "boxes": [
                {"class": self.vocabulary.names[index], "score": round(float(score), 6), "box": np.round(box, 3).tolist()}
                for box, score, index in zip(prediction.boxes, prediction.scores, prediction.classes, strict=True)
            ]
        }

    def overlay(self, image: Image.Image, prediction: Detections, threshold: float) -> Image.Image:
        """The boxes that score `threshold` or more, in one colour a class."""
        drawn = image.copy()
        pen, width = ImageDraw.Draw(drawn), max(1, round(min(image.size) / 250))
        font = ImageFont.load_default(max(9, round(min(image.size) / 40)))
        for box, score, index in zip(prediction.boxes, prediction.scores, prediction.classes, strict=True):
            if score < threshold:
                continue
            colour = colour_of(int(index), len(self.vocabulary.names))
            pen.rectangle(box.tolist(), outline=colour, width=width)
            label = f"{self.vocabulary.names[index]} {score:.2f}"
            left, top, right, bottom = pen.textbbox((0, 0), label, font)
            corner = (float(box[0]), max(0.0, float(box[1]) - bottom - width))
            pen.rectangle((*corner, corner[0] + right, corner[1] + bottom), fill=colour)
            pen.text(corner, label, "white", font)
        return drawn


def class_tokens(prompts: Sequence[Prompt], length: int) -> torch.Tensor:
    """(B, C, length) bool: the tokens of each class that a prompt asks for, C of the prompt that asks for most."""
    rows = torch.zeros(len(prompts), max(len(prompt.classes) for prompt in prompts), length, dtype=torch.bool)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt.classes)] = prompt.tokens_of(prompt.classes, length)
    return rows


def found_boxes(outputs: Outputs, batch: Batch, class_score: str, most: int) -> list[dict[str, Any]]:
    """The best boxes of every sample, in pixels of its image on disk: boxes (N, 4) xyxy, scores (N,), classes (N,)."""
    scores, classes = class_scores(outputs["logits"][-1], batch["class_tokens"], class_score)
    scores, order = scores.topk(min(most, scores.shape[1]))
    boxes = corners(outputs["boxes"][-1]).gather(1, order[..., None].expand(-1, -1, 4))
    found = [each.cpu().numpy() for each in (boxes, scores, classes.gather(1, order))]
    return [
        {
            "index": index,
            "boxes": boxes.clip(0, 1) * np.array([width, height, width, height], np.float32),
            "scores": scores,
            "classes": np.array(prompted)[classes],
        }
        for (index, prompted, (height, width)), boxes, scores, classes in zip(batch["identity"], *found, strict=True)
    ]


def merge(passes: Sequence[Mapping[str, np.ndarray]], most: int) -> Detections:
    """One image's detections of several prompts, the best by score."""
    boxes, scores, classes = (np.concatenate([each[key] for each in passes]) for key in ("boxes", "scores", "classes"))
    order = np.argsort(-scores, kind="stable")[:most]
    return Detections(boxes[order], scores[order], classes[order])


def colour_of(index: int, count: int) -> tuple[int, int, int]:
    """Colours as far apart as there are classes."""
    return tuple(round(255 * channel) for channel in colorsys.hsv_to_rgb(index / max(1, count), 0.85, 0.75))
