"""Sets in COCO's format, such as COCO itself or the export of an annotation tool:

    <root>/annotations/instances_train2017.json
    <root>/train2017/000000000009.jpg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdino_lab.data.detection import DetectionData


def coco(
    root: str | Path,
    train_annotations: str | Path,
    train_images: str | Path | None,
    val_annotations: str | Path,
    val_images: str | Path | None,
    image_size: int | Sequence[int],
    strict: bool,
) -> DetectionData:
    """Training and validation images of two COCO files; see conf/data/coco.yaml for the arguments.

    Raises:
        ConfigurationError: an image size or an annotation file's ending that is not allowed.
    """
    return DetectionData(root, train_annotations, train_images, val_annotations, val_images, image_size, strict)
