"""The COCO factory hands everything on to the right place."""

import json

import pytest
from PIL import Image

from gdino_lab.data.coco import coco
from gdino_lab.errors import ConfigurationError


@pytest.mark.parametrize("strict", [True, False])
def test_a_set_in_cocos_layout_is_read(tmp_path, strict):
    (tmp_path / "annotations").mkdir()
    for split, name in (("train", "a.jpg"), ("val", "b.jpg")):
        (tmp_path / split).mkdir()
        Image.new("RGB", (40, 30)).save(tmp_path / split / name)
        box = [5, 5, 100, 10] if split == "train" and not strict else [5, 5, 10, 10]
        content = {
            "images": [{"id": 3, "file_name": name}],
            "annotations": [{"id": 1, "image_id": 3, "category_id": 8, "bbox": box}],
            "categories": [{"id": 8, "name": "nut"}],
        }
        (tmp_path / "annotations" / f"{split}.json").write_text(json.dumps(content))
    data = coco(
        root=tmp_path,
        train_annotations="annotations/train.json",
        train_images="train",
        val_annotations="annotations/val.json",
        val_images="val",
        image_size=[64, 96],
        strict=strict,
    )
    data.prepare()
    assert data.names == ["nut"] and (data.shortest, data.longest) == (64, 96)
    assert [[image.path.name for image in data.images(split)] for split in ("train", "val")] == [["a.jpg"], ["b.jpg"]]
    assert len(data.notices()) == (0 if strict else 1)


def test_arguments_that_cannot_work_are_refused_by_key(tmp_path):
    with pytest.raises(ConfigurationError, match=r"data\.image_size=8"):
        coco(tmp_path, "a.json", None, "b.json", None, 8, True)
