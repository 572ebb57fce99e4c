"""gdino-lab train: fine-tune; as a job of a sweep, record how it ended and let the rest go on."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig


def run(config: DictConfig) -> int:
    # Late, so that --help, --cfg and shell completion do not wait for torch.
    from gdino_lab import launch, settings
    from gdino_lab.commands import sweep

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return sweep.run_job(config)
    return launch.train(settings.load(config))
