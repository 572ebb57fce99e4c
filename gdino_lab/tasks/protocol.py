"""What the trainer asks of a task; it knows nothing else about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GroundingDinoProcessor, PreTrainedModel

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
class Table:
    """For people: a title, column names, rows of cells, and a line on how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


class Task(Protocol):
    """One thing to learn: its head, data, loss, scores and table.

    Data sets are indexed by (epoch, index) and give picklable samples that depend on nothing else, so that neither the
    number of ranks nor of workers changes what is trained on.
    """

    selection_name: str
    """What Evaluation.selection is, in words."""

    def bind(self, data: Any, processor: GroundingDinoProcessor) -> None:
        """Take the data and the processor; called once, before anything below."""

    def attach(self, detector: PreTrainedModel) -> nn.Module:
        """The module to train: `detector` as its attribute `detector`, heads on top as its attribute `heads`."""

    def train_set(self) -> Dataset: ...

    def evaluation_set(self) -> Dataset: ...

    def collate(self, samples: list[Any]) -> Batch:
        """`inputs` holds the keyword arguments of the module's forward; the other keys are targets and identities."""

    def losses(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Weighted terms, fp32 scalars; their sum is the loss."""

    def records(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """One picklable record a sample, with the sample's index under "index"."""

    def evaluate(self, records: list[Any]) -> Evaluation:
        """All records of the evaluation set, sorted by index, each once -> numbers."""

    def epoch_line(self, evaluation: Evaluation) -> str:
        """The evaluation in one short line."""

    def baselines(self) -> dict[str, Evaluation]:
        """Trivial scorers on the same data, by name."""

    def table(self, rows: dict[str, Evaluation]) -> Table:
        """Evaluations side by side; the row "tuned" is compared with the others."""
