"""Which checkpoint is meant, and what may differ from the configuration it was written under."""

from __future__ import annotations

import errno
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
        written(run, *words, state=state, step=40 if state == "completed" else 4)
        os.utime(run / "status.json", (number, number))
    RunFolder(runs / "day" / "run4").write_status("running", **resume.this_process())
    os.utime(runs / "day" / "run4" / "status.json", (4, 4))
    start, said = resume.find("auto", runs, composed())
    assert start.run == (runs / "day" / "run1").resolve() and "goes on with" in said[0]
    start, _ = resume.find("auto", runs, composed("train.seed=7", "train.log_every=3", "train.epochs=9"))
    assert start.run.name == "run2"
    start, said = resume.find("auto", runs, composed("train.seed=8"))
    assert start is None and "starts afresh" in said[-1]
    assert resume.find("none", runs, composed()) == (None, [])


def test_auto_takes_a_completed_run_where_more_is_asked_for(tmp_path: Path):
    written(tmp_path / "day" / "run", state="completed", step=40)
    assert composed().train.epochs == 5  # of 64 images in batches of 8
    for words, found in (([], False), (["train.epochs=6"], True), (["train.epochs=6", "train.max_steps=40"], False)):
        assert (resume.find("auto", tmp_path, composed(*words))[0] is not None) == found, words


def test_auto_with_run_dir_means_the_run_there(tmp_path: Path):
    written(tmp_path / "day" / "run")
    place = tmp_path / "place"
    assert resume.find("auto", tmp_path, composed(f"run_dir={place}"))[0] is None
    written(place)
    assert resume.find("auto", tmp_path, composed(f"run_dir={place}"))[0].run == place
    assert resume.find("auto", tmp_path, composed(f"run_dir={place}", "train.seed=3"))[0] is None


@pytest.mark.parametrize(
    ("changed", "running"),
    [({}, True), ({"pid": 2**22 + 1}, False), ({"process_began": 1.0}, False), ({"host": "another"}, False), ({"state": "failed"}, False)],
)
def test_a_process_is_known_by_when_it_began_since_its_number_comes_again(tmp_path: Path, changed: dict, running: bool):
    write_json(tmp_path / "status.json", {"state": "running"} | resume.this_process() | changed)
    assert resume.is_running(tmp_path) == running


def test_nothing_is_saved_of_a_run_that_stopped_before_its_first_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path)
    for state, alone in (("failed", True), ("completed", False)):
        folder.write_status(state)
        assert resume.nothing_saved(tmp_path) == alone
    folder.write_status("running", **resume.this_process())
    assert not resume.nothing_saved(tmp_path)
    written(tmp_path)
    assert not resume.nothing_saved(tmp_path)


# --- another folder ---------------------------------------------------------------------------------------------------


def run_with_best(run: Path, best: int, last: int) -> Path:
    """A run with a model and checkpoints of two steps; returns the later one."""
    paths = {step: written(run, step=step) for step in sorted((best, last))}
    for link, step in (("best", best), ("last", last)):
        checkpoint_folder.point(run / "checkpoints" / link, paths[step])
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    return paths[last]


def new_folder(place: Path) -> RunFolder:
    (place / "checkpoints").mkdir(parents=True)
    return RunFolder(place)


def test_a_run_in_another_folder_has_what_it_goes_on_from_and_the_best(tmp_path: Path):
    newest = run_with_best(tmp_path / "old", best=4, last=8)
    new = new_folder(tmp_path / "new")
    for _ in range(2):  # again, where the first try was stopped
        assert resume.bring(resume.Start(newest.resolve()), new) == []
        start, said = resume.newest_whole(new.checkpoints)
        assert (start.step, said) == (8, [])
        assert checkpoint_folder.best_until(8, new.checkpoints).name == "step_00000004"
        assert (new.model / "config.json").is_file() and not list(new.path.rglob(".*"))


def test_a_best_of_later_steps_or_that_is_damaged_stays_behind(tmp_path: Path):
    first = run_with_best(tmp_path / "old", best=8, last=4)
    new = new_folder(tmp_path / "new")
    assert resume.bring(resume.Start(first.resolve()), new) == []
    assert sorted(path.name for path in new.checkpoints.iterdir()) == ["last", "step_00000004"] and not new.model.exists()
    newest = run_with_best(tmp_path / "damaged", best=4, last=8)
    (newest.parent / "best" / "state_0-000.safetensors").write_bytes(b"short")
    (said,) = resume.bring(resume.Start(newest.resolve()), new_folder(tmp_path / "third"))
    assert "left behind" in said and "state_0-000.safetensors: has 5 bytes" in said


def test_what_cannot_be_brought_leaves_nothing_and_is_one_message(tmp_path: Path, monkeypatch):
    newest = run_with_best(tmp_path / "old", best=4, last=8)
    new = new_folder(tmp_path / "new")

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "link_or_copy", fails)
        with pytest.raises(ConfigurationError, match="cannot be brought there: .*No space left on device"):
            resume.bring(resume.Start(newest.resolve()), new)
    assert list(new.checkpoints.iterdir()) == []
    made(new.checkpoints, 8)  # another one
    with pytest.raises(ConfigurationError, match="another checkpoint of that name is there"):
        resume.bring(resume.Start(newest.resolve()), new)


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
    (complaint,) = [each for each in complaints if "no state of the one model" in each]
    assert "train.resume_weights=" in complaint and words[0].split("=")[0] in complaint


def test_what_is_allowed_to_change_has_to_be_a_setting(tmp_path: Path):
    path = written(tmp_path)
    for key in ("train.seed", "train", "task.edit_shares", "precision"):
        assert compared(path, f"train.resume_allow=[{key}]")[0] == []
    (complaint,), _ = compared(path, "train.resume_allow=[precison]")
    assert "precison is no setting. Did you mean 'precision'?" in complaint


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
