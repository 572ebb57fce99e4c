"""What a checkpoint says of the moment it is saved: asked for while the state is copied, kept when training goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL, run

SCRIPT = """
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


@pytest.mark.slow
def test_answers_are_asked_for_while_the_state_is_copied_and_the_image_read_once(tmp_path: Path, small_set: Path):
    words = [*SMALL, f"data.root={small_set}"]
    root = str(Path(__file__).parents[1])
    ended = run([sys.executable, "-c", SCRIPT, json.dumps(words)], tmp_path, PYTHONPATH=root).assert_done()
    found = json.loads(next(line for line in ended.out.splitlines() if line.startswith("RESULT"))[7:])
    assert found["order"] == ["copying", "asked", "image read", "copied", "copying", "asked", "copied"]
    assert found["kept"] == [[1, [1.0], True], [2, [2.0], True]]
