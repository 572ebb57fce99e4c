"""task=detection from end to end: training on every kind of file, scoring again, blending, predicting."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

from gdino_lab.checkpoint_folder import Stored
from gdino_lab.commands.main import main
from gdino_lab.data.images import pad_batch, read_rgb, resize, to_tensor
from tests.conftest import Ended, read_json, read_metrics, run
from tests.tasks.test_detection import BOXES, CATEGORIES, coco_file

pytestmark = pytest.mark.slow

TINY = [
    "task=detection", "tracker=none", "train.log_every=1", "train.max_steps=3", "train.micro_batch=2",
    "train.effective_batch=4", "data.image_size=[48,64]",
]  # fmt: skip
DRAWN = [*TINY, "data.canvas=[48,64]", "data.counts={train: 8, val: 5}"]
MM = "model.architecture=mm_grounding_dino"
# In this process's stead: a rank of a launcher, which loads everything once.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


def gdino(folder: Path, *words: str, **extra: str) -> Ended:
    return run([sys.executable, "-m", "gdino_lab", *words], folder, **extra)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("detection")


@pytest.fixture(scope="module")
def guard(place: Path) -> Path:
    return coco_file(place / "guard", "guard", {3: "cat", 1: "dog"}, [[(3, 4, 4, 30, 20)], [(1, 20, 5, 30, 30)], []])


@pytest.fixture(scope="module")
def finished(place: Path, guard: Path) -> Path:
    words = [*DRAWN, "run_dir=finished", f"task.guard={guard}", "train.ema_decay=0.5", "train.max_steps=4"]
    gdino(place, "train", *words, "tuning.lr_factors={backbone: 0.1}", "tuning.freeze=[text_backbone]").assert_done()
    return place / "finished"


def test_losses_are_finite_and_fall_under_a_table_of_tuned_beside_untuned(finished: Path):
    steps = read_metrics(finished, "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) for row in steps)
    # Three terms for each of: the final layer, one auxiliary layer, the encoder.
    assert sum(name.startswith("loss/") for name in steps[0]) == 9
    summary = read_json(finished / "summary.json")
    assert {"ap", "ap50", "ap/nut", "guard/ap", "guard/ap/cat"} <= summary["metrics"].keys() & summary["untuned"].keys()
    assert [row[0] for row in summary["tables"][0]["rows"]] == ["tuned", "untuned"]
    assert [row[0] for row in summary["tables"][1]["rows"]] == ["long screw", "short screw", "nut", "washer"]
    assert not any("text_backbone" in name for name in summary["untrained"])


def test_a_resumed_run_is_the_same_to_the_bit(place: Path):
    """With everything that draws: augmented images, from data processes, a moving average, and dropout."""
    words = [*DRAWN, "train.workers=1", "train.ema_decay=0.5", "train.save_every=1", "model.config.dropout=0.1", "train.keep=9"]
    gdino(place, "train", *words, "run_dir=at_once", "train.max_steps=5").assert_done()
    third = place / "at_once" / "checkpoints" / "step_00000003"
    gdino(place, "train", *words, "run_dir=in_two", "train.max_steps=5", f"train.resume={third}").assert_done()
    for kind in ("step", "epoch"):
        rows, again = (read_metrics(place / name, kind) for name in ("at_once", "in_two"))
        for row in [*rows, *again]:
            for measured in ("images_per_s", "memory_gib"):
                row.pop(measured, None)
        assert again and again == rows[-len(again) :]
    with Stored(place / "at_once/checkpoints/last") as one, Stored(place / "in_two/checkpoints/last") as other:
        for name in one.names("weight"):
            for kind in one.kinds(name):
                values = (each.read(kind, name, 0, each.size(kind, name)) for each in (one, other))
                assert torch.equal(*values), (kind, name)


def test_eval_gives_the_runs_own_numbers(finished: Path, place: Path):
    gdino(place, "eval", "run=finished").assert_done()
    found = read_json(finished / "eval_val.json")["metrics"]
    expected = read_json(finished / "summary.json")["metrics"]
    assert found == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items() if "guard" not in name}


def test_eval_of_the_guard_has_its_own_classes(finished: Path, place: Path):
    ended = gdino(place, "eval", "run=finished", "split=guard").assert_done()
    assert "on the guard split" in ended.out and "cat" in ended.out and "washer" not in ended.out
    found = read_json(finished / "eval_guard.json")["metrics"]
    summary = read_json(finished / "summary.json")["metrics"]
    assert {f"guard/{name}": value for name, value in found.items()} == {
        name: pytest.approx(value) for name, value in summary.items() if name.startswith("guard/")
    }


def test_predict_tells_a_broken_image_and_goes_on(finished: Path, place: Path, tmp_path: Path):
    Image.new("L", (40, 30)).save(tmp_path / "gray.webp")
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("nor this")
    gdino(place, "predict", "run=finished", f"images={tmp_path}/*", f"out={tmp_path / 'out'}").assert_done()
    rows = {Path(row["image"]).name: row for row in read_json(tmp_path / "out" / "predictions.json")}
    assert rows.keys() == {"gray.webp", "broken.png"}
    assert "not a readable image" in rows["broken.png"]["error"] and (tmp_path / "out" / "gray.png").exists()


def test_blend_goes_from_the_start_to_the_tuned_weights(finished: Path, place: Path):
    gdino(place, "blend", "run=finished", "alpha=0,0.5,1", "out=blends").assert_done()
    rows = read_json(finished / "blend.json")
    assert [row["alpha"] for row in rows] == [0.0, 0.5, 1.0]
    summary = read_json(finished / "summary.json")
    for row, expected in ((rows[0], summary["untuned"]), (rows[-1], summary["metrics"])):
        assert {name: value for name, value in row.items() if name != "alpha"} == {
            name: pytest.approx(value, abs=1e-6) for name, value in expected.items()
        }
    tuned = AutoModelForZeroShotObjectDetection.from_pretrained(finished / "model").state_dict()
    half, whole = (
        AutoModelForZeroShotObjectDetection.from_pretrained(place / "blends" / f"alpha_{share}").state_dict()
        for share in ("0.5", "1")
    )
    assert all(torch.equal(whole[name], value) for name, value in tuned.items())
    assert any(not torch.equal(half[name], value) for name, value in tuned.items())


def test_predict_writes_boxes_and_overlays_that_plain_transformers_confirms(finished: Path, place: Path):
    drawn = next((place / "outputs" / "data").rglob("val"))
    gdino(place, "predict", "run=finished", f"images={drawn}", "out=found", "threshold=0.0").assert_done()
    found = read_json(place / "found" / "predictions.json")
    assert [Path(each["image"]) for each in found] == sorted(drawn.iterdir())
    assert {path.name for path in (place / "found").iterdir()} == {
        "predictions.json", *(each["overlay"] for each in found)
    }  # fmt: skip
    image = read_rgb(Path(found[0]["image"]))
    with Image.open(place / "found" / found[0]["overlay"]) as overlay:
        assert overlay.size == image.size and np.any(np.asarray(overlay) != np.asarray(image))

    model = AutoModelForZeroShotObjectDetection.from_pretrained(finished / "model").eval()
    processor = AutoProcessor.from_pretrained(finished / "model", backend="pil")
    pixel_values, pixel_mask = pad_batch([to_tensor(resize(image, 48, 64))])
    text = processor.tokenizer("long screw . short screw . nut . washer .", return_tensors="pt")
    with torch.no_grad():
        outputs = model(pixel_values=pixel_values, pixel_mask=pixel_mask, **text)
    centre_x, centre_y, width, height = outputs.pred_boxes[0].unbind(-1)
    corners = torch.stack([centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2], -1)
    expected = corners.clamp(0, 1) * torch.tensor([64, 48, 64, 48])
    got = torch.tensor([each["box"] for each in found[0]["boxes"]])
    assert len(got) == len(expected) == 20
    assert torch.cdist(got, expected).amin(1).max() < 64 * 1e-4 + 1e-3  # rounded to 0.001 pixels
    assert {each["class"] for each in found[0]["boxes"]} <= {"long screw", "short screw", "nut", "washer"}


def test_what_a_user_may_get_wrong_about_a_run(finished: Path, place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["gdino-lab"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for words, said in (
        (["eval"], "run is missing"),
        (["eval", "run=nowhere"], "holds no config.yaml"),
        (["eval", "run=finished", "split=test"], "allowed are val, train, guard"),
        (["predict", "run=finished"], "images is missing"),
        (["predict", "run=finished", "images=nothing*.png"], "no image there"),
        (["predict", "run=finished", "images=guard", "out=finished"], "out=finished: holds something already"),
        (["blend", "run=finished", "alpha=2"], "alpha=[2.0]"),
    ):
        assert main(words) == 2
        shown = capsys.readouterr().err
        assert said in shown and "Traceback" not in shown, shown


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_and_ranks_change_nothing(finished: Path, place: Path, ranks: int):
    """One batch of 4, four of 1, and two of 1 on two ranks: the same losses, and the same score of an odd val set."""
    still = "task.augment={scales: [1.0, 1.0], flip: 0.5, crop: 0.0, min_visible: 0.3, colour: 0.1}"
    # Adam's first steps blow rounding up; so small a rate keeps them small. ZeRO-1 tells the gradient's norm.
    words = [*DRAWN, still, "task.loss_weights.class=0.01", "optimizer.lr=1e-6", "zero=stage1"]
    if not (place / "whole").exists():
        gdino(place, "train", *words, "train.micro_batch=4", "run_dir=whole", MASTER_PORT="29611", **ALONE).assert_done()
    parts = f"parts_{ranks}"
    hardware = "hardware=cpu" if ranks == 1 else "hardware=cpu_dual"
    gdino(place, "train", *words, hardware, "train.micro_batch=1", "train.effective_batch=4", f"run_dir={parts}").assert_done()
    for kind in ("untuned", "step"):
        for one, other in zip(read_metrics(place / "whole", kind), read_metrics(place / parts, kind), strict=True):
            for name, value in one.items():
                if name.startswith(("loss", "ap", "grad_norm")) and value is not None:
                    assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (kind, one["step"], name)


def files_of(kind: str, folder: Path) -> list[str]:
    coco = coco_file(folder, "coco", CATEGORIES, [*BOXES, BOXES[0]])
    if kind == "coco":
        return ["data=coco", f"data.root={folder}", *files(coco.name, coco.name)]
    if kind == "negatives":
        empty = coco_file(folder, "empty", CATEGORIES, [[], [], [], []])
        return ["data=coco", f"data.root={folder}", *files(empty.name, empty.name)]
    lines = [
        {"filename": f"coco_{index}.png", "height": 40, "width": 64, "detection": {
            "instances": [{"bbox": [x, y, x + w, y + h], "label": category, "category": CATEGORIES[category]}
                          for category, x, y, w, h, *_ in boxes]}}
        for index, boxes in enumerate([*BOXES, BOXES[0]])
    ]  # fmt: skip
    lines[3] = {"filename": "coco_3.png", "height": 40, "width": 64, "grounding": {
        "caption": "a nut, and a long screw on the left", "regions": [{"bbox": [10, 10, 30, 22], "phrase": "nut"}]}}  # fmt: skip
    (folder / "odvg.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "labels.json").write_text(json.dumps({str(key): name for key, name in CATEGORIES.items()}))
    return ["data=odvg", f"data.root={folder}", *files("odvg.jsonl", coco.name), "data.label_map=labels.json"]


def files(train: str, val: str) -> list[str]:
    return [f"data.train_annotations={train}", f"data.val_annotations={val}", "data.train_images=.", "data.val_images=."]


@pytest.mark.parametrize("kind", ["coco", "odvg", "negatives"])
def test_every_kind_of_file_trains_and_evaluates(tmp_path: Path, kind: str):
    # MM Grounding DINO has parameters without a dimension, which DeepSpeed cannot broadcast.
    other = {"coco": [], "odvg": [MM], "negatives": [MM, "zero=stage3"]}
    words = [*TINY, *files_of(kind, tmp_path / "set"), *other[kind], "run_dir=run"]
    gdino(tmp_path, "train", *words, MASTER_PORT="29612", **ALONE).assert_done()
    steps = read_metrics(tmp_path / "run", "step")
    assert len(steps) == 3 and all(math.isfinite(row["loss"]) and row["loss/class"] > 0 for row in steps)
    (untuned,) = read_metrics(tmp_path / "run", "untuned")
    if kind == "negatives":
        assert untuned["ap"] is None and all(row["loss/box"] == row["loss/giou"] == 0 for row in steps)
    else:
        assert untuned["ap"] is not None and steps[0]["loss/box"] > 0
    model, report = AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.model_type == ("grounding-dino" if kind == "coco" else "mm-grounding-dino")


