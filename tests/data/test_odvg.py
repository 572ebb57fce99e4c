"""The ODVG factory hands everything on to the right place."""

import json

import pytest
from PIL import Image

from gdino_lab.data.odvg import odvg
from gdino_lab.errors import ConfigurationError


def test_a_set_in_odvgs_layout_is_read(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "images" / "a.jpg")
    line = {"filename": "a.jpg", "detection": {"instances": [{"bbox": [1, 2, 30, 20], "label": 1}]}}
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "map.json").write_text('{"0": "washer", "1": "nut"}')
    paths = ("train.jsonl", "images", "val.jsonl", "images")
    data = odvg(tmp_path, *paths, image_size=64, strict=True, label_map="map.json")
    data.prepare()
    assert data.names == ["washer", "nut"] and data.train_size() == 1
    assert [data.images(split)[0].classes.tolist() for split in ("train", "val")] == [[1], [1]]
    with pytest.raises(ConfigurationError, match="label_map"):
        odvg(tmp_path, *paths, image_size=64, strict=True, label_map=None).prepare()


def test_arguments_that_cannot_work_are_refused_by_key(tmp_path):
    with pytest.raises(ConfigurationError, match=r"data\.val_annotations=b\.txt"):
        odvg(tmp_path, "a.jsonl", None, "b.txt", None, 64, True, None)
