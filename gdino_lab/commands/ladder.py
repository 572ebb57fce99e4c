"""gdino-lab ladder: the rungs of `ladder=...` in order, each in processes of its own, until one fits."""

from __future__ import annotations

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gdino_lab.commands.main import plain
from gdino_lab.errors import ConfigurationError

UNLESS_TOLD = "ladder=general"


def run(config: DictConfig) -> int:
    from gdino_lab import ladder, launch, settings

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        raise ConfigurationError("-m with ladder: a ladder ends with the first rung that fits; sweep with train -m")
    if launch.ranks_of_launcher() is not None:
        raise ConfigurationError("ladder under another launcher: it starts its own ranks; call gdino-lab ladder")
    words = list(hydra.overrides.task)

    def composed(overrides: list[str]) -> settings.Settings:
        try:
            return settings.load(compose(hydra.job.config_name, ladder.merged(words, overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            raise ladder.Mistake(f"ladder: {' '.join(overrides)}: {plain(error)}") from error

    told = bool(config.ladder.rungs)
    return ladder.climb(settings.load(config) if told else composed([UNLESS_TOLD]), composed)
