"""Steps that overflow, and what a checkpoint says of the moment it is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL, run

SAVING = """
import json, sys, threading, time
from pathlib import Path
import torch
from gdino_lab import checkpoint, checkpoint_folder, engine, trainer
from gdino_lab.run_folder import RunFolder, read_json
from tests.conftest import become_a_lone_rank
from tests.resumed import built

become_a_lone_rank()
engine.start_distributed("cpu")
made = built(json.loads(sys.argv[1]), RunFolder(Path("run")))
order, sets, answered = [], made.task.evaluation_set, trainer.digest
split, copies, asked = checkpoint.on_gpu_until_a_step, checkpoint.copies_on_host, threading.Event()


def opened():
    order.append("image read")
    return sets()


def answering(run):
    order.append("asked")
    asked.set()
    return answered(run)


def everything_steady(*arguments):  # as on a GPU
    steady, changing = split(*arguments)
    return steady | changing, {}


def slowly(values, now=None):
    if values:
        asked.wait()
        time.sleep(0.2)  # in which a step that did not wait would be taken
        order.append("copied")
    return copies(values, now)


def step_twice():
    dataset = made.task.train_set()
    passes = [made.task.collate([dataset[0, index]]) for index in range(2 * made.plan.accumulation)]
    for _ in trainer.steps(made, iter(passes), 2):
        order.append("step")


def newest():
    return checkpoint_folder.written(made.folder.checkpoints)[0]


made.task.evaluation_set, trainer.digest = opened, answering
checkpoint.on_gpu_until_a_step, checkpoint.copies_on_host = everything_steady, slowly
kept = []
for step in (1, 2):
    made.meter.epoch = [float(step)]
    before = answered(made), {name: each.detach().clone() for name, each in made.engine.module.named_parameters()}
    asked.clear()
    trainer.save(made, trainer.Progressed(step), evaluation=None)
    order.append("saved")
    made.meter.epoch.append(-1.0)  # as training does while the checkpoint is being written
    step_twice()
    made.writer.wait()
    stored = read_json(newest() / "trainer.json")
    kept.append([stored["progressed"]["step"], stored["epoch_losses"]])
    assert checkpoint_folder.answers_of(newest()) == before[0] != answered(made)
    with checkpoint_folder.Stored(newest()) as tensors:
        for name, each in before[1].items():
            assert torch.equal(tensors.read("weight", name, 0, each.numel()), each.view(-1)), name
trainer.save(made, trainer.Progressed(3), evaluation=None)
made.writer.linger()  # the run dies before its next step
checkpoint_folder.verify(newest())
unanswered = newest()
warned = []
trainer.log.warning = lambda said, *_: warned.append(said)
trainer.prove(made, read_json(unanswered / "trainer.json") | {"answers": checkpoint_folder.answers_of(unanswered)})
made.writer.before_step()
made.writer.wait()
add = checkpoint.add_answers
checkpoint.add_answers = lambda *arguments: (time.sleep(0.3), add(*arguments))
asked.clear()
trainer.save(made, trainer.Progressed(4), evaluation=None)
made.writer.before_step()
made.writer.linger()  # the run dies in a later step, while answers are being added
assert checkpoint_folder.answers_of(newest()) == answered(made)
print("RESULT", json.dumps({"order": order, "kept": kept, "warned": warned}))
"""

BUILDING = """
import json, sys
from pathlib import Path
from gdino_lab import engine, trainer
from gdino_lab.commands.main import composed
from gdino_lab.models.not_finite import NotFinite
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import become_a_lone_rank

become_a_lone_rank()
engine.start_distributed("cpu")


def built(words, weights, autocast):
    settings = composed(*words)
    settings.precision.weights, settings.precision.autocast = weights, autocast  # fp16 is refused on a CPU, where it is slow
    instantiate(settings.data).prepare()
    return trainer.build(settings, make_plan(settings, 16, 1), RunFolder(Path("run")), lambda: False, Phases())


words = json.loads(sys.argv[1])
"""

OVERFLOWING = BUILDING + """
found = []
for autocast in (None, "fp16"):
    made = built(words, "fp32", autocast)
    if autocast:
        engine.set_autocast_scale(made.engine, 2.0**40)
    dataset, read = made.task.train_set(), []

    def batches():
        for index in range(100):
            read.append(index)
            yield made.task.collate([dataset[0, index % 16]])

    losses = [sum(terms.values()).item() for terms in trainer.steps(made, batches(), 4)]
    counts = [len(read), trainer.this_step(made) - 1, made.average.updates, made.engine.lr_scheduler.last_epoch]
    found.append([losses, counts, engine.step_report(made.engine)["skipped_steps"]])
print("RESULT", json.dumps(found))
"""


def told(script: str, words: list[str], folder: Path, *more: str) -> Any:
    root = str(Path(__file__).parents[1])
    ended = run([sys.executable, "-c", script, json.dumps(words), *more], folder, PYTHONPATH=root).assert_done()
    return json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_that_overflowed_is_taken_again_with_the_same_images(stage: int, tmp_path: Path, small_set: Path):
    words = [*SMALL, f"data.root={small_set}", f"zero=stage{stage}", "train.micro_batch=1", "train.effective_batch=2"]
    plain, half = told(OVERFLOWING, [*words, "train.ema_decay=0.5"], tmp_path)
    assert half[0] == pytest.approx(plain[0], rel=0.02) and len(set(plain[0])) == 4
    assert half[1] == plain[1] == [8, 4, 4, 4]  # batches, steps, averages, the schedule's steps
    assert half[2] > 5 and plain[2] == 0


POISONED = BUILDING + """
found = {}
cases = ((0, "fp32", None), (0, "fp32", "fp16"), (2, "fp32", None), (2, "bf16", None), (3, "fp32", "fp16"))
for stage, weights, autocast in cases:
    made = built([*words, f"zero=stage{stage}"], weights, autocast)
    honest, dataset = made.task.losses, made.task.train_set()

    def poisoned(*arguments):
        terms = honest(*arguments)
        return terms | {"poison": (0 * sum(terms.values())).sqrt()}  # itself 0, its gradient NaN

    made.task.losses = poisoned
    try:
        list(trainer.steps(made, iter([made.task.collate([dataset[0, index]]) for index in range(4)]), 4))
    except NotFinite as error:
        found[f"{stage} {weights} {autocast}"] = [error.figures["what"], error.figures["step"], error.figures["identity"]]
    engine.discard(made.engine)
print("RESULT", json.dumps(found))
"""


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_in_every_precision(tmp_path: Path, small_set: Path):
    words = [*SMALL, f"data.root={small_set}", "train.micro_batch=1", "train.effective_batch=1", "train.clip_norm=0"]
    found = told(POISONED, words, tmp_path)
    assert len(found) == 5
    for case, (what, step, identity) in found.items():
        # At stage 0 DeepSpeed does not look at gradients: the weights break, and the next loss.
        assert (what, step) == (("loss", 2) if case == "0 fp32 None" else ("gradient", 1)), case
        assert identity != "[]"


IN_TURN = BUILDING + """
found = {}
for stage, weights, autocast in json.loads(sys.argv[2]):
    made = built([*words, f"zero=stage{stage}"], weights, autocast)
    dataset = made.task.train_set()
    taken = trainer.steps(made, iter([made.task.collate([dataset[0, index]]) for index in range(3)]), 3)
    losses = [sum(terms.values()).item() for terms in taken]
    found[f"{stage} {weights} {autocast}"] = [losses, engine.loss_scale(made.engine)]
    engine.discard(made.engine)
print("RESULT", json.dumps(found))
"""


@pytest.mark.slow
def test_an_engine_takes_the_same_steps_whatever_engine_was_before_it_in_the_process(tmp_path: Path, small_set: Path):
    cases = [(3, "fp32", "fp16"), (2, "bf16", None), (1, "fp32", None), (0, "fp32", "bf16")]
    words = [*SMALL, f"data.root={small_set}", "train.micro_batch=1", "train.effective_batch=1"]
    forwards, backwards = (told(IN_TURN, words, tmp_path, json.dumps(order)) for order in (cases, cases[::-1]))
    assert forwards == backwards and len(forwards) == len(cases)
    assert [scale is not None for _, scale in forwards.values()] == [True, False, False, False]


@pytest.mark.slow
def test_what_is_stored_is_of_the_moment_of_the_save_though_copied_and_answered_later(tmp_path: Path, small_set: Path):
    found = told(SAVING, [*SMALL, f"data.root={small_set}"], tmp_path)
    once = ["saved", "asked", "copied", "step", "step"]
    assert found["order"] == ["image read", *once, *once, "copied", "asked", "asked", "copied"]
    assert found["kept"] == [[1, [1.0]], [2, [2.0]]]
    assert len(found["warned"]) == 1 and "has no outputs to compare with" in found["warned"][0]
