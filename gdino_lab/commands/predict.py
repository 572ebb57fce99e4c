"""gdino-lab predict run=DIR images=PATH: overlay PNGs and predictions.json."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from gdino_lab.errors import ConfigurationError


def run(config: DictConfig) -> int:
    from gdino_lab import finished, settings
    from gdino_lab.data.images import read_rgb
    from gdino_lab.run_folder import new_output_folder, write_json

    if config.images is None:
        raise ConfigurationError("images is missing: an image, a folder of images or a glob, images=PATH")
    paths = finished.find_images(config.images)
    finished_run = finished.load(settings.load(config))
    predictor = finished.predictor_of(finished_run)
    predictions = {path: finished.predict(finished_run, predictor, path) for path in paths}
    out = new_output_folder(config.out, "predictions")
    names = _names(paths)
    for path, prediction in predictions.items():
        predictor.overlay(read_rgb(path), prediction, config.threshold).save(out / names[path])
    write_json(
        out / "predictions.json",
        [
            {"image": str(path), "overlay": names[path], **predictor.facts(prediction)}
            for path, prediction in predictions.items()
        ],
    )
    print(f"{len(paths)} image(s): {out}")
    return 0


def _names(paths: list[Path]) -> dict[Path, str]:
    """A file name for each overlay; images of one name in several folders are numbered."""
    names: dict[Path, str] = {}
    for path in paths:
        name, number = f"{path.stem}.png", 2
        while name in names.values():
            name, number = f"{path.stem}_{number}.png", number + 1
        names[path] = name
    return names
