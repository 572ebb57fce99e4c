"""The worst case first: a probed run is the same to the last bit, and nothing of the probe stays in memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL, run

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# Each setting twice in one process, without a probe and with one: losses, scale and weights after two steps.
SCRIPT = """
import gc, hashlib, json, sys, warnings
from pathlib import Path
import torch

warnings.simplefilter("ignore")
from gdino_lab import engine, probe, trainer
from gdino_lab.commands.main import composed
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import become_a_lone_rank

become_a_lone_rank()
engine.start_distributed("cpu")


def tensor_bytes():
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def trained(settings, probed):
    plan = make_plan(settings, 16, 1)
    folder = RunFolder(Path("run"))
    left = 0
    if probed:
        before = tensor_bytes()
        probe.probe(settings, plan, folder, lambda doing, step=0: None)
        left = tensor_bytes() - before
    made = trainer.build(settings, plan, folder, lambda: False, Phases())
    dataset = made.task.train_set()
    sampler = EpochSampler(dataset, 0, 1, 0, shuffle=True)
    batches = loader(dataset, sampler, plan.micro_batch, 0, made.task.collate, False)
    losses = [{name: term.item().hex() for name, term in terms.items()} for terms in trainer.steps(made, batches, 2)]
    weights = engine.whole_weights(made.engine)
    digest = hashlib.sha256(b"".join(weights[name].float().numpy().tobytes() for name in sorted(weights))).hexdigest()
    counted = [made.engine.micro_steps, made.engine.global_steps, engine.step_report(made.engine).get("loss_scale")]
    random = torch.random.get_rng_state().tolist()
    engine.discard(made.engine)
    return [losses, digest, counted, random], left


found = {}
for words in json.loads(sys.argv[1]):
    settings = composed(*words)
    instantiate(settings.data).prepare()
    plain, _ = trained(settings, False)
    probed, left = trained(settings, True)
    found[" ".join(words[-3:])] = [plain == probed, plain[2], left]
print("RESULT", json.dumps(found))
"""

ANOMALY = [word for word in SMALL if not word.startswith("train.log")]
DETECTION = [
    "task=detection", "data.canvas=[48,64]", "data.image_size=[64,96]", "data.counts={train: 16, val: 4}", "tracker=none",
    "train.micro_batch=2", "train.effective_batch=4",
]  # fmt: skip
CASES = [
    [*ANOMALY, "zero=stage0", "offload=none", "train.ema_decay=0.9"],
    [*ANOMALY, "zero=stage1", "offload=none", "precision=bf16"],
    [*ANOMALY, "zero=stage2", "offload=optimizer", "precision=bf16_autocast"],
    [*DETECTION, "zero=stage3", "offload=optimizer_and_params", "activations=recompute"],
]


def test_a_probe_leaves_no_trace(tmp_path: Path, small_set: Path):
    script = tmp_path / "probed.py"
    script.write_text(SCRIPT)
    cases = [[f"data.root={small_set / ('boxes' if case[0] == 'task=detection' else 'loco')}", *case] for case in CASES]
    command = [sys.executable, str(script), json.dumps(cases)]
    ended = run(command, tmp_path, PYTHONPATH=str(Path(__file__).parents[1])).assert_done()
    found = json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])
    assert len(found) == len(CASES)
    for case, (same, counted, left) in found.items():
        assert same, case
        assert counted[:2] == [4, 2]
        assert left < 2**17, (case, left)
