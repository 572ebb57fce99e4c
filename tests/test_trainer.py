"""Steps that overflow, and what a checkpoint says of the moment it is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL, run

SAVING = """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from gdino_lab import checkpoint, checkpoint_folder, engine, trainer
from gdino_lab.run_folder import RunFolder, read_json
from tests.conftest import become_a_lone_rank
from tests.resumed import built

become_a_lone_rank()
engine.start_distributed("cpu")
made = built(json.loads(sys.argv[1]), RunFolder(Path("run")))
order, sets = [], made.task.evaluation_set
copied, answered = checkpoint.copied_to_host, trainer.digest


def opened():
    order.append("image read")
    return sets()


def answering(run):
    order.append("asked")
    return answered(run)


@contextmanager
def copying(*arguments):
    with copied(*arguments) as copies:
        order.append("copying")
        yield copies
    order.append("copied")


made.task.evaluation_set, trainer.digest, checkpoint.copied_to_host = opened, answering, copying
answers = []
for step in (1, 2):
    made.meter.epoch = [float(step)]
    trainer.save(made, trainer.Progressed(step), evaluation=None)
    made.meter.epoch.append(-1.0)  # as training does while the checkpoint is being written
    made.writer.wait()
    kept = read_json(checkpoint_folder.written(made.folder.checkpoints)[0] / "trainer.json")
    answers.append([kept["progressed"]["step"], kept["epoch_losses"], kept["proof"]["digest"] == answered(made)])
print("RESULT", json.dumps({"order": order, "kept": answers}))
"""

BUILDING = """
import json, sys
from pathlib import Path
from gdino_lab import engine, trainer
from gdino_lab.models.not_finite import NotFinite
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder
from gdino_lab.settings import instantiate
from gdino_lab.usage import Phases
from tests.conftest import become_a_lone_rank, composed

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
def test_answers_are_asked_for_while_the_state_is_copied_and_the_image_read_once(tmp_path: Path, small_set: Path):
    found = told(SAVING, [*SMALL, f"data.root={small_set}"], tmp_path)
    assert found["order"] == ["copying", "asked", "image read", "copied", "copying", "asked", "copied"]
    assert found["kept"] == [[1, [1.0], True], [2, [2.0], True]]
