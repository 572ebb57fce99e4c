"""gdino-lab train -m: each job in processes of its own, each recorded, none ending the others."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.conftest import read_json

pytestmark = pytest.mark.slow


def results(place: Path) -> list[dict[str, str]]:
    (path,) = (place / "outputs" / "sweeps").glob("*/*/results.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_zero_stages_and_precisions_on_two_ranks(gdino, tmp_path: Path):
    words = ["-m", "zero=stage2,stage3", "precision=fp32,bf16_autocast", "hardware=cpu_dual", "train.max_steps=3"]
    ended = gdino("train", *words, timeout=280).assert_done()
    rows = results(tmp_path)
    assert [(row["zero"], row["precision"]) for row in rows] == [
        ("stage2", "fp32"), ("stage2", "bf16_autocast"), ("stage3", "fp32"), ("stage3", "bf16_autocast"),
    ]  # fmt: skip
    assert {row["state"] for row in rows} == {"completed"}
    assert [row["number"] for row in rows] == ["0", "1", "2", "3"]
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)  # the stage changes where numbers lie, not what they are
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    for row in rows:
        assert float(row["samples_per_s"]) > 0 and float(row["host_gib"]) > 0 and float(row["seconds"]) > 0
    assert "results.csv" in ended.out and ended.out.count("completed") >= 4


def test_failing_jobs_are_recorded_and_the_rest_go_on(gdino, tmp_path: Path):
    """Three tunings; before them a job that is refused."""
    ended = gdino("train", "-m", "tuning=frozen,lora", "optimizer.lr=-1,1e-3", "train.max_steps=2", timeout=280)
    assert ended.code == 2
    rows = results(tmp_path)
    assert [(row["tuning"], row["state"], row["error"]) for row in rows] == [
        ("frozen", "failed", "refused"), ("frozen", "completed", ""),
        ("lora", "failed", "refused"), ("lora", "completed", ""),
    ]  # fmt: skip
    (refused,) = tmp_path.glob("outputs/sweeps/*/*/0_*")
    assert "optimizer.lr=-1" in read_json(refused / "status.json")["cause"]
    assert all(float(row["auroc/mean"]) > 0 and float(row["untuned auroc/mean"]) > 0 for row in rows[1::2])
