"""Finding one's own classes: trained and scored on boxes (COCO or ODVG), COCO mAP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GroundingDinoProcessor, PreTrainedModel

from gdino_lab.data.annotations import AnnotatedImage
from gdino_lab.data.detection import AnnotatedSet, DetectionData, read_set
from gdino_lab.data.images import pad_batch, read_rgb, to_tensor, worst_size
from gdino_lab.data.transforms import Augment, mentions_a_side, resize
from gdino_lab.errors import ConfigurationError, nearest
from gdino_lab.losses.boxes import centred
from gdino_lab.losses.detection import TERMS, Targets, Weights, detection_losses, least_cost
from gdino_lab.metrics.mean_ap import Truth, mean_ap
from gdino_lab.models.box_detector import BoxDetector
from gdino_lab.models.export import Knowledge
from gdino_lab.models.prompts import MAX_TOKENS, Prompt, Vocabulary, caption_prompt, padded
from gdino_lab.tasks.box_predictor import BoxPredictor, class_tokens, found_boxes, merge
from gdino_lab.tasks.protocol import Batch, Evaluation, Outputs, Table, Worst, blank_inputs

TRAIN, VALIDATION, GUARD = "train", "val", "guard"
MOST_COMPLAINTS = 20
HEADLINES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "small", "ap_medium": "medium", "ap_large": "large"}


@dataclass(frozen=True)
class Sample:
    """pixels (3, H, W) fp32; boxes (N, 4) fp32 cxcywh fractions; classes (N,) indices into the prompt's classes; size,
    the (height, width) of the image as it lies on disk, for which predictions are made."""

    index: int
    pixels: Tensor
    prompt: Prompt
    boxes: Tensor
    classes: tuple[int, ...]
    size: tuple[int, int]


class DetectionTask:
    """See gdino_lab/tasks/protocol.py for the methods.

    Args:
        loss_weights, match_weights: weights of the terms in the loss and of the costs in the matching.
        focal_alpha: balance of positives in the focal loss.
        augment: see gdino_lab/data/transforms.py.
        chunk_classes: where the class names do not fit into one prompt: train on an image's own classes and sampled
            others, and evaluate in several passes.
        class_score: "mean" or "max" over the tokens of a class.
        max_detections: most boxes an image, the best by score.
        guard, guard_images: a second COCO file, and the folder its file names are relative to (null: found beside it),
            on which AP is watched too: what the model forgets.
        seed: of the augmentation.

    Raises:
        ConfigurationError: weights or names that are unknown, numbers out of range.
    """

    selection_name = "COCO AP on the validation split"
    data_class, data_choices = DetectionData, "coco, odvg or synthetic_detection"

    def __init__(
        self,
        loss_weights: Mapping[str, float],
        match_weights: Mapping[str, float],
        focal_alpha: float,
        augment: Mapping[str, Any],
        chunk_classes: bool,
        class_score: str,
        max_detections: int,
        guard: str | None,
        guard_images: str | None,
        seed: int,
    ):
        complaints = _weight_complaints("task.loss_weights", loss_weights)
        complaints += _weight_complaints("task.match_weights", match_weights)
        if not 0 <= focal_alpha <= 1:
            complaints.append(f"task.focal_alpha={focal_alpha}: allowed is 0 to 1")
        if class_score not in ("mean", "max"):
            complaints.append(f"task.class_score={class_score}: allowed are mean, max")
        if max_detections < 1:
            complaints.append(f"task.max_detections={max_detections}: allowed is 1 or more")
        try:
            self.augment = Augment(**augment)
        except ConfigurationError as error:
            complaints += error.complaints
        except TypeError as error:
            complaints.append(f"task.augment: {error}")
        if complaints:
            raise ConfigurationError(complaints)
        self.weights = Weights(
            tuple(float(loss_weights[term]) for term in TERMS),
            tuple(float(match_weights[term]) for term in TERMS),
            focal_alpha,
        )
        self.chunk_classes = chunk_classes
        self.class_score = class_score
        self.max_detections = max_detections
        self.guard, self.guard_images = guard and Path(guard), guard_images and Path(guard_images)
        self.seed = seed
        self.assign = least_cost
        self.smallest_scale = self.augment.scales[0]

    # --- data ---

    @property
    def splits(self) -> tuple[str, ...]:
        return (VALIDATION, TRAIN, *([GUARD] if self.guard else []))

    def check(self, data: DetectionData, processor: GroundingDinoProcessor) -> list[str]:
        self.bind(data, processor)
        complaints = []
        # Where one prompt asks for all classes, `overflow` below says all there is to say.
        special = [image for image in data.images(TRAIN) if image.caption is not None or self.chunk_classes]
        for image in special:
            try:
                self.training_prompt(image, np.random.default_rng(0))
            except ValueError as error:
                complaints.append(f"{data.annotations[TRAIN]}: image {image.id}: {error}")
        if not self.chunk_classes:
            complaints += [
                f"{vocabulary.where}: the {len(vocabulary.names)} class names need more than the {MAX_TOKENS} tokens of a "
                f"prompt, they outgrow it at {name!r}; task.chunk_classes=true trains on some names at a time and "
                "evaluates in several passes"
                for vocabulary in self.vocabularies.values()
                if (name := vocabulary.overflow()) is not None
            ]
        if complaints:
            more = [f"... and {len(complaints) - MOST_COMPLAINTS} more"] if complaints[MOST_COMPLAINTS:] else []
            raise ConfigurationError(complaints[:MOST_COMPLAINTS] + more)
        guard_notices = self.guard_set.notices if self.guard_set else []
        return guard_notices + [notice for each in self.vocabularies.values() for notice in each.notices]

    def bind(self, data: DetectionData, processor: GroundingDinoProcessor) -> None:
        self.data, self.tokenizer = data, processor.tokenizer
        self.vocabularies = {VALIDATION: Vocabulary(data.names, self.tokenizer, "data")}
        self.guard_set: AnnotatedSet | None = None
        if self.guard:
            self.guard_set = read_set(self.guard, self.guard_images, data.strict)
            if any(image.caption is not None for image in self.guard_set.images) or not self.guard_set.names:
                raise ConfigurationError(f"task.guard={self.guard}: needs boxes of classes, mAP is not defined on captions")
            self.vocabularies[GUARD] = Vocabulary(self.guard_set.names, self.tokenizer, "task.guard")

    def training_prompt(self, image: AnnotatedImage, rng: np.random.Generator) -> Prompt:
        """What an image is asked for in training: its caption's phrases, all classes, or its own and sampled others.

        Raises:
            ValueError: it does not fit into a prompt.
        """
        if image.caption is not None:
            return caption_prompt(image.caption, image.phrases, self.tokenizer)
        vocabulary = self.vocabularies[VALIDATION]
        if not self.chunk_classes:
            return vocabulary.prompt()
        return vocabulary.prompt(vocabulary.sampled(np.unique(image.classes[~image.crowd]).tolist(), rng))

    def attach(self, detector: PreTrainedModel) -> nn.Module:
        return BoxDetector(detector)

    def train_set(self) -> Dataset:
        return TrainingImages(self)

    def evaluation_set(self, split: str | None = None) -> Dataset:
        watched = [VALIDATION, *([GUARD] if self.guard_set else [])]
        return EvaluationImages(self, watched if split is None else [split])

    def images(self, split: str) -> list[AnnotatedImage]:
        return self.guard_set.images if split == GUARD else self.data.images(split)

    def vocabulary(self, split: str) -> Vocabulary:
        return self.vocabularies[GUARD if split == GUARD else VALIDATION]

    def collate(self, samples: list[Sample]) -> Batch:
        pixel_values, pixel_mask = pad_batch([sample.pixels for sample in samples])
        text = padded([sample.prompt for sample in samples], self.tokenizer.pad_token_id)
        length = text["input_ids"].shape[1]
        most = max(len(sample.boxes) for sample in samples)
        boxes = torch.zeros(len(samples), most, 4)
        tokens = torch.zeros(len(samples), most, length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            boxes[row, : len(sample.boxes)] = sample.boxes
            tokens[row, : len(sample.boxes)] = sample.prompt.tokens_of(sample.classes, length)
        return {
            "inputs": {"pixel_values": pixel_values, "pixel_mask": pixel_mask, **text},
            "boxes": boxes,
            "tokens": tokens,
            "counts": tuple(len(sample.boxes) for sample in samples),
            "class_tokens": class_tokens([sample.prompt for sample in samples], length),
            "identity": [(sample.index, sample.prompt.classes, sample.size) for sample in samples],
        }

    def worst(self, images: int) -> Worst:
        known = self.data.images(TRAIN)
        sizes = {view for image in known for view in self.augment.views(image.height, image.width)}
        shortest = max(1, round(self.data.shortest * self.augment.scales[1]))
        height, width = worst_size(sizes, shortest, self.data.longest, images)
        elongation = [max(size) / min(size) for size in sizes]
        if self.augment.crop and min(elongation) <= self.data.longest / shortest <= max(elongation):
            # Some crop has just the form that fills both limits.
            height, width = max(height, shortest), max(width, self.data.longest)
        rng = np.random.default_rng(0)
        captioned = (image for image in known if image.caption is not None)
        lengths = [len(self.training_prompt(image, rng).input_ids) for image in captioned]
        chunks = self.vocabulary(TRAIN).chunks()
        lengths.append(max(len(self.vocabulary(TRAIN).prompt(chunk).input_ids) for chunk in chunks))
        if self.chunk_classes and len(chunks) > 1:
            lengths.append(MAX_TOKENS)
        return Worst(height, width, max(lengths), max(int((~image.crowd).sum()) for image in known))

    def blank_batch(self, images: int, worst: Worst) -> Batch:
        tokens = torch.zeros(images, worst.boxes, worst.tokens, dtype=torch.bool)
        tokens[..., 1] = True
        return {
            "inputs": blank_inputs(images, worst),
            "boxes": torch.full((images, worst.boxes, 4), 0.5),
            "tokens": tokens,
            "counts": (worst.boxes,) * images,
        }

    # --- loss ---

    def count(self, batch: Batch) -> int:
        return sum(batch["counts"])

    def losses(self, outputs: Outputs, batch: Batch, count: float) -> dict[str, Tensor]:
        targets = Targets(batch["boxes"], batch["tokens"], batch["counts"])
        return detection_losses(
            outputs["logits"], outputs["boxes"], outputs["text_mask"], targets, count, self.weights, self.assign
        )

    # --- scores ---

    def records(self, outputs: Outputs, batch: Batch) -> list[dict[str, Any]]:
        return found_boxes(outputs, batch, self.class_score, self.max_detections)

    def evaluate(self, records: list[dict[str, Any]], split: str | None = None) -> Evaluation:
        entries = self.evaluation_set(split).entries
        metrics: dict[str, float | None] = {}
        for part in dict.fromkeys(part for part, *_ in entries):
            merged: dict[int, list[dict]] = {}
            for record in records:
                owner, image, _ = entries[record["index"]]
                if owner == part:
                    merged.setdefault(image, []).append(record)
            images = self.images(part)
            found = mean_ap(
                [truth_of(images[image]) for image in merged],
                [merge(passes, self.max_detections) for passes in merged.values()],
                self.vocabulary(part).names,
                self.max_detections,
            )
            prefix = "guard/" if split is None and part == GUARD else ""
            metrics |= {prefix + name: value for name, value in found.items()}
        return Evaluation(metrics, metrics.get("ap"))

    def headlines(self, evaluation: Evaluation) -> list[str]:
        return [name for name in (*HEADLINES, "guard/ap") if name in evaluation.metrics]

    def epoch_line(self, evaluation: Evaluation) -> str:
        watched = {"val AP": "ap", "AP50": "ap50", "guard AP": "guard/ap"}
        return ", ".join(
            f"{title} {percent(evaluation.metrics[name])}" for title, name in watched.items() if name in evaluation.metrics
        )

    def knowledge(self) -> Knowledge:
        return Knowledge({"names": self.data.names})

    def predictor(self, knowledge: Knowledge, data: DetectionData, processor: GroundingDinoProcessor) -> BoxPredictor:
        vocabulary = Vocabulary(knowledge.facts["names"], processor.tokenizer)
        return BoxPredictor(
            vocabulary,
            processor.tokenizer.pad_token_id,
            data.shortest,
            data.longest,
            self.class_score,
            self.max_detections,
        )

    def baselines(self) -> dict[str, Evaluation]:
        return {}

    def tables(self, rows: dict[str, Evaluation], split: str | None = None) -> list[Table]:
        guarded = split is None and self.guard_set is not None
        columns = dict(HEADLINES) | ({"guard/ap": "guard AP"} if guarded else {})
        note = "AP: mean over IoU 0.50 to 0.95; small, medium, large: objects below 32², 96² pixels, and above."
        if split is None:
            note += "\nThe best checkpoint is chosen by AP on this same split: keep images apart to judge it by."
        summary = Table(
            f"COCO AP on the {split or VALIDATION} split, %",
            ["", *columns.values()],
            [[name, *(percent(row.metrics[key]) for key in columns)] for name, row in rows.items()],
            note,
        )
        parts = {"": split or VALIDATION} | ({"guard/": GUARD} if guarded else {})
        return [summary, *(self._by_class(rows, prefix, part) for prefix, part in parts.items())]

    def _by_class(self, rows: dict[str, Evaluation], prefix: str, split: str) -> Table:
        columns = [(key, name) for key in ("ap", "ap50") for name in rows]
        return Table(
            f"AP by class on the {split} split, %",
            ["", *(f"{name} {HEADLINES[key]}" for key, name in columns)],
            [
                [each, *(percent(rows[name].metrics[f"{prefix}{key}/{each}"]) for key, name in columns)]
                for each in self.vocabulary(split).names
            ],
        )


class TrainingImages(Dataset):
    """Augmented training images, a pure function of (seed, epoch, index)."""

    def __init__(self, task: DetectionTask):
        self.task, self.images = task, task.images(TRAIN)
        self.sided_names = any(mentions_a_side(name) for name in task.vocabulary(TRAIN).names)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        epoch, index = place
        task, image = self.task, self.images[index]
        rng = np.random.default_rng([task.seed, epoch, index])
        # A mirror image would make such a text wrong.
        sided = self.sided_names if image.caption is None else mentions_a_side(image.caption)
        pixels, boxes, kept = task.augment(
            read_rgb(image.path), image.boxes, not sided, task.data.shortest, task.data.longest, rng
        )
        kept &= ~image.crowd  # a crowd is many objects under one box: nothing to learn to put a box around
        prompt = task.training_prompt(image, rng)
        return _sample(index, pixels, prompt, boxes[kept], image.classes[kept], image)


class EvaluationImages(Dataset):
    """Every image of some splits, once for each prompt that its classes need."""

    def __init__(self, task: DetectionTask, splits: Sequence[str]):
        self.task = task
        self.prompts = {
            split: [task.vocabulary(split).prompt(chunk) for chunk in task.vocabulary(split).chunks()] for split in splits
        }
        self.entries = [
            (split, image, chunk)
            for split in splits
            for image, known in enumerate(task.images(split))
            if known.caption is None  # mAP is not defined on captions
            for chunk in range(len(self.prompts[split]))
        ]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        _, index = place  # the same in every epoch
        split, position, chunk = self.entries[index]
        image = self.task.images(split)[position]
        pixels, boxes = resize(read_rgb(image.path), image.boxes, self.task.data.shortest, self.task.data.longest)
        return _sample(index, np.asarray(pixels), self.prompts[split][chunk], boxes[:0], image.classes[:0], image)


def _sample(
    index: int, pixels: np.ndarray, prompt: Prompt, boxes: np.ndarray, classes: np.ndarray, image: AnnotatedImage
) -> Sample:
    height, width = pixels.shape[:2]
    fractions = centred(torch.from_numpy(boxes)) / torch.tensor([width, height, width, height], dtype=torch.float32)
    return Sample(index, to_tensor(pixels), prompt, fractions, tuple(classes.tolist()), (image.height, image.width))


def truth_of(image: AnnotatedImage) -> Truth:
    return Truth(image.boxes, image.classes, image.crowd, image.height, image.width, image.areas)


def percent(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.1f}"


def _weight_complaints(key: str, weights: Mapping[str, float]) -> list[str]:
    if odd := [name for name, value in weights.items() if not isinstance(value, (int, float))]:
        return [f"{key}.{name}={weights[name]}: allowed is a number of 0 or more" for name in odd]
    complaints = [f"{key}.{name}: allowed are {', '.join(TERMS)}.{nearest(name, TERMS)}" for name in weights if name not in TERMS]
    complaints += [f"{key}.{term} is missing" for term in TERMS if term not in weights]
    return complaints + [f"{key}.{name}={value}: allowed is 0 or more" for name, value in weights.items() if value < 0]
