"""A finished run, loaded to be used: score it again, blend it with its start, predict on new images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.errors import ConfigurationError
from gdino_lab.models import grounding_dino
from gdino_lab.models.export import DETECTOR_PREFIX, Knowledge, load_heads, load_knowledge
from gdino_lab.run_folder import RunFolder
from gdino_lab.scoring import DTYPES, images_at_once, records_of, to_device
from gdino_lab.settings import Settings, instantiate
from gdino_lab.tasks.protocol import Evaluation, Predictor, Task


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Finished:
    settings: Settings
    folder: RunFolder
    task: Task
    module: nn.Module
    processor: Any
    knowledge: Knowledge
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.precision.weights]

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        """The module in the precision it was trained in."""
        autocast = self.settings.precision.autocast
        with torch.autocast(self.device.type, DTYPES[autocast]) if autocast else nullcontext():
            return self.module(**inputs)


def load(settings: Settings) -> Finished:
    """The best model of the run in `settings.run`, on the device it was trained on or, without one, on the CPU.

    Raises:
        ConfigurationError: the folder holds no finished model, or a damaged one.
    """
    folder = RunFolder(Path(settings.run).resolve())
    if not (folder.model / "config.json").is_file():
        raise ConfigurationError(f"run={settings.run}: holds no model/, so no epoch of it was ever finished")
    disable_progress_bar()  # transformers' own, for every file it reads
    use_cuda = settings.hardware.device == "cuda" and torch.cuda.is_available()
    if settings.hardware.device == "cuda" and not use_cuda:
        print("no CUDA device here: on the CPU", flush=True)
    device = torch.device("cuda" if use_cuda else "cpu")
    detector, processor = grounding_dino.build(settings.model["architecture"], str(folder.model))
    task = instantiate(settings.task, seed=settings.train.seed)
    module = task.attach(detector)
    try:
        load_heads(folder.model, module)
        knowledge = load_knowledge(folder.model)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ConfigurationError(f"run={settings.run}: heads or knowledge in its model/ cannot be read ({why})") from None
    module = module.to(device=device, dtype=DTYPES[settings.precision.weights]).eval()
    return Finished(settings, folder, task, module, processor, knowledge, device)


def bind(run: Finished) -> None:
    """Read and check the run's data, for whatever needs it.

    Raises:
        ConfigurationError: the data are not there any more, or not as they were.
    """
    data = instantiate(run.settings.data)
    data.prepare()
    run.task.bind(data, run.processor)


def evaluate(run: Finished, split: str | None) -> Evaluation:
    """The bound task's score of the module as it is now.

    Raises:
        ConfigurationError: the task has no such split.
    """
    if split is not None and split not in run.task.splits:
        raise ConfigurationError(f"split={split}: allowed are {', '.join(run.task.splits)}")
    dataset = run.task.evaluation_set(split)
    if not len(dataset):
        raise ConfigurationError(f"split={split}: holds nothing to score, captions have no mAP")
    train = run.settings.train
    batches = loader(
        dataset,
        EpochSampler(dataset, rank=0, world_size=1, seed=0, shuffle=False),
        images_at_once(run.settings),
        train.workers,
        run.task.collate,
        run.device.type == "cuda",
    )
    return run.task.evaluate(records_of(run.forward, run.task, batches, run.device, run.dtype), split)


def blends(run: Finished, shares: Sequence[float]) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """For each share the detector's weights (1 - share) * start + share * tuned (Wortsman et al. 2022, eq. 1), also put
    into the module."""
    torch.manual_seed(run.settings.train.seed)  # random weights are those that the run began with
    start = instantiate(run.settings.model)[0].state_dict()
    detector = run.module.detector
    tuned = {name: weight.detach().cpu().clone() for name, weight in detector.state_dict().items()}
    for share in shares:
        mixed = {
            name: torch.lerp(start[name].float(), weight.float(), share).to(weight.dtype)
            if weight.is_floating_point()
            else weight
            for name, weight in tuned.items()
        }
        detector.load_state_dict(mixed)
        yield share, {DETECTOR_PREFIX + name: weight for name, weight in mixed.items()}


def predictor_of(run: Finished) -> Predictor:
    return run.task.predictor(run.knowledge, instantiate(run.settings.data), run.processor)


@torch.no_grad()
def predict(run: Finished, predictor: Predictor, image: Image.Image) -> Any:
    """The prediction on one image."""
    batch = to_device(predictor.batch(image), run.device, run.dtype)
    return predictor.prediction(run.forward(**batch["inputs"]), batch)


def find_images(asked: str) -> list[Path]:
    """One image, the images of a folder, or those that a glob finds.

    Raises:
        ConfigurationError: there are none.
    """
    path = Path(asked)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if _is_image(each))
    else:
        found = [path] if path.is_file() else sorted(filter(_is_image, map(Path, glob(asked, recursive=True))))
    if not found:
        raise ConfigurationError(f"images={asked}: no image there; allowed are an image, a folder of images or a glob")
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.name[0] != "." and path.is_file()
