"""Sets in ODVG's format, one JSON object a line: images with boxes of classes, and images with grounded captions.

    <root>/train.jsonl      {"filename": "a.jpg", "height": 480, "width": 640, "detection": {"instances": [...]}}
                            {"filename": "b.jpg", "height": 480, "width": 640, "grounding": {"caption": ..., ...}}
    <root>/label_map.json   {"0": "nut", "1": "washer"}; not needed where every instance names its category
    <root>/images/a.jpg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdino_lab.data.detection import DetectionData


def odvg(
    root: str | Path,
    train_annotations: str | Path,
    train_images: str | Path | None,
    val_annotations: str | Path,
    val_images: str | Path | None,
    image_size: int | Sequence[int],
    strict: bool,
    label_map: str | Path | None,
) -> DetectionData:
    """Training images of an ODVG file, validation images of one or of a COCO file; see conf/data/odvg.yaml.

    Raises:
        ConfigurationError: an image size or an annotation file's ending that is not allowed.
    """
    return DetectionData(
        root, train_annotations, train_images, val_annotations, val_images, image_size, strict, label_map
    )
