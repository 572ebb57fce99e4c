"""Any checkpoint of a run as one module on the CPU, whatever ranks and ZeRO stage wrote it: no engine, no pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from gdino_lab import checkpoint, checkpoint_folder, resume
from gdino_lab.checkpoint_folder import BEST, LAST
from gdino_lab.errors import ConfigurationError, nearest
from gdino_lab.models import grounding_dino
from gdino_lab.models.export import KNOWLEDGE, Knowledge, load_knowledge
from gdino_lab.models.tuning import Tuning
from gdino_lab.pieces import AVERAGE
from gdino_lab.run_folder import RunFolder
from gdino_lab.scoring import DTYPES
from gdino_lab.settings import Settings, as_dict, instantiate


@dataclass(frozen=True)
class Consolidated:
    """
    checkpoint: the folder that the weights are from.
    averaged: whether they are the moving averages.
    knowledge: the task's, of the run's best evaluation; None where there has been none.
    """

    checkpoint: Path
    module: nn.Module
    tuning: Tuning
    processor: Any
    averaged: bool
    knowledge: Knowledge | None

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict()


def load(settings: Settings) -> Consolidated:
    """The checkpoint that `settings.checkpoint` names of the run in `settings.run`.

    Raises:
        ConfigurationError: there is none, it is damaged, or of another model than the run's configuration describes.
    """
    folder = RunFolder(Path(settings.run).resolve())
    start = find(settings.checkpoint or BEST, folder)
    where = f"checkpoint={start.folder}"
    differing = [
        f"{where}: {key} was {then} when it was written, and is {now} now"
        for key, then, now, kind in resume.changes(start.trainer_state["settings"], as_dict(settings))
        if kind == "model"
    ]
    if differing:
        raise ConfigurationError(differing)
    model = {key: value for key, value in settings.model.items() if key != "_target_"}
    if (folder.model / "config.json").is_file():  # else what describes it is where the run found it
        model["pretrained"] = str(folder.model)
        if complaints := grounding_dino.check(**model):
            raise ConfigurationError(complaints)
    tuning = instantiate(settings.tuning)
    detector = tuning.prepare(grounding_dino.skeleton(**model))
    module = instantiate(settings.task, seed=settings.train.seed).attach(detector)
    module = module.to(dtype=DTYPES[settings.precision.weights]).eval()
    checkpoint.check_fits(module, start.folder, where)
    try:
        checkpoint.load_weights(module, start.folder, settings.average)
    except KeyError as error:
        raise ConfigurationError(f"{where}: is not whole: {error.args[0]}") from None
    with checkpoint_folder.Stored(start.folder) as stored:
        averaged = settings.average and bool(stored.names(AVERAGE))
    processor = grounding_dino.build_processor(settings.model.get("pretrained") and model["pretrained"])
    return Consolidated(start.folder, module, tuning, processor, averaged, knowledge_of(folder))


def find(asked: str, folder: RunFolder) -> resume.Start:
    """The checkpoint of that name in the run, or the folder of one anywhere, found to be whole.

    Raises:
        ConfigurationError: there is none, or it is damaged; says which there are.
    """
    path = folder.checkpoints / asked
    if not path.is_dir():
        path = Path(asked)
    if not path.is_dir():
        there = [name for name in (BEST, LAST) if (folder.checkpoints / name).is_dir()]
        there += [each.name for each in checkpoint_folder.written(folder.checkpoints)]
        allowed = f"this run has {', '.join(there)}.{nearest(asked, there)}" if there else "this run has none"
        raise ConfigurationError(f"checkpoint={asked}: no such checkpoint; {allowed}")
    return resume.checkpoint_at("checkpoint", path)[0]


def knowledge_of(folder: RunFolder) -> Knowledge | None:
    """What lies in the run's model/: of its best evaluation so far."""
    if not (folder.model / KNOWLEDGE).is_file():
        return None
    try:
        return load_knowledge(folder.model)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder.model / KNOWLEDGE}: cannot be read ({error})") from None
