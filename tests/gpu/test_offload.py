"""The optimizer on the host takes the steps that it takes on the GPU: nothing is read there before it has arrived."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import run
from tests.gpu.test_checkpoint import COMMON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCRIPT = """
import json, sys
from pathlib import Path

from gdino_lab import engine
from gdino_lab.run_folder import RunFolder
from tests import resumed
from tests.conftest import become_a_lone_rank

become_a_lone_rank()
engine.start_distributed("cuda")
found = []
for words in json.loads(sys.argv[1]):
    made = resumed.built(words, RunFolder(Path("run")))
    found.append([loss for _ in range(10) for loss in resumed.taken(made, 0, 3)] + [engine.step_report(made.engine)["skipped_steps"]])
    engine.discard(made.engine)
    del made
print("RESULT", json.dumps(found))
"""
PRECISIONS = {"fp32": 1e-3, "fp16_autocast": 1e-2}


def test_offload_changes_no_step(tmp_path: Path):
    (tmp_path / "offload.py").write_text(SCRIPT)
    twice = [["zero=stage2", "offload=optimizer"]] * 2
    ways = [["zero=stage2", "offload=none"], *twice, ["zero=stage3", "offload=optimizer_and_params"]]
    words = [
        [f"data.root={tmp_path / 'set'}", *COMMON, f"precision={precision}", *way] for precision in PRECISIONS for way in ways
    ]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = run([sys.executable, "offload.py", json.dumps(words)], tmp_path, PYTHONPATH=path).assert_done()
    found = json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])
    for number, tolerance in enumerate(PRECISIONS.values()):
        plain, *offloaded = found[number * len(ways) : (number + 1) * len(ways)]
        for losses in offloaded:
            off = max(abs(a / b - 1) for a, b in zip(losses[:-1], plain[:-1], strict=True))
            print(f"{list(PRECISIONS)[number]}: {off:.2e} apart, skipped {losses[-1]} and {plain[-1]}")
            assert off <= tolerance and losses[-1] == plain[-1]
