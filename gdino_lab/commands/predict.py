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
    names = overlay_names(finished.find_images(config.images))
    finished_run = finished.load(settings.load(config))
    predictor = finished.predictor_of(finished_run)
    out = new_output_folder(config.out, "predictions")
    rows = []
    for path, name in names.items():
        try:
            image = read_rgb(path)
        except ConfigurationError as error:  # one broken file among many is told, and the rest goes on
            print(error, flush=True)
            rows.append({"image": str(path), "error": str(error)})
            continue
        prediction = finished.predict(finished_run, predictor, image)
        predictor.overlay(image, prediction, config.threshold).save(out / name)
        rows.append({"image": str(path), "overlay": name, **predictor.facts(prediction)})
    write_json(out / "predictions.json", rows)
    read = sum("error" not in row for row in rows)
    print(f"{read} of {len(rows)} image(s): {out}")
    return 0 if read else 1


def overlay_names(paths: list[Path]) -> dict[Path, str]:
    """A file name for each overlay; images of one name in several folders are numbered."""
    names: dict[Path, str] = {}
    for path in paths:
        name, number = f"{path.stem}.png", 2
        while name in names.values():
            name, number = f"{path.stem}_{number}.png", number + 1
        names[path] = name
    return names
