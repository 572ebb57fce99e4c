"""gdino-lab export run=DIR: a checkpoint of any ZeRO stage and rank count as a plain transformers folder, or a peft adapter."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from gdino_lab.errors import ConfigurationError


def run(config: DictConfig) -> int:
    from gdino_lab import consolidated, settings
    from gdino_lab.models.export import save_adapter, save_model
    from gdino_lab.models.tuning import Lora
    from gdino_lab.run_folder import new_output_folder

    disable_progress_bar()
    checked = settings.load(config)
    if checked.adapter and not checked.tuning["_target_"].endswith(f".{Lora.__name__}"):
        raise ConfigurationError("adapter=true: this run has no adapters, it was not tuning=lora; allowed is adapter=false")
    found = consolidated.load(checked)
    name = found.checkpoint.name + ("_adapter" if checked.adapter else "") + ("" if checked.average else "_not_averaged")
    out = new_output_folder(checked.out or str(Path(checked.run) / "export" / name), "export").resolve()
    base = checked.model.get("pretrained")
    if checked.adapter:
        save_adapter(out, found.weights, found.tuning, base, found.processor, found.knowledge)
    else:
        save_model(out, found.module, found.weights, found.tuning, found.processor, found.knowledge)
    kind = "moving averages" if found.averaged else "weights"
    if checked.adapter:
        kind += f", low-rank adapters alone, for the model {base or f'with random weights of train.seed={checked.train.seed}'}"
    print(f"{found.checkpoint.name}, {kind}: {out}")
    if found.knowledge is None:
        print("without the task's knowledge, which the run's first evaluation would have left in model/")
    return 0
