"""A rank, or one of two, of test_checkpoint.py: each case is trained, stored on the way, and gone on from in another engine.

    python tests/resumed.py OUT CASES      under torch.distributed.run, or alone; CASES: a JSON list of [words, words after]
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from gdino_lab import checkpoint, engine, trainer
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.pieces import pieces
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import composed

BEFORE, AFTER = 2, 2  # steps
IMAGES = 16


def built(words: list[str], folder: RunFolder) -> trainer.Run:
    settings = composed(*words)
    if dist.get_rank() == 0:
        instantiate(settings.data).prepare()
    dist.barrier()
    plan = make_plan(settings, IMAGES, dist.get_world_size())
    return trainer.build(settings, plan, folder, lambda: False, Phases())


def taken(run: trainer.Run, done: int, steps: int) -> list[float]:
    """Losses of `steps` steps after `done`, means over the ranks."""
    dataset = run.task.train_set()
    sampler = EpochSampler(dataset, dist.get_rank(), run.plan.world_size, run.settings.train.seed, shuffle=True)
    sampler.set_position(0, start=done * run.plan.accumulation * run.plan.micro_batch)
    batches = loader(dataset, sampler, run.plan.micro_batch, 0, run.task.collate, False)
    losses = []
    for terms in trainer.steps(run, batches, steps):
        loss = sum(terms.values()).double()
        dist.all_reduce(loss)
        losses.append(loss.item() / run.plan.world_size)
    return losses


def state_of(run: trainer.Run) -> dict[str, str]:
    """A digest of every piece that this rank stores, and of its random generators."""
    found = {f"{each.kind}:{each.name}:{each.start}": each.values for each in pieces(run.engine, run.average) if each.mine}
    found |= {name: values for name, values in checkpoint.random_state().items()}
    return {name: hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for name, values in found.items()}


def case(words: list[str], words_after: list[str]) -> dict:
    scratch = [tempfile.mkdtemp()]
    dist.broadcast_object_list(scratch, src=0)
    folder = RunFolder(Path(scratch[0]))
    first = built(words, folder)
    before = taken(first, 0, BEFORE)
    trainer.save(first, trainer.Progressed(step=BEFORE), evaluation=None)
    stored = state_of(first)
    went_on = taken(first, BEFORE, AFTER)  # while the checkpoint is being written
    first.writer.wait()
    ended = state_of(first)
    engine.discard(first.engine)
    del first
    gc.collect()

    (path,) = checkpoint.written(folder.checkpoints)
    checkpoint.verify(path)
    second = built([*words, *words_after], folder)
    trainer.go_on(second, path)
    restored = state_of(second)
    resumed = taken(second, BEFORE, AFTER)
    ended_too = state_of(second)
    result = {
        "before": before,
        "went_on": went_on,
        "resumed": resumed,
        "restored": sorted(name for name in stored if stored[name] != restored.get(name)),
        "ended": sorted(name for name in ended if ended[name] != ended_too.get(name)),
        "kinds": sorted({name.split(":")[0] for name in stored}),
        "counted": [second.engine.global_steps, second.engine.micro_steps],
    }
    engine.discard(second.engine)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder.path)
    return result


def main(out: Path, cases: list) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    engine.start_distributed("cpu")
    found = [case(*each) for each in cases]
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, found)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(shares))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
