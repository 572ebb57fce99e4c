"""Which checkpoint is meant, and what may differ from the configuration it was written under."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gdino_lab import checkpoint, checkpoint_folder, resume
from gdino_lab.commands.main import composed
from gdino_lab.errors import ConfigurationError
from gdino_lab.plan import make_plan
from gdino_lab.run_folder import RunFolder, write_json
from gdino_lab.settings import as_dict, flat
from tests.test_checkpoint_folder import made


def written(run: Path, *words: str, step: int = 4, state: str = "failed", images: int = 64) -> Path:
    """A run with a checkpoint of the configuration `words`, that ended as `state`."""
    settings = composed(*words)
    path = made(run / "checkpoints", step)
    trainer_state = {
        "progressed": {"step": step},
        "settings": as_dict(settings),
        "plan": make_plan(settings, images, settings.hardware.devices).as_dict(),
        "versions": checkpoint.versions(),
    }
    entry = checkpoint_folder.write_bytes(path / "trainer.json", [memoryview(json.dumps(trainer_state).encode())])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["trainer.json"] = entry
    write_json(path / "manifest.json", manifest)
    RunFolder(run).write_status(state, pid=2**22 + 1, host=socket.gethostname())
    return path


def compared(path: Path, *words: str, images: int = 64) -> tuple[list[str], list[str]]:
    settings = composed(*words)
    plan = make_plan(settings, images, settings.hardware.devices).as_dict()
    start = resume.Start(path)
    complaints, notices = resume.compare(start, as_dict(settings), plan)
    more, said = resume.extension(start, plan, settings)
    return complaints + more, notices + said


# --- which one --------------------------------------------------------------------------------------------------------


def test_a_run_means_its_newest_whole_checkpoint_and_says_why(tmp_path: Path):
    older, newer = written(tmp_path, step=4), written(tmp_path, step=8)
    start, said = resume.checkpoint_at("train.resume", tmp_path)
    assert (start.folder, start.step, said) == (newer.resolve(), 8, [])
    (newer / "state_1-000.safetensors").write_bytes(b"short")
    start, said = resume.checkpoint_at("train.resume", tmp_path)
    assert start.folder == older.resolve()
    assert "state_1-000.safetensors" in said[0] and "older checkpoint is taken" in said[0]
    with pytest.raises(ConfigurationError, match="state_1-000.safetensors: has 5 bytes"):
        resume.checkpoint_at("train.resume", newer)
    for name in ("manifest.json", "trainer.json"):
        (older / name).unlink()
    with pytest.raises(ConfigurationError, match="no whole checkpoint there"):
        resume.checkpoint_at("train.resume", tmp_path)


def test_a_last_that_lags_behind_is_told(tmp_path: Path):
    older, newer = written(tmp_path, step=4), written(tmp_path, step=8)
    checkpoint_folder.point(tmp_path / "checkpoints" / "last", older)
    start, said = resume.checkpoint_at("train.resume", tmp_path)
    assert start.folder == newer.resolve() and "its run died between the two" in said[0]


def test_auto_takes_the_newest_unfinished_run_of_this_configuration(tmp_path: Path):
    runs = tmp_path / "runs"
    for number, (words, state) in enumerate(
        [((), "failed"), ((), "interrupted"), (("train.seed=7",), "failed"), ((), "completed"), ((), "running")]
    ):
        run = runs / "day" / f"run{number}"
        written(run, *words, state=state)
        os.utime(run / "status.json", (number, number))
    status = json.loads((runs / "day" / "run4" / "status.json").read_text())
    write_json(runs / "day" / "run4" / "status.json", status | {"pid": os.getpid()})  # still going on
    os.utime(runs / "day" / "run4" / "status.json", (4, 4))
    start, said = resume.find("auto", runs, composed())
    assert start.run == (runs / "day" / "run1").resolve() and "goes on with" in said[0]
    start, _ = resume.find("auto", runs, composed("train.seed=7", "train.log_every=3", "train.epochs=9"))
    assert start.run.name == "run2"
    start, said = resume.find("auto", runs, composed("train.seed=8"))
    assert start is None and "starts afresh" in said[-1]
    assert resume.find("none", runs, composed()) == (None, [])


# --- what differs -----------------------------------------------------------------------------------------------------


def test_nothing_differs_from_itself(tmp_path: Path):
    assert compared(written(tmp_path)) == ([], [])


@pytest.mark.parametrize("word", ["train.epochs=50", "train.log_every=1", "train.workers=2", "tracker=none", "train.keep=5"])
def test_what_training_does_not_compute_may_change_and_is_told(tmp_path: Path, word: str):
    complaints, notices = compared(written(tmp_path), word)
    assert not complaints and any(word.split("=")[0] in notice and "->" in notice for notice in notices)


@pytest.mark.parametrize("words", [["zero=stage2", "offload=optimizer"], ["hardware=cpu_dual", "train.micro_batch=4"], ["activations=recompute"]])
def test_where_it_is_computed_may_change_and_is_told(tmp_path: Path, words: list[str]):
    complaints, notices = compared(written(tmp_path), *words)
    assert not complaints and any("the same training but for rounding" in notice for notice in notices)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train.seed=1"], "train.seed"),
        (["train.effective_batch=16", "train.micro_batch=8"], "train.effective_batch"),
        (["precision=bf16"], "precision"),
        (["optimizer.lr=1e-6"], "optimizer.lr"),
        (["data.seed=3"], "data"),
        (["schedule=constant"], "schedule"),
        (["train.ema_decay=0.9"], "train.ema_decay"),
    ],
)
def test_what_changes_the_result_is_refused_unless_asked_for(tmp_path: Path, words: list[str], key: str):
    path = written(tmp_path)
    complaints, _ = compared(path, *words)
    assert complaints and all(key in complaint for complaint in complaints)
    assert "train.resume_allow=[" in complaints[0] and "train.resume_weights=" in complaints[0]
    complaints, notices = compared(path, *words, f"train.resume_allow=[{key}]")
    assert not complaints and any("as asked for" in notice for notice in notices)


@pytest.mark.parametrize("words", [["tuning=lora"], ["model=grounding_dino_tiny"]])
def test_another_model_is_refused_with_the_way_out(tmp_path: Path, words: list[str]):
    complaints, _ = compared(written(tmp_path), *words, "train.resume_allow=[model, tuning, data]")
    assert complaints and all("train.resume_weights=" in complaint for complaint in complaints)


def test_other_images_and_other_versions_are_noticed(tmp_path: Path):
    path = written(tmp_path, images=64)
    complaints, _ = compared(path, images=72)
    assert "64 training images then, 72 now" in complaints[0]
    stored = resume.Start(path)
    stored.trainer_state["versions"]["torch"] = "1.0"
    settings = composed()
    _, notices = resume.compare(stored, as_dict(settings), make_plan(settings, 64, 1).as_dict())
    assert any("version of torch: 1.0 ->" in notice for notice in notices)


def test_every_setting_has_one_kind():
    keys = flat(as_dict(composed()))
    assert {resume.kind_of(key) for key in keys} == {"free", "elsewhere", "model", "result"}
    for each in (*resume.FREE, *resume.ELSEWHERE):
        assert any(resume.below(key, (each,)) for key in keys) or each in ("plan", "ladder", "tracker"), each


# --- more steps -------------------------------------------------------------------------------------------------------


def test_more_epochs_stretch_the_schedule_or_keep_it_as_written(tmp_path: Path):
    path = written(tmp_path, "schedule=constant")
    _, notices = compared(path, "schedule=constant", "train.epochs=50")
    assert any("as if 400 steps had been asked for from the start, not 40" in notice for notice in notices)
    settings = composed("schedule=constant", "train.epochs=50", "train.resume_schedule=as_written")
    plan = make_plan(settings, 64, 1, schedule_steps=40)
    assert (plan.total_steps, plan.schedule_steps, plan.warmup_steps) == (400, 40, round(40 * settings.schedule.warmup_fraction))
    complaints, notices = resume.extension(resume.Start(path), plan.as_dict(), settings)
    assert not complaints and "as written for 40 steps" in notices[0]
    cosine = replace(settings, schedule=composed("schedule=cosine").schedule)
    complaints, _ = resume.extension(resume.Start(path), plan.as_dict(), cosine)
    assert "ends at a learning rate of 0" in complaints[0] and "stretch" in complaints[0]


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path):
    complaints, _ = compared(written(tmp_path, step=12), "train.epochs=1")
    assert "has taken 12" in complaints[0]
