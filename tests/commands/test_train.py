"""gdino-lab train from end to end: exact step counts and files, then the same run again, then resumed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

from tests.conftest import SMALL, environment, read_json, read_metrics, run

pytestmark = pytest.mark.slow
# With a moving average, so that what is evaluated and kept must come back from a checkpoint too.
TWO_EPOCHS = ["train.epochs=2", "train.ema_decay=0.9"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_set: Path) -> Path:
    """The run folder of a run of two epochs, four steps each, on one rank."""
    place = tmp_path_factory.mktemp("finished")
    command = [sys.executable, "-m", "gdino_lab", "train", *SMALL, f"data.root={small_set}", *TWO_EPOCHS]
    run([*command, "tracker=tensorboard"], place).assert_done()
    (folder,) = (place / "outputs" / "runs").glob("*/*")
    return folder


def test_run_leaves_every_file(finished: Path):
    assert finished.name.endswith("_anomaly_synthetic_loco")
    assert {path.name for path in finished.iterdir()} >= {
        "config.yaml", "plan.json", "status.json", "metrics.jsonl", "summary.json", "checkpoints", "model", "train.log",
        "ranks", "tracker",
    }  # fmt: skip
    assert read_json(finished / "status.json") == {"state": "completed"}
    assert list((finished / "tracker").rglob("events.out.tfevents*"))
    assert "Epoch 2/2 | loss" in (finished / "train.log").read_text()
    assert not list(finished.rglob(".*"))


def test_run_takes_the_planned_steps(finished: Path):
    plan = read_json(finished / "plan.json")
    assert (plan["accumulation"], plan["steps_per_epoch"], plan["total_steps"]) == (2, 4, 8)
    steps = read_metrics(finished, "step")
    assert [row["step"] for row in steps] == list(range(1, 9))
    for row in steps:
        terms = [value for name, value in row.items() if name.startswith("loss/")]
        assert len(terms) == 5 and row["loss"] == pytest.approx(sum(terms), rel=1e-5)
        assert all(math.isfinite(value) for name, value in row.items() if name != "kind")
    assert steps[-1]["lr"] == 0.0


def test_summary_sets_tuned_beside_untuned_and_baselines(finished: Path):
    summary = read_json(finished / "summary.json")
    for metrics in (summary["metrics"], summary["untuned"], *summary["baselines"].values()):
        assert {f"auroc/{name}" for name in ("logical", "structural", "mean", "pooled")} <= metrics.keys()
        assert metrics["auroc/mean"] == pytest.approx((metrics["auroc/logical"] + metrics["auroc/structural"]) / 2)
    assert list(summary["baselines"]) == ["random", "mean pixel", "foreground area", "blob count"]
    assert "never on the test split" in summary["tables"][0]["note"]
    assert summary["images_per_s"] > 0 and summary["host_peak_bytes"] > 2**27
    # What transformers' modelling leaves without gradient when no box is asked for.
    assert any("bbox_embed" in module for module in summary["untrained"])
    assert not any("encoder.layers" in module for module in summary["untrained"])


def test_best_is_chosen_by_validation_edits(finished: Path):
    epochs = read_metrics(finished, "epoch")
    summary = read_json(finished / "summary.json")
    best = max(row["auroc_validation_edits/mean"] for row in epochs)
    assert summary["selection"]["value"] == pytest.approx(best)
    chosen = next(row for row in epochs if row["epoch"] == summary["best_epoch"])
    assert chosen["auroc/mean"] == pytest.approx(summary["metrics"]["auroc/mean"])


def test_model_loads_in_plain_transformers(finished: Path):
    model = AutoModelForZeroShotObjectDetection.from_pretrained(finished / "model")
    processor = AutoProcessor.from_pretrained(finished / "model")
    text = processor.tokenizer("nut . washer .", return_tensors="pt")
    outputs = model(pixel_values=torch.zeros(1, 3, 64, 64), **text)
    assert outputs.pred_boxes.shape == (1, model.config.num_queries, 4)
    assert load_file(finished / "model" / "heads.safetensors")


def test_eval_gives_the_runs_own_numbers(finished: Path, tmp_path: Path):
    run([sys.executable, "-m", "gdino_lab", "eval", f"run={finished}"], tmp_path).assert_done()
    found = read_json(finished / "eval_test.json")["metrics"]
    assert found == {name: pytest.approx(value) for name, value in read_json(finished / "summary.json")["metrics"].items()}


def test_predict_scores_new_images_without_the_data(finished: Path, tmp_path: Path, small_set: Path):
    images = small_set / "screw_bag" / "test" / "logical_anomalies"
    words = [f"run={finished}", f"images={images}/*.png", "data.root=nowhere", "out=found"]
    run([sys.executable, "-m", "gdino_lab", "predict", *words], tmp_path).assert_done()
    found = read_json(tmp_path / "found" / "predictions.json")
    assert [Path(each["image"]).name for each in found] == sorted(path.name for path in images.iterdir())
    assert all((tmp_path / "found" / each["overlay"]).exists() for each in found)
    # The scores are those of the run's own evaluation: logical anomalies rank against good images as it said.
    good = str(images.parent / "good")
    run([sys.executable, "-m", "gdino_lab", "predict", f"run={finished}", f"images={good}"], tmp_path).assert_done()
    (other,) = (tmp_path / "outputs" / "predictions").glob("*/*/predictions.json")
    above = [(bad["score"] > fine["score"]) for bad in found for fine in read_json(other)]
    assert np.mean(above) == pytest.approx(read_json(finished / "summary.json")["metrics"]["auroc/logical"])


def test_config_fed_back_gives_the_same_run(finished: Path, tmp_path: Path):
    command = [sys.executable, "-m", "gdino_lab", "train", "--config-path", str(finished)]
    run([*command, "train.max_steps=3", "schedule.name=constant", f"run_dir={tmp_path / 'again'}"], tmp_path).assert_done()
    again = read_metrics(tmp_path / "again", "step")
    assert [row["step"] for row in again] == [1, 2, 3]
    # The first step comes before the schedule can differ.
    assert again[0]["loss"] == read_metrics(finished, "step")[0]["loss"]


def test_stopped_run_saves_and_resumes_to_the_same_end(finished: Path, tmp_path: Path, small_set: Path):
    """Ctrl-C: exit 130, a checkpoint, and a resume in the same folder whose losses are the uninterrupted run's."""
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "gdino_lab", "train", *SMALL, f"data.root={small_set}", *TWO_EPOCHS]
    command.append("train.workers=1")  # Ctrl-C reaches data processes too
    started = subprocess.Popen(
        [*command, f"run_dir={folder}"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_steps(folder, 2)
    os.killpg(started.pid, signal.SIGINT)  # a terminal tells the whole group
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 130, out
    status = read_json(folder / "status.json")
    assert status["state"] == "interrupted" and status["to_try"] == f"train.resume={folder}"

    run([*command, f"train.resume={folder}"], tmp_path).assert_done()
    assert not (tmp_path / "outputs").exists()
    assert read_json(folder / "status.json") == {"state": "completed"}
    steps = {row["step"]: row["loss"] for row in read_metrics(folder, "step")}
    assert steps == {row["step"]: row["loss"] for row in read_metrics(finished, "step")}
    assert read_json(folder / "summary.json")["metrics"] == read_json(finished / "summary.json")["metrics"]


SABOTAGED = """
import os, sys
import gdino_lab.trainer as trainer
from gdino_lab.commands.main import main

honest = trainer.mean_count

def sabotaged(run, passes):
    if os.environ["RANK"] == "1":
        open("deed", "w").close()
        {deed}
    return honest(run, passes)

trainer.mean_count = sabotaged  # spawned ranks import this file, so they get it too
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("raise ArithmeticError('the first of all failures')", "ArithmeticError: the first of all failures"),
        ("os.kill(os.getpid(), 9)", "rank 1 died by signal 9"),
    ],
    ids=["exception", "sigkill"],
)
def test_failing_rank_ends_all_and_is_what_the_user_sees(deed: str, said: str, tmp_path: Path, small_set: Path):
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(deed=deed))
    command = [sys.executable, str(script), "train", *SMALL, f"data.root={small_set}", "hardware=cpu_dual"]
    ended = run([*command, "run_dir=run", "train.max_steps=2"], tmp_path, PYTHONPATH=str(Path.cwd()))
    over = time.time()
    assert ended.code == 1, ended.out + ended.err
    assert said in ended.err
    assert "ChildFailedError" not in ended.err
    status = read_json(tmp_path / "run" / "status.json")
    assert status["state"] == "failed" and said in status["cause"] and status["where"].startswith("rank 1")
    assert over - (tmp_path / "deed").stat().st_mtime < 30


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(read_metrics(folder, "step")) >= count:
            return
        time.sleep(0.05)
    raise TimeoutError(os.listdir(folder) if folder.exists() else "no run folder")
