"""Finding anomalous products: trained on edited normal images, scored by the MVTec LOCO AD protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GroundingDinoProcessor, PreTrainedModel

from gdino_lab.data.edits import Edited, edit
from gdino_lab.data.images import pad_batch, read_rgb, read_size, resize, to_tensor, worst_size
from gdino_lab.data.loco import FOLDERS, GOOD, LOGICAL, STRUCTURAL, LocoData, LocoImage
from gdino_lab.data.parts import PartKinds
from gdino_lab.errors import ConfigurationError
from gdino_lab.losses.anomaly import anomaly_losses, top_mean
from gdino_lab.metrics.auroc import loco_auroc, standard_error
from gdino_lab.metrics.baselines import BASELINES
from gdino_lab.metrics.calibration import Calibration
from gdino_lab.models.anomaly_detector import AnomalyDetector, kind_targets, level_sizes, token_targets
from gdino_lab.models.export import Knowledge
from gdino_lab.models.prompts import MAX_TOKENS, Prompt, Vocabulary, padded
from gdino_lab.tasks.anomaly_predictor import AnomalyPredictor
from gdino_lab.tasks.protocol import Batch, Evaluation, Outputs, Table, Worst, blank_inputs

EDITS = ("clean", "identity", "logical", "structural")
TERMS = ("global", "top", "focal", "dice", "parts")
# Sets of the evaluation: features are fitted on `train`, scores normalised on `validation`, the best checkpoint
# chosen on `validation` against `edited` (edits of validation images), results reported on `test`.
TRAIN, VALIDATION, EDITED, TEST = "train", "validation", "edited", "test"
# Each is reported on its own; an image's score is the sum of the second row, each normalised on validation images,
# with equal weights. The global logit trains the features, but ranks images no better than chance so far.
SCORES = ("local", "global", "features", "parts")
SUMMED = ("local", "features", "parts")
# Normal images from which kinds of parts are learnt, and features fitted at an evaluation; more cost time, not much else.
KIND_IMAGES, FIT_IMAGES = 100, 120


@dataclass(frozen=True)
class Sample:
    """pixels (3, H, W) fp32; changed (H, W) bool; kinds (H, W) uint8, the parts that show; identity for scoring."""

    index: int
    pixels: Tensor
    changed: Tensor
    kinds: Tensor
    anomalous: bool
    category: str
    subset: str
    kind: str


class AnomalyTask:
    """See gdino_lab/tasks/protocol.py for the methods.

    Args:
        edit_shares: share of the training images that gets each kind of edit; they sum to 1.
        top_fraction: share of an image's tokens whose mean logit is its local score.
        part_kinds: kinds of parts to tell apart.
        loss_weights: weight of each term of gdino_lab/losses/anomaly.py.
        seed: of the edits.

    Raises:
        ConfigurationError: shares or weights that are unknown, negative or do not sum to 1.
    """

    selection_name = "AUROC of validation images against edits of validation images"
    splits = (TEST,)
    smallest_scale = 1.0
    data_class, data_choices = LocoData, "synthetic_loco or mvtec_loco"

    def __init__(
        self,
        edit_shares: Mapping[str, float],
        top_fraction: float,
        part_kinds: int,
        loss_weights: Mapping[str, float],
        seed: int,
    ):
        complaints = _unknown("task.edit_shares", edit_shares, EDITS) + _unknown("task.loss_weights", loss_weights, TERMS)
        if not complaints and abs(sum(edit_shares.values()) - 1) > 1e-6:
            complaints.append(f"task.edit_shares sum to {sum(edit_shares.values()):g}: allowed is 1")
        if not 0 < top_fraction <= 1:
            complaints.append(f"task.top_fraction={top_fraction}: allowed is above 0 and up to 1")
        if not 1 <= part_kinds <= 254:
            complaints.append(f"task.part_kinds={part_kinds}: allowed is 1 to 254")
        if complaints:
            raise ConfigurationError(complaints)
        self.part_kinds = part_kinds
        self.shares = {kind: float(edit_shares.get(kind, 0.0)) for kind in EDITS}
        self.top_fraction = top_fraction
        self.weights = {term: float(loss_weights.get(term, 0.0)) for term in TERMS}
        self.seed = seed

    def check(self, data: LocoData, processor: GroundingDinoProcessor) -> list[str]:
        self.data = data
        self.prompts = prompts_of(data, data.categories, processor)
        return []

    def bind(self, data: LocoData, processor: GroundingDinoProcessor) -> None:
        self.check(data, processor)
        self.pad_id = processor.tokenizer.pad_token_id
        self.kinds = {
            category: PartKinds(
                (pixels_of(data, image) for image in of_category(data.images("train"), category)[:KIND_IMAGES]),
                self.part_kinds,
            )
            for category in data.categories
        }

    def attach(self, detector: PreTrainedModel) -> nn.Module:
        self.detector_config = detector.config
        return AnomalyDetector(detector, self.part_kinds)

    def train_set(self) -> Dataset:
        return EditedImages(self.data, self.kinds, self.shares, self.seed)

    def evaluation_set(self, split: str | None = None) -> Dataset:
        return EvaluationImages(self.data, self.seed)

    def collate(self, samples: list[Sample]) -> Batch:
        pixel_values, pixel_mask = pad_batch([sample.pixels for sample in samples])
        changed, _ = pad_batch([sample.changed[None].float() for sample in samples])
        text = padded([self.prompts[sample.category] for sample in samples], self.pad_id)
        return {
            "inputs": {"pixel_values": pixel_values, "pixel_mask": pixel_mask, **text},
            "changed": changed[:, 0],
            "kinds": pad_batch([sample.kinds[None] for sample in samples])[0][:, 0],
            "anomalous": torch.tensor([float(sample.anomalous) for sample in samples]),
            "seen_locally": torch.tensor([float(sample.kind != LOGICAL) for sample in samples]),
            "identity": [(sample.index, sample.category, sample.subset, sample.kind) for sample in samples],
        }

    def worst(self, images: int) -> Worst:
        sizes = {read_size(image.path) for image in self.data.images("train")}
        height, width = worst_size(sizes, self.data.shortest, self.data.longest, images)
        return Worst(height, width, max(len(prompt.input_ids) for prompt in self.prompts.values()), boxes=0)

    def blank_batch(self, images: int, worst: Worst) -> Batch:
        nothing = torch.zeros(images, worst.height, worst.width)
        return {
            "inputs": blank_inputs(images, worst),
            "changed": nothing,
            "kinds": nothing.to(torch.uint8),
            "anomalous": torch.ones(images),
            "seen_locally": torch.ones(images),
            "identity": [None] * images,
        }

    def count(self, batch: Batch) -> int:
        return len(batch["identity"])

    def losses(self, outputs: Outputs, batch: Batch, count: float) -> dict[str, Tensor]:
        # Every pass has equally many images, and each term is already their mean.
        sizes = level_sizes(self.detector_config, *batch["changed"].shape[-2:])
        terms = anomaly_losses(
            outputs["global_logit"],
            outputs["local_logits"],
            outputs["kind_logits"],
            anomalous=batch["anomalous"],
            seen_locally=batch["seen_locally"],
            changed=token_targets(batch["changed"], sizes),
            kinds=kind_targets(batch["kinds"], sizes[0], self.part_kinds),
            valid=outputs["valid"],
            top_fraction=self.top_fraction,
        )
        return {name: self.weights[name] * term for name, term in terms.items()}

    def columns(self, outputs: Outputs) -> dict[str, np.ndarray]:
        """What the score of an image is made of: (B,) or (B, d) each."""
        local = top_mean(outputs["local_logits"], outputs["valid"], self.top_fraction)
        columns = {"local": local, "global": outputs["global_logit"]}
        columns |= {"features": outputs["pooled"], "parts": outputs["histogram"]}
        return {name: column.cpu().numpy() for name, column in columns.items()}

    def records(self, outputs: Outputs, batch: Batch) -> list[dict[str, Any]]:
        arrays = self.columns(outputs)
        return [
            {"index": index, "category": category, "subset": subset, "kind": kind}
            | {name: array[row] for name, array in arrays.items()}
            for row, (index, category, subset, kind) in enumerate(batch["identity"])
        ]

    def evaluate(self, records: list[dict[str, Any]], split: str | None = None) -> Evaluation:
        of = {
            category: [record for record in records if record["category"] == category]
            for category in self.data.categories
        }
        self.calibrations = {category: _calibrated(records) for category, records in of.items()}
        return _over_categories(
            {category: self._evaluate_category(records, self.calibrations[category]) for category, records in of.items()}
        )

    def _evaluate_category(
        self, records: list[dict[str, Any]], calibration: Calibration
    ) -> tuple[dict[str, dict], float | None]:
        """({score name: (good, logical, structural) test scores}, selection) of one category."""
        subsets = np.array([record["subset"] for record in records])
        kinds = np.array([record["kind"] for record in records])
        normalised = calibration.scores(_columns(records))
        calm = subsets == VALIDATION

        def split(score: np.ndarray, good: np.ndarray, subset: str) -> tuple[np.ndarray, ...]:
            anomalous = (score[(subsets == subset) & (kinds == kind)] for kind in (LOGICAL, STRUCTURAL))
            return (score[good], *anomalous)

        test_good = (subsets == TEST) & (kinds == GOOD)
        scores = {name: split(score, test_good, TEST) for name, score in normalised.items()}
        return scores, loco_auroc(*split(normalised["score"], calm, EDITED))["mean"]

    def headlines(self, evaluation: Evaluation) -> list[str]:
        return [name for name in evaluation.metrics if name.startswith("auroc/")]

    def epoch_line(self, evaluation: Evaluation) -> str:
        numbers = [f"{kind} {percent(evaluation.metrics[f'auroc/{kind}'])}" for kind in COLUMNS]
        return f"test AUROC {', '.join(numbers)} | validation edits {percent(evaluation.selection)}"

    def knowledge(self) -> Knowledge:
        arrays = {
            f"{category}/{name}": array
            for category, calibration in self.calibrations.items()
            for name, array in calibration.arrays().items()
        }
        return Knowledge({"categories": self.data.categories}, arrays)

    def predictor(self, knowledge: Knowledge, data: LocoData, processor: GroundingDinoProcessor) -> AnomalyPredictor:
        learnt = knowledge.facts["categories"]
        if len(learnt) > 1 and data.asked not in learnt:
            raise ConfigurationError(f"data.category={data.asked}: the run knows {', '.join(learnt)}; name the one to look for")
        category = data.asked if data.asked in learnt else learnt[0]
        arrays = {
            name.removeprefix(f"{category}/"): array
            for name, array in knowledge.arrays.items()
            if name.startswith(f"{category}/")
        }
        return AnomalyPredictor(
            Calibration.from_arrays(arrays, SUMMED),
            self.columns,
            self.detector_config,
            prompts_of(data, [category], processor)[category],
            processor.tokenizer.pad_token_id,
            data.shortest,
            data.longest,
        )

    def baselines(self) -> dict[str, Evaluation]:
        per_category: dict[str, dict[str, tuple]] = {}
        for category in self.data.categories:
            images = {
                (split, kind): [
                    pixels_of(self.data, image)
                    for image in of_category(self.data.images(split), category)
                    if image.kind == kind
                ]
                for split, kind in (("train", GOOD), ("test", GOOD), ("test", LOGICAL), ("test", STRUCTURAL))
            }
            per_category[category] = {
                name: tuple(
                    scorer(images["train", GOOD], images["test", kind]) for kind in (GOOD, LOGICAL, STRUCTURAL)
                )
                for name, scorer in BASELINES.items()
            }
        return {
            name: _over_categories({category: ({"score": found[name]}, None) for category, found in per_category.items()})
            for name in BASELINES
        }

    def tables(self, rows: dict[str, Evaluation], split: str | None = None) -> list[Table]:
        tuned = rows.get("tuned")
        lines = []
        for name, evaluation in rows.items():
            error = _mean_error(evaluation)
            gain = ""
            if tuned is not None and evaluation is not tuned and evaluation.metrics["auroc/mean"] is not None:
                gain = f"{100 * (tuned.metrics['auroc/mean'] - evaluation.metrics['auroc/mean']):+.1f}"
                gain += f" ± {100 * _mean_error(tuned, evaluation):.1f}"
            numbers = [percent(evaluation.metrics[f"auroc/{kind}"]) for kind in COLUMNS]
            lines.append([name, *numbers, f"{100 * error:.1f}", gain])
        table = Table(
            "Image AUROC on the test split, %",
            ["", *COLUMNS, "± (mean)", "tuned is better by"],
            lines,
            "mean: of logical and structural, the headline; pooled: good against all anomalies. ±: one standard error, "
            "bootstrap over images, paired for differences.\n"
            f"The best checkpoint is chosen by {self.selection_name}, never on the test split.",
        )
        return [table]


COLUMNS = ("logical", "structural", "mean", "pooled")


def _columns(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.stack([record[name] for record in records]) for name in SCORES}


def _calibrated(records: list[dict[str, Any]]) -> Calibration:
    train, held_out = ([record for record in records if record["subset"] == subset] for subset in (TRAIN, VALIDATION))
    return Calibration.fit(_columns(train), _columns(held_out), SUMMED)


def of_category(images: list[LocoImage], category: str) -> list[LocoImage]:
    return [image for image in images if image.category == category]


def pixels_of(data: LocoData, image: LocoImage) -> np.ndarray:
    """(H, W, 3) uint8 at the training resolution."""
    return resize(read_rgb(image.path), data.shortest, data.longest)


def prompts_of(data: LocoData, categories: list[str], processor: GroundingDinoProcessor) -> dict[str, Prompt]:
    """The prompt of each category.

    Raises:
        ConfigurationError: phrases that cannot be told apart or do not fit into a prompt.
    """
    prompts = {}
    for category in categories:
        vocabulary = Vocabulary(data.prompt[category], processor.tokenizer, f"data.prompt.{category}")
        if (name := vocabulary.overflow()) is not None:
            raise ConfigurationError(f"data.prompt.{category}: outgrows the {MAX_TOKENS} tokens of a prompt at {name!r}")
        prompts[category] = vocabulary.prompt()
    return prompts


def percent(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.1f}"


class EditedImages(Dataset):
    """Training images with an edit made on the fly, a pure function of (seed, epoch, index)."""

    def __init__(self, data: LocoData, kinds: Mapping[str, PartKinds], shares: Mapping[str, float], seed: int):
        self.data, self.kinds, self.shares, self.seed = data, kinds, shares, seed
        self.images = data.images("train")
        self.by_category: dict[str, list[int]] = {}
        for index, image in enumerate(self.images):
            self.by_category.setdefault(image.category, []).append(index)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        epoch, index = place
        rng = np.random.default_rng([self.seed, epoch, index])
        kind = str(rng.choice(EDITS, p=list(self.shares.values())))
        image = self.images[index]
        donor = self.images[int(rng.choice(self.by_category[image.category]))]
        pixels = pixels_of(self.data, image)
        result = edit(pixels, pixels_of(self.data, donor), kind, rng)
        return _sample(index, result, image.category, TRAIN, kind, self.kinds[image.category].label_map(result.image))


class EvaluationImages(Dataset):
    """Every image an evaluation looks at: clean training, validation and test images, and fixed edits of validation
    images, one logical and one structural each."""

    def __init__(self, data: LocoData, seed: int):
        self.data, self.seed = data, seed
        self.entries: list[tuple[LocoImage, str, str, LocoImage]] = []  # image, kind, subset, donor
        for category in data.categories:
            train, validation, test = (of_category(data.images(split), category) for split in FOLDERS)
            self.entries += [(image, "clean", TRAIN, image) for image in train[:FIT_IMAGES]]
            self.entries += [(image, "clean", VALIDATION, image) for image in validation]
            self.entries += [
                (image, kind, EDITED, validation[(position + 1) % len(validation)])
                for kind in ("logical", "structural")
                for position, image in enumerate(validation)
            ]
            self.entries += [(image, image.kind, TEST, image) for image in test]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        _, index = place  # the same in every epoch
        image, kind, subset, donor = self.entries[index]
        pixels = pixels_of(self.data, image)
        nothing = np.zeros(pixels.shape[:2], np.uint8)
        if subset != EDITED:
            whole = Edited(pixels, nothing.astype(bool), image.kind != GOOD)
            return _sample(index, whole, image.category, subset, kind, nothing)
        result = edit(pixels, pixels_of(self.data, donor), kind, np.random.default_rng([self.seed, index]))
        return _sample(index, result, image.category, subset, kind, nothing)


def _sample(index: int, edited: Edited, category: str, subset: str, kind: str, kinds: np.ndarray) -> Sample:
    return Sample(
        index,
        to_tensor(edited.image),
        torch.from_numpy(edited.changed.copy()),
        torch.from_numpy(kinds),
        edited.anomalous,
        category,
        subset,
        {"logical": LOGICAL, "structural": STRUCTURAL, "clean": GOOD, "identity": GOOD}.get(kind, kind),
    )


def _over_categories(per_category: dict[str, tuple[dict[str, tuple], float | None]]) -> Evaluation:
    """Plain means over the categories; with several, each one's numbers stand beside."""
    metrics: dict[str, float | None] = {}
    found = {
        (category, name): loco_auroc(*groups)
        for category, (scores, _) in per_category.items()
        for name, groups in scores.items()
    }
    names = next(iter(per_category.values()))[0]
    for name in names:
        for column in COLUMNS:
            key = f"auroc/{column}" if name == "score" else f"auroc_{name}/{column}"
            metrics[key] = _mean(found[category, name][column] for category in per_category)
            if len(per_category) > 1 and name == "score":
                metrics |= {f"{key}/{category}": found[category, name][column] for category in per_category}
    selection = _mean(selection for _, selection in per_category.values())
    if selection is not None:
        metrics["auroc_validation_edits/mean"] = selection
    plain = {category: [group.tolist() for group in scores["score"]] for category, (scores, _) in per_category.items()}
    return Evaluation(metrics, selection, plain)


def _mean(values) -> float | None:
    values = list(values)
    return None if None in values else float(np.mean(values))


def _mean_error(evaluation: Evaluation, minus: Evaluation | None = None) -> float:
    """Standard error of the mean over categories of the mean AUROC, or of a difference of two."""
    errors = [
        standard_error(groups, None if minus is None else minus.scores[category])
        for category, groups in evaluation.scores.items()
    ]
    return float(np.sqrt(np.sum(np.square(errors))) / len(errors))


def _unknown(key: str, values: Mapping[str, float], allowed: tuple[str, ...]) -> list[str]:
    complaints = [f"{key}.{name}: allowed are {', '.join(allowed)}" for name in values if name not in allowed]
    return complaints + [f"{key}.{name}={value}: allowed is 0 or more" for name, value in values.items() if value < 0]
