"""The forecast beside what an H200's allocator said: a change of the planner that moves it away fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory_cells import cell_of, measured_bytes, predict, step_bytes
from gdino_lab.memory.forecast import KNOWN_ERROR

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/memory_measured.json").read_text())
# Few, and all different: precision, activations, stage, offload, tuning, task; batches of 1 to 8.
CHOSEN = [
    ("512", 1, "fp32", "keep", 0, "none", "full", "detection"),
    ("512", 8, "bf16", "recompute", 2, "none", "full", "detection"),
    ("512", 4, "bf16_autocast", "keep", 2, "optimizer", "full", "detection"),
    ("800", 1, "bf16", "recompute", 3, "optimizer", "full", "detection"),
    ("800", 4, "bf16", "keep", 2, "none", "lora", "detection"),
    ("800", 1, "fp32", "keep", 0, "none", "frozen", "anomaly"),
]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: "-".join(map(str, chosen)))
def test_a_measured_step_is_predicted(chosen: tuple):
    (row,) = [row for row in MEASURED if tuple(cell_of(row).values())[:8] == chosen and row["model"] == "grounding_dino_tiny"]
    assert step_bytes(predict(cell_of(row))) == pytest.approx(measured_bytes(row), rel=KNOWN_ERROR)
