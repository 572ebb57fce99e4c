"""A rank, or one of two, of test_checkpoint.py: each case is trained, stored on the way, and gone on from in another engine.

    python tests/resumed.py OUT CASES [DEVICE]     under torch.distributed.run, or alone

CASES: a JSON list of {words, words_after, folder[, before, scored]}: overrides, those of the engine that goes on, where the checkpoint
lies, the steps before it, and whether it holds a score. With words null only the second half is done, with words_after null only
the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gdino_lab import checkpoint, checkpoint_folder, engine, trainer
from gdino_lab.commands.main import composed
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.pieces import pieces
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder, read_json
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import become_a_lone_rank

AFTER = 2  # steps
NOT_YET = -1.0
IMAGES = 16


def built(words: list[str], folder: RunFolder) -> trainer.Run:
    settings = composed(*words)
    if dist.get_rank() == 0:
        instantiate(settings.data).prepare()
    dist.barrier()
    plan = make_plan(settings, IMAGES, dist.get_world_size())
    return trainer.build(settings, plan, folder, lambda: False, Phases())


def taken(run: trainer.Run, done: int, steps: int) -> Iterator[float]:
    """Takes `steps` steps after `done`; the loss of each, mean over the ranks."""
    dataset = run.task.train_set()
    sampler = EpochSampler(dataset, dist.get_rank(), run.plan.world_size, run.settings.train.seed, shuffle=True)
    sampler.set_position(0, start=done * run.plan.accumulation * run.plan.micro_batch)
    batches = loader(dataset, sampler, run.plan.micro_batch, 0, run.task.collate, False)
    for terms in trainer.steps(run, batches, steps):
        loss = sum(terms.values()).double()
        dist.all_reduce(loss)
        yield loss.item() / run.plan.world_size


def state_of(run: trainer.Run) -> dict[str, str]:
    """A digest of every piece that this rank stores, and of its random generators."""
    found = {f"{each.kind}:{each.name}:{each.start}": each.values for each in pieces(run.engine, run.average) if each.mine}
    found |= {name: values for name, values in checkpoint.random_state().items()}
    return {name: digest(values) for name, values in found.items()}


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def case(words: list[str] | None, words_after: list[str] | None, folder: str, before: int = 2, scored: bool = False) -> dict:
    run_folder = RunFolder(Path(folder))
    result = {} if words is None else trained(words, run_folder, before, scored)
    if words_after is None:
        return result
    (path,) = checkpoint_folder.written(run_folder.checkpoints)
    checkpoint_folder.verify(path)
    assert NOT_YET not in read_json(path / checkpoint_folder.TRAINER)["epoch_losses"]
    second = gone_on([*(words or []), *words_after], run_folder, path, before)
    result |= {"resumed": second["losses"], "counted": second["counted"]}
    for state in ("stored", "ended"):
        result[state] = differing(result[state], second[state]) if state in result else None
    if torch.cuda.is_available():  # how far a machine that adds in another order each time is from itself
        result["again"] = gone_on([*(words or []), *words_after], run_folder, path, before)["losses"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(run_folder.path)
    return result


def trained(words: list[str], folder: RunFolder, steps: int, scored: bool) -> dict:
    run = built(words, folder)
    losses = taken(run, 0, steps + AFTER)
    before = [next(losses) for _ in range(steps)]
    with run.averaged():
        evaluation = trainer.evaluate(run) if scored else None
    stored = state_of(run)  # before the save, so that nothing waits for it to be copied
    trainer.save(run, trainer.Progressed(step=steps), evaluation)
    run.meter.epoch.append(NOT_YET)  # as training does while the checkpoint is being written
    run.engine.train()
    went_on = list(losses)  # while the checkpoint is being written
    run.writer.wait()
    ended = state_of(run)
    engine.discard(run.engine)
    kinds = sorted({name.split(":")[0] for name in stored})
    return {"before": before, "went_on": went_on, "stored": stored, "ended": ended, "kinds": kinds}


def gone_on(words: list[str], folder: RunFolder, path: Path, before: int) -> dict:
    run = built(words, folder)
    trainer.go_on(run, path)
    found = {"stored": state_of(run), "losses": list(taken(run, before, AFTER)), "ended": state_of(run)}
    found["counted"] = [run.engine.global_steps, run.engine.micro_steps]
    engine.discard(run.engine)
    return found


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one if one[name] != other.get(name))


def main(out: Path, cases: list, device: str = "cpu") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        become_a_lone_rank()
    engine.start_distributed(device)
    found = [case(**each) for each in cases]
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, found)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(shares))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
    os._exit(0)  # with so many engines in one process the interpreter's end has aborted, once in some 25 times on two ranks
