"""gdino-lab blend run=DIR alpha=0,0.5,1: between the start's weights and the tuned ones, scored at each share."""

from __future__ import annotations

from omegaconf import DictConfig

from gdino_lab.errors import ConfigurationError


def run(config: DictConfig) -> int:
    from gdino_lab import finished, settings
    from gdino_lab.models.export import save_model
    from gdino_lab.models.tuning import Full
    from gdino_lab.progress import format_table
    from gdino_lab.run_folder import new_output_folder, write_json

    if any(not 0 <= share <= 1 for share in config.alpha):
        raise ConfigurationError(f"alpha={list(config.alpha)}: allowed are numbers from 0 (the start) to 1 (tuned)")
    blended = finished.load(settings.load(config))
    if hasattr(blended.module, "heads"):
        raise ConfigurationError("blend: heads that began at random have no start to go back to; it is for task=detection")
    finished.bind(blended)
    out = None if config.out is None else new_output_folder(config.out, "blends")
    rows = {}
    for share, weights in finished.blends(blended, config.alpha):
        rows[f"{share:g}"] = finished.evaluate(blended, None)
        if out is not None:
            save_model(out / f"alpha_{share:g}", blended.module, weights, Full(), blended.processor, blended.knowledge)
    print(format_table(blended.task.tables(rows)[0]))
    write_json(
        blended.folder.path / "blend.json", [{"alpha": float(share), **row.metrics} for share, row in rows.items()]
    )
    return 0
