"""gdino-lab inspect: one forward pass of the plain transformers model, every field of what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

# What fills a field that is None.
FLAGS = {
    "loss": "labels=...",
    "loss_dict": "labels=...",
    "auxiliary_outputs": "labels=... and config.auxiliary_loss=True",
    "decoder_hidden_states": "output_hidden_states=True",
    "encoder_vision_hidden_states": "output_hidden_states=True",
    "encoder_text_hidden_states": "output_hidden_states=True",
    "decoder_attentions": "output_attentions=True",
    "encoder_attentions": "output_attentions=True",
}
COLUMNS = ["field", "shape", "dtype", "device", "min", "max", "NaN", "filled by"]


def run(config: DictConfig) -> int:
    import torch

    from gdino_lab import settings as settings_module
    from gdino_lab.progress import format_table
    from gdino_lab.scoring import DTYPES, to_device
    from gdino_lab.tasks.protocol import Table

    settings = settings_module.load(config)
    torch.manual_seed(settings.train.seed)
    device = torch.device("cuda" if settings.hardware.device == "cuda" and torch.cuda.is_available() else "cpu")
    dtype = DTYPES[settings.precision.weights]
    detector, processor = settings_module.instantiate(settings.model)
    data = settings_module.instantiate(settings.data)
    task = settings_module.instantiate(settings.task, seed=settings.train.seed)
    data.prepare()
    task.bind(data, processor)
    batch = to_device(task.collate([task.evaluation_set()[0, 0]]), device, dtype)
    detector = detector.to(device, dtype).eval()
    with torch.no_grad():
        outputs = detector(**batch["inputs"])
    rows = [row for name in outputs.__dataclass_fields__ for row in rows_of(name, getattr(outputs, name))]
    print(format_table(Table("One image, one forward pass of the plain transformers model", COLUMNS, rows)))
    return 0


def rows_of(name: str, value: Any) -> Iterator[list[str]]:
    """A row for each tensor in a field, however nested."""
    import torch

    if value is None:
        yield [name, "None", "", "", "", "", "", FLAGS.get(name, "")]
    elif isinstance(value, torch.Tensor):
        known = value[~value.isnan()] if value.is_floating_point() else value
        low, high = (f"{known.min().item():.4g}", f"{known.max().item():.4g}") if known.numel() else ("", "")
        nans = str(value.numel() - known.numel())
        yield [name, "x".join(map(str, value.shape)) or "scalar", str(value.dtype)[6:], str(value.device), low, high, nans, ""]
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from rows_of(f"{name}.{key}", each)
    else:
        for number, each in enumerate(value):
            yield from rows_of(f"{name}[{number}]", each)
