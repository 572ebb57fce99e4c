"""What the trainer asks of a task; it knows nothing else about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GroundingDinoProcessor, PreTrainedModel

from gdino_lab.models.export import Knowledge

Batch = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    metrics: flat names -> numbers, None where undefined; what metrics.jsonl gets.
    selection: the number by which the best checkpoint is chosen, higher is better; never from the test split.
    scores: whatever the task needs to compare two evaluations image by image.
    """

    metrics: dict[str, float | None]
    selection: float | None
    scores: Any = None


@dataclass(frozen=True)
class Worst:
    """Size of the padded images, pixels; tokens of the longest prompt; most boxes an image."""

    height: int
    width: int
    tokens: int
    boxes: int


@dataclass(frozen=True)
class Table:
    """For people: a title, column names, rows of cells, and a line on how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


def blank_inputs(images: int, worst: Worst) -> dict[str, Tensor]:
    """The module's inputs for `images` black images of a size and a prompt of one word repeated."""
    ids = torch.full((images, worst.tokens), 1200)
    ids[:, 0], ids[:, -2], ids[:, -1] = 101, 1012, 102
    return {
        "pixel_values": torch.zeros(images, 3, worst.height, worst.width),
        "pixel_mask": torch.ones(images, worst.height, worst.width, dtype=torch.int64),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }


class Predictor(Protocol):
    """A finished model's use on images that nobody annotated."""

    def batch(self, image: Image.Image) -> Batch:
        """One image as the module's input."""

    def prediction(self, outputs: Outputs, batch: Batch) -> Any:
        """What was found in it."""

    def facts(self, prediction: Any) -> dict[str, Any]:
        """The same as predictions.json holds it."""

    def overlay(self, image: Image.Image, prediction: Any, threshold: float) -> Image.Image:
        """The same drawn over the image; boxes below `threshold` are left out."""


class Task(Protocol):
    """One thing to learn: its head, data, loss, scores and table.

    Data sets are indexed by (epoch, index) and give picklable samples that depend on nothing else, so that neither the
    number of ranks nor of workers changes what is trained on.
    """

    selection_name: str
    """What Evaluation.selection is, in words."""
    splits: tuple[str, ...]
    """What `eval` can be asked for, the usual one first."""
    smallest_scale: float
    """Least that training images are scaled by, beyond `data.image_size`."""
    data_class: type
    """What `data` must be; `data_choices` says in words which choices are."""
    data_choices: str

    def check(self, data: Any, processor: GroundingDinoProcessor) -> list[str]:
        """Refuse what cannot be trained on, before anything starts; returns notices for the user.

        Raises:
            ConfigurationError: with every complaint, each naming its file, image or class.
        """

    def bind(self, data: Any, processor: GroundingDinoProcessor) -> None:
        """Take the data and the processor; called once in every rank, before anything below."""

    def attach(self, detector: PreTrainedModel) -> nn.Module:
        """The module to train: `detector` as its attribute `detector`, heads on top as its attribute `heads`."""

    def train_set(self) -> Dataset: ...

    def evaluation_set(self, split: str | None = None) -> Dataset:
        """What is looked at after each epoch, or one of `splits`."""

    def collate(self, samples: list[Any]) -> Batch:
        """`inputs` holds the keyword arguments of the module's forward; the other keys are targets and identities."""

    def worst(self, images: int) -> Worst:
        """The most that a training batch of `images` can hold; after `check` or `bind`."""

    def blank_batch(self, images: int, worst: Worst) -> Batch:
        """A batch of that shape with nothing in it; needs no data, so it may come before `bind`."""

    def count(self, batch: Batch) -> int:
        """What the loss is a mean of: images, or boxes."""

    def losses(self, outputs: Outputs, batch: Batch, count: float) -> dict[str, Tensor]:
        """Weighted terms, fp32 scalars; their sum is the loss.

        Args:
            count: the mean of `count` over all passes of the optimizer step, on all ranks. Sums divided by it average
                over the passes to the mean over the whole effective batch, however it is cut into micro-batches.
        """

    def records(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """One picklable record a sample, with the sample's index under "index"."""

    def evaluate(self, records: list[Any], split: str | None = None) -> Evaluation:
        """All records of `evaluation_set(split)`, sorted by index, each once -> numbers."""

    def headlines(self, evaluation: Evaluation) -> list[str]:
        """The metrics by which runs are compared, of all there are."""

    def epoch_line(self, evaluation: Evaluation) -> str:
        """The evaluation in one short line."""

    def knowledge(self) -> Knowledge:
        """What `predictor` needs besides weights, as of the last evaluation."""

    def predictor(self, knowledge: Knowledge, data: Any, processor: GroundingDinoProcessor) -> Predictor:
        """What uses the finished model on new images, without the data it was trained on."""

    def baselines(self) -> dict[str, Evaluation]:
        """Trivial scorers on the same data, by name."""

    def tables(self, rows: dict[str, Evaluation], split: str | None = None) -> list[Table]:
        """Evaluations of `evaluation_set(split)` side by side, the headline first; the row "tuned" is compared with the
        others."""
