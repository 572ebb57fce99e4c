"""Before the ranks start and after they ended: trackers, launchers' variables, the post-mortem."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdino_lab import launch, preparation, settings
from gdino_lab.commands.main import composed
from gdino_lab.errors import ConfigurationError, Unproved
from gdino_lab.machine.readings import Readings
from gdino_lab.run_folder import RunFolder, new_run_folder

SETTINGS = settings.as_dict(composed())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder(str(tmp_path / "run"), "anomaly", "synthetic_loco")


def record(error: BaseException, folder: RunFolder, rank: int) -> int:
    return launch.record_failure(error, folder, rank, SETTINGS, oom_kills=None)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)


def wrapped(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("a wrapper") from inner
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "code", "state", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 3, "out_of_memory", "out_of_memory"),
        (wrapped(torch.OutOfMemoryError("CUDA out of memory.")), 3, "out_of_memory", "out_of_memory"),
        (MemoryError("Unable to allocate 8.00 TiB"), 3, "out_of_memory", "host_memory"),
        (KeyError("nut"), 1, "failed", "other"),
        (ConfigurationError("image.png: not a readable image"), 1, "failed", "refused"),
        (Unproved("score 1, was 2"), 2, "failed", "unproved"),
    ],
    ids=["oom", "wrapped oom", "host", "bug", "refused", "unproved"],
)
def test_failure_becomes_status_code_and_message(folder, capsys, error, code, state, kind):
    assert record(error, folder, rank=1) == code
    assert launch.report_failure(folder, {}) == code
    status = json.loads(folder.status.read_text())
    assert (status["state"], status["kind"]) == (state, kind)
    assert status["where"].startswith("rank 1") and status["to_try"] and status["cause"] and "figures" in status
    said = capsys.readouterr().err
    assert status["cause"] in said
    assert ("Traceback" in said or "Error" in said) == (kind not in ("refused", "unproved") or "Error" in status["cause"])


def test_the_first_failure_that_is_no_echo_is_the_cause(folder, monkeypatch, capsys):
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    record(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"), folder, rank=0)
    record(ZeroDivisionError("the cause"), folder, rank=1)
    record(ValueError("later"), folder, rank=2)
    assert launch.report_failure(folder, {}) == 1
    assert "ZeroDivisionError: the cause" in json.loads(folder.status.read_text())["cause"]


def test_a_killed_rank_is_named_though_another_noticed(folder, monkeypatch, capsys):
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    record(RuntimeError("Connection closed by peer"), folder, rank=0)
    first = SimpleNamespace(local_rank=1, exitcode=-9, timestamp=10**10)
    readings = Readings(oom_kills=0)
    assert launch.post_mortem(folder, SimpleNamespace(failures={1: first}), readings, {"settings": SETTINGS, "before": {}}) == 1
    status = json.loads(folder.status.read_text())
    assert status["kind"] == "killed" and "signal 9" in status["cause"]


def test_a_failure_while_stopping_is_no_mere_stop(folder, monkeypatch):
    """A full disk after Ctrl-C must be told; a peer that was merely gone need not."""
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    assert launch.only_stopped(folder)
    record(RuntimeError("Connection closed by peer"), folder, rank=0)
    assert launch.only_stopped(folder)
    record(OSError(28, "No space left on device"), folder, rank=1)
    assert not launch.only_stopped(folder)


def test_an_interrupted_run_offers_only_a_checkpoint_there_is(folder):
    assert "train.resume" not in launch._ending(launch.INTERRUPTED, folder)["to_try"]
    (folder.checkpoints / "last").mkdir(parents=True)
    assert launch._ending(launch.INTERRUPTED, folder)["to_try"] == f"train.resume={folder.path}"


def test_rewinding_forgets_later_steps_and_earlier_failures(folder):
    for step in (1, 2, 3):
        folder.append_metrics({"kind": "step", "step": step})
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "st')  # killed while it wrote
    record(KeyError("old"), folder, rank=0)
    folder.rewind(2)
    folder.forget_failures()
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
    assert folder.failures() == []


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"run_dir=.*/file/run: .* cannot be written \(Not a directory\)"):
        new_run_folder(str(tmp_path / "file" / "run"), "a", "b")


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_run_folder(None, "a", "b").path != new_run_folder(None, "a", "b").path


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused(tracker):
    said = preparation.tracker_complaints(composed(f"tracker={tracker}"))
    assert len(said) == 1 and f"pip install {tracker}" in said[0]
    assert preparation.tracker_complaints(composed("tracker=none")) == preparation.tracker_complaints(composed()) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (3, 1, 2, 4)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, (1, 1, 2, 2)),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
             "SLURM_STEP_NODELIST": "node1"},
            (2, 0, 2, 4),
        ),
    ],
    ids=["none", "srun of one", "torchrun", "deepspeed", "srun"],
)  # fmt: skip
def test_ranks_of_launchers(monkeypatch, variables, expected):
    monkeypatch.setattr(launch.os, "environ", dict(variables))
    found = launch.ranks_of_launcher()
    assert (found and (found.rank, found.local_rank, found.local_size, found.world_size)) == expected
