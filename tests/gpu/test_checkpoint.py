"""A resume on a GPU: the state comes back to the bit, and the losses after it are as near as two resumes are to each other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COMMON = [
    "hardware=h200_single", "data.canvas=[48,64]", "data.image_size=[64,96]", "task.part_kinds=3", "tracker=none",
    "data.counts={train: 16, validation: 4, test_good: 4, test_logical: 4, test_structural: 4}", "train.workers=0",
    "train.micro_batch=2", "train.effective_batch=4",
]  # fmt: skip
CASES = [
    ["zero=stage0", "offload=none", "precision=fp32"],
    ["zero=stage0", "offload=none", "precision=tf32"],
    ["zero=stage0", "offload=none", "precision=fp16_autocast"],
    ["zero=stage1", "offload=none", "precision=fp16"],
    ["zero=stage2", "offload=optimizer", "precision=bf16"],
    ["zero=stage2", "offload=none", "precision=fp16_autocast", "train.ema_decay=0.9"],
    ["zero=stage3", "offload=none", "precision=bf16_autocast", "activations=recompute"],
    ["zero=stage3", "offload=optimizer_and_params", "precision=fp16"],
]
# What one rounding changes. Two runs may differ by less by chance, and a third by more.
ROUNDING = {"fp32": 2e-7, "tf32": 5e-4, "fp16": 5e-4, "bf16": 4e-3}


def test_a_resume_is_as_near_as_two_resumes_are_to_each_other(tmp_path: Path):
    cases = [
        {"words": [f"data.root={tmp_path / 'set'}", *COMMON, *case], "words_after": [], "folder": str(tmp_path / str(number))}
        for number, case in enumerate(CASES)
    ]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    script = str(root / "tests" / "resumed.py")
    run([sys.executable, script, "out.json", json.dumps(cases), "cuda"], tmp_path, PYTHONPATH=path).assert_done()
    (found,) = json.loads((tmp_path / "out.json").read_text())
    for case, result in zip(CASES, found, strict=True):
        assert not result["stored"], (case, result["stored"][:5])
        own = max(abs(a / b - 1) for a, b in zip(result["resumed"], result["again"], strict=True))
        off = max(abs(a / b - 1) for a, b in zip(result["went_on"], result["resumed"], strict=True))
        print(f"{' '.join(case)}: resumed {off:.2e}, run to run {own:.2e}")
        precision = next(word for word in case if word.startswith("precision=")).removeprefix("precision=")
        assert off <= max(10 * own, ROUNDING[precision.removesuffix("_autocast")]), case
