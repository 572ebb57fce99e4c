"""Two runs that start at once want the same set drawn: both get it, whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from gdino_lab.data.synthetic import detection, screw_bag
from gdino_lab.data.synthetic.detection import synthetic_detection
from gdino_lab.data.synthetic.loco import synthetic_loco

LOCO = {"train": 2, "validation": 1, "test_good": 1, "test_logical": 1, "test_structural": 1}


def sets(root, kind: str) -> list:
    if kind == "detection":
        return [synthetic_detection(root, "easy", 0, [48, 64], {"train": 3, "val": 1}, [48, 64], True) for _ in "12"]
    prompt = {"screw_bag": ["nut"]}
    return [synthetic_loco(root, "screw_bag", "easy", 0, [48, 64], LOCO, [48, 64], prompt) for _ in "12"]


@pytest.mark.parametrize(("kind", "images"), [("detection", 3), ("loco", 2)])
def test_two_runs_draw_at_once(tmp_path, monkeypatch, kind, images):
    both_draw = Barrier(2)
    module, name = (detection, "write_recipe") if kind == "detection" else (screw_bag, "_defects_config")
    own = getattr(module, name)

    def waits(*arguments):
        both_draw.wait(timeout=60)  # neither has put its set in place yet
        return own(*arguments)

    monkeypatch.setattr(module, name, waits)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda data: data.prepare(), sets(tmp_path / "set", kind)))
    monkeypatch.undo()
    (again, _) = sets(tmp_path / "set", kind)
    again.prepare()
    assert len(again.images("train")) == images
    assert not list((tmp_path / "set").parent.glob(".*")) and not list((tmp_path / "set").glob(".*"))
