"""gdino-lab synthesize out=DIR: write the synthetic screw-bag set in MVTec LOCO layout."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from gdino_lab.errors import ConfigurationError
from gdino_lab.settings import check_target, instantiate

SYNTHETIC = "gdino_lab.data.synthetic."


def run(config: DictConfig) -> int:
    node = OmegaConf.to_container(config.data, resolve=True)
    complaints = check_target("data", node)
    if config.out is None:
        complaints.append("out is missing: the folder to write to, out=DIR")
    if not str(node.get("_target_")).startswith(SYNTHETIC):
        complaints.append("data: only a synthetic set can be written; use data=synthetic_loco")
    if complaints:
        raise ConfigurationError(complaints)
    data = instantiate(node, root=config.out)
    data.prepare()
    print(f"{data.root}: {', '.join(data.categories)}")
    return 0
