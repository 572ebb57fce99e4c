"""The worst case first, on a GPU: as large as the real steps that follow, gone when it is over, and refused by the cap."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCRIPT = """
import json, sys
from pathlib import Path
import torch

from gdino_lab import engine, probe, trainer
from gdino_lab.commands.main import composed
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import become_a_lone_rank

become_a_lone_rank()
engine.start_distributed("cuda")
found = {}
for words in json.loads(sys.argv[1]):
    settings = composed(*words)
    data = instantiate(settings.data)
    data.prepare()
    plan, folder = make_plan(settings, data.train_size(), 1), RunFolder(Path("run"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        probe.probe(settings, plan, folder, lambda doing, step=0: None)
    except torch.OutOfMemoryError:
        found[" ".join(words[-3:])] = "out of memory"
        break  # what an engine leaves that ran out is not to be built on
    left, probed = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = trainer.build(settings, plan, folder, lambda: False, Phases())
    made.engine.train()
    worst = made.task.worst(plan.micro_batch)
    for _ in range(3 * plan.accumulation):
        batch = probe.worst_batch(made, plan.micro_batch, worst)
        terms = made.task.losses(made.engine(**batch["inputs"]), batch, max(1, made.task.count(batch)))
        engine.backward_and_step(made.engine, sum(terms.values()))
        del batch, terms
    found[" ".join(words[-3:])] = [left, probed, torch.cuda.max_memory_allocated()]
    engine.discard(made.engine)
    del made
print("RESULT", json.dumps(found))
"""
COMMON = [
    "hardware=h200_single", "task=detection", "model=grounding_dino_tiny", "model.pretrained=null", "data.canvas=[512,512]",
    "data.image_size=[512,512]", "data.counts={train: 8, val: 2}", "train.workers=0", "tracker=none", "train.micro_batch=1",
    "train.effective_batch=4",
]  # fmt: skip
CASES = [
    ["zero=stage0", "offload=none", "precision=fp32"],
    ["zero=stage1", "offload=none", "precision=bf16"],
    ["zero=stage2", "offload=none", "precision=fp16"],
    ["zero=stage2", "offload=optimizer", "precision=bf16_autocast"],
    ["zero=stage3", "offload=none", "precision=fp32"],
    ["zero=stage3", "offload=optimizer_and_params", "precision=bf16"],
]


def results(cases: list[list[str]], folder: Path) -> dict:
    (folder / "probed.py").write_text(SCRIPT)
    words = [[f"data.root={folder / 'set'}", *COMMON, *case] for case in cases]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    ended = run([sys.executable, "probed.py", json.dumps(words)], folder, timeout=500, PYTHONPATH=path).assert_done()
    return json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])


def test_a_probe_takes_what_a_step_takes_and_gives_it_back(tmp_path: Path):
    found = results(CASES, tmp_path)
    assert len(found) == len(CASES)
    for case, (left, probed, trained) in found.items():
        assert left < 2**27, (case, left)  # cuBLAS keeps its workspace
        assert 0.99 * trained <= probed, (case, probed, trained)  # more where evaluation takes more


def test_a_cap_is_met_in_the_probe(tmp_path: Path):
    (said,) = results([[*CASES[0], "hardware.memory_limit_gib=3"]], tmp_path).values()
    assert said == "out of memory"
