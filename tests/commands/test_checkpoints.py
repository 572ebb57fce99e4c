"""Checkpoints that meet a full disk, a folder nobody may write, a death while saving, damage, and more epochs than planned."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load

from gdino_lab import checkpoint_folder, resume
from gdino_lab.resume import newest_whole
from gdino_lab.run_folder import RunFolder, write_json
from tests.conftest import SMALL, environment, read_json, read_metrics

pytestmark = pytest.mark.slow

SAVING = ["train.save_every=1", "train.max_steps=6"]
# The untuned model and each epoch score less than the one before.
WORSE = """
from dataclasses import replace
import gdino_lab.trainer as trainer
honest, scores = trainer.evaluate, iter(range(10, 0, -1))
trainer.evaluate = lambda run: replace(honest(run), selection=float(next(scores)))
"""


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    said: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    def done(self) -> str:
        assert set(self.codes) == {0}, self.text
        return self.text


Train = Callable[..., Ended]


@pytest.fixture(scope="module")
def may_mount() -> bool:
    tried = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(tried, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def train(small_set: Path, may_mount: bool) -> Iterator[Train]:
    """`gdino-lab train WORDS` in a folder, after doing `deed` (Python, in each rank) and between two shell commands."""
    command = [*(["unshare", "-rm"] if may_mount else []), sys.executable, "tests/forking.py"]
    extra = {"PYTHONPATH": str(Path.cwd()), "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        command, env=environment() | extra, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def call(folder: Path, *words: str, ranks: int = 1, deed: str = "", before: str = ":", after: str = ":") -> Ended:
            hardware = "cpu" if ranks == 1 else "cpu_dual"
            words = ("train", *SMALL, f"data.root={small_set}", f"hardware={hardware}", *words)
            asked = {"folder": str(folder), "words": words, "ranks": ranks, "deed": deed, "before": before, "after": after}
            print(json.dumps(asked), file=server.stdin, flush=True)
            return Ended(**json.loads(server.stdout.readline()))

        yield call
        server.stdin.close()


@pytest.fixture(scope="module")
def finished(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, four an epoch, with a checkpoint after each, of which the best is the fourth."""
    place = tmp_path_factory.mktemp("finished")
    train(place, *SAVING, "run_dir=run", deed=WORSE).done()
    return place / "run"


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def target(run: Path, link: str) -> str:
    return (run / "checkpoints" / link).resolve().name


def assert_all_whole(run: Path) -> None:
    found = checkpoint_folder.written(run / "checkpoints")
    assert found
    for path in found:
        checkpoint_folder.verify(path)
    assert target(run, "last") == found[0].name


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run, "step")]


# --- how many stay ---


def test_the_newest_stay_and_the_best(finished: Path):
    assert names(finished) == {"step_00000004", "step_00000005", "step_00000006", "last", "best"}
    assert (target(finished, "last"), target(finished, "best")) == ("step_00000006", "step_00000004")
    assert_all_whole(finished)
    assert not list(finished.rglob(".*"))


# --- damage ---


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("state_0-000.safetensors", truncated, "bytes, the manifest says"),
        ("state_0-000.safetensors", flipped, "its SHA-256 is"),
        ("trainer.json", flipped, "its SHA-256 is"),
        ("state_0-000.safetensors", Path.unlink, "is missing"),
        ("manifest.json", Path.unlink, "is missing"),
        ("manifest.json", truncated, "cannot be read"),
    ],
)
def test_damage_is_named_and_an_older_checkpoint_taken(
    name: str, damage: Callable[[Path], None], fault: str, finished: Path, train: Train, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    newest = run / "checkpoints" / "step_00000006"
    damage(newest / name)
    refused = train(tmp_path, f"train.resume={newest}")
    assert refused.codes == [2]
    assert f"{newest / name}: " in refused.text and fault in refused.text and "Traceback" not in refused.text
    # What it says before the first step is enough.
    told = train(tmp_path, f"train.resume={run}", deed=ONLY_PREPARED)
    assert told.codes == [7]
    assert f"{newest / name}: " in told.text and fault in told.text
    assert "an older checkpoint is taken, step_00000005" in told.text
    assert f"going on from {newest.with_name('step_00000005')}, step 5" in told.text


ONLY_PREPARED = """
import os
import gdino_lab.launch as launch
launch.run_rank = lambda job, joined: os._exit(7)
"""


def test_a_tensor_that_is_not_there_is_named(finished: Path, train: Train, tmp_path: Path):
    """A checkpoint that is whole by its manifest, but not all of this model."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    newest = run / "checkpoints" / "step_00000006"
    tensors = load((newest / "state_0-000.safetensors").read_bytes())
    gone = next(key for key in tensors if key.startswith("weight:") and "encoder" in key)
    del tensors[gone]
    manifest = read_json(newest / "manifest.json")
    manifest["files"]["state_0-000.safetensors"] = checkpoint_folder.write_tensors(newest / "state_0-000.safetensors", tensors)
    write_json(newest / "manifest.json", manifest)
    refused = train(tmp_path, f"train.resume={newest}", "train.max_steps=8", "run_dir=second")
    assert refused.codes == [2], refused.text
    assert f"train.resume={newest}: is of another model: {gone.split(':')[1]} is not there" in refused.text
    assert not (tmp_path / "second").exists()


def test_a_run_that_goes_on_is_not_taken_from_under_it(finished: Path, train: Train, tmp_path: Path):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    RunFolder(tmp_path / "run").write_status("running", **resume.this_process())
    refused = train(tmp_path, "train.resume=run", "train.max_steps=8")
    assert refused.codes == [2] and "this run is still going on; stop it first" in refused.text
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_weights_alone_start_another_run(finished: Path, train: Train, tmp_path: Path):
    text = train(tmp_path, f"train.resume_weights={finished}", "train.max_steps=1", "optimizer.lr=1e-6", "run_dir=second").done()
    second = tmp_path / "second"
    score = "auroc_validation_edits/mean"
    assert read_metrics(second, "untuned")[0][score] == read_metrics(finished, "epoch")[-1][score], text
    assert steps(second) == [1]


def test_a_resume_needs_no_weights_to_start_from(finished: Path, train: Train, tmp_path: Path):
    """The line that began the run, and train.resume besides; those weights may be gone."""
    words = [f"train.resume_weights={tmp_path / 'start'}", "run_dir=run", "train.resume=auto"]
    shutil.copytree(finished, tmp_path / "start", symlinks=True)
    train(tmp_path, *words, "train.max_steps=1").done()
    shutil.rmtree(tmp_path / "start")
    train(tmp_path, *words, "train.max_steps=2").done()
    assert steps(tmp_path / "run") == [1, 2]


def test_one_line_begins_a_run_begins_it_again_and_goes_on_with_it(train: Train, tmp_path: Path):
    """As a batch system calls it."""
    line = ["train.resume=auto", "run_dir=run", *SAVING]
    run = tmp_path / "run"
    assert train(tmp_path, *line, deed=ONLY_PREPARED).codes == [7]
    RunFolder(run).append_metrics({"kind": "step", "step": 1})
    text = train(tmp_path, *line, deed=INTERRUPTED_AFTER_THREE)
    assert text.codes == [130] and "starts afresh" in text.text and steps(run) == [1, 2, 3]
    assert "goes on with" in train(tmp_path, *line).done() and steps(run) == [1, 2, 3, 4, 5, 6]
    refused = train(tmp_path, *line)
    assert refused.codes == [2] and "holds a run already" in refused.text


INTERRUPTED_AFTER_THREE = """
import gdino_lab.trainer as trainer
honest = trainer.stop_anywhere
trainer.stop_anywhere = lambda run: honest(run) or run.engine.global_steps == 3
"""


def test_a_run_in_another_folder_goes_on_from_the_same_step_whenever_it_dies(finished: Path, train: Train, tmp_path: Path):
    longer, off = "train.max_steps=8", "train.resume_check=off"  # the score is one that was made up
    moved = tmp_path / "moved"
    assert train(tmp_path, f"train.resume={finished}", longer, off, "run_dir=moved", deed=ONLY_PREPARED).codes == [7]
    start, said = newest_whole(moved / "checkpoints")
    assert (start.step, said, target(moved, "best")) == (6, [], "step_00000004")
    assert_all_whole(moved)
    train(tmp_path, "train.resume=moved", longer, off).done()
    assert steps(moved) == [7, 8] and (moved / "model" / "config.json").is_file()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_that_does_not_score_as_its_checkpoint_says_is_left_as_it_was(finished: Path, ranks: int, train: Train, tmp_path: Path):
    """Its score is one that was made up."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    words = [f"train.resume={run}", "train.max_steps=8"]
    refused = train(tmp_path, *words, ranks=ranks)
    assert set(refused.codes) == {2} and "Traceback" not in refused.text, refused.text
    assert "refused, the run is left as it was" in refused.text and "validation score: 8 in the checkpoint" in refused.text
    for name in ("config.yaml", "plan.json", "status.json", "metrics.jsonl", "summary.json"):
        assert (run / name).read_text() == (finished / name).read_text(), name
    assert names(run) == names(finished) and not list((run / "ranks").glob("*.failure.json"))
    train(tmp_path, *words, "train.resume_check=warn", ranks=ranks).done()


def test_a_best_of_steps_that_are_taken_again_is_none(finished: Path, train: Train, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    checkpoint_folder.point(run / "checkpoints" / "best", run / "checkpoints" / "step_00000006")
    train(tmp_path, f"train.resume={run / 'checkpoints' / 'step_00000005'}", "train.max_steps=6", "train.resume_check=off").done()
    assert target(run, "best") == target(run, "last") == "step_00000006_2"
    assert read_json(run / "summary.json")["best_epoch"] == 2


def test_run_goes_on_from_an_older_checkpoint_to_its_end(finished: Path, train: Train, tmp_path: Path):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    flipped(tmp_path / "run" / "checkpoints" / "step_00000006" / "state_0-000.safetensors")
    train(tmp_path, "train.resume=run", *SAVING).done()
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "run") == losses(finished)
    assert target(tmp_path / "run", "last") == "step_00000006_2"


def losses(run: Path) -> list[dict]:
    measured = ("images_per_s", "memory_gib")
    return [{name: value for name, value in row.items() if name not in measured} for row in read_metrics(run, "step")]


# --- a disk that does not take it ---

FULL_LATER = """
import shutil
honest = shutil.disk_usage
shutil.disk_usage = lambda folder: honest(folder)._replace(free=10**12)  # somebody else writes after we have looked
"""
# A checkpoint is 18 MB.
SMALL_DISK = "mkdir -p run/checkpoints && mount -t tmpfs -o size=30m tmpfs run/checkpoints"
BACK = "cp -a run/checkpoints kept && umount run/checkpoints && rm -r run/checkpoints && mv kept run/checkpoints"
READ_ONLY = "mount --bind run/checkpoints run/checkpoints && mount -o remount,ro,bind run/checkpoints"
READ_ONLY_LATER = f"""
import os
import gdino_lab.checkpoint as checkpoint
honest = checkpoint.Writer.save
def save(*rest):
    os.system("{READ_ONLY}")
    honest(*rest)
checkpoint.Writer.save = save
"""
CANNOT_WRITE = """
import errno, os
import gdino_lab.checkpoint_folder as checkpoint_folder
honest = checkpoint_folder.write_tensors
def fails(path, tensors):
    if path.name == "state_1-000.safetensors" and "00000003" in path.parent.name:
        raise OSError(errno.EIO, "Input/output error", str(path))
    return honest(path, tensors)
checkpoint_folder.write_tensors = fails
"""


@pytest.mark.parametrize(
    ("deed", "said"),
    [("", "MB are free there"), (FULL_LATER, "No space left on device")],
    ids=["seen before", "met while writing"],
)
def test_full_disk(deed: str, said: str, may_mount: bool, train: Train, tmp_path: Path):
    if not may_mount:
        pytest.skip("nothing can be mounted here")
    run = tmp_path / "run"
    ended = train(tmp_path, *SAVING, "run_dir=run", before=SMALL_DISK, after=BACK, deed=deed)
    assert ended.codes == [1], ended.text
    assert_told(ended, run, said, "ENOSPC", f"make room there, then go on with train.resume={run} train.keep=1")
    assert names(run) == {"step_00000001", "last"}
    assert_all_whole(run)
    text = train(tmp_path, "train.resume=run", *SAVING, "train.keep=1").done()
    assert "going on from" in text and "step 1" in text
    assert losses(run) and steps(run) == [1, 2, 3, 4, 5, 6]
    assert read_json(run / "status.json") == {"state": "completed"}
    assert len(names(run)) - 2 == len({target(run, "last"), target(run, "best")})
    assert_all_whole(run)


FILLED_LATER = """
from contextlib import suppress
from gdino_lab.run_folder import RunFolder
honest = RunFolder.append_metrics
def append(folder, row):
    if row["step"] == 3:
        with suppress(OSError), (folder.path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    honest(folder, row)
RunFolder.append_metrics = append
"""


def test_full_disk_that_holds_the_whole_run(may_mount: bool, train: Train, tmp_path: Path):
    if not may_mount:
        pytest.skip("nothing can be mounted here")
    run = tmp_path / "run"
    before = "mkdir run && mount -t tmpfs -o size=90m tmpfs run"
    after = "rm run/filler; cp -a run kept && umount run && rmdir run && mv kept run"
    ended = train(tmp_path, *SAVING, "run_dir=run", before=before, after=after, deed=FILLED_LATER)
    assert ended.codes == [1] and "Traceback" not in ended.text, ended.text
    status = read_json(run / "status.json")
    assert (status["state"], status["kind"]) == ("failed", "disk")
    assert status["to_try"].startswith(f"make room there, then go on with train.resume={run}")
    assert status["to_try"] in ended.text
    assert not list(run.glob(".*")) + list((run / "ranks").glob(".*"))
    train(tmp_path, "train.resume=run", *SAVING).done()
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_folder_that_may_not_be_written_is_refused_before_anything_starts(
    finished: Path, may_mount: bool, train: Train, tmp_path: Path
):
    if not may_mount:
        pytest.skip("nothing can be mounted here")
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    ended = train(tmp_path, f"train.resume={run}", "train.max_steps=8", before=READ_ONLY, after="umount run/checkpoints")
    assert ended.codes == [2], ended.text
    assert f"{run / 'checkpoints'} cannot be written (Read-only file system)" in ended.text
    assert "Traceback" not in ended.text and read_json(run / "status.json") == {"state": "completed"}


def test_folder_that_becomes_read_only(finished: Path, may_mount: bool, train: Train, tmp_path: Path):
    if not may_mount:
        pytest.skip("nothing can be mounted here")
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    longer = ["train.resume=run", "train.save_every=1", "train.max_steps=8"]
    off = ["train.resume_check=off"]  # the score is one that was made up
    ended = train(tmp_path, *longer, *off, deed=READ_ONLY_LATER, after="umount run/checkpoints")
    assert ended.codes == [1], ended.text
    cure = f"make the folder writable, then go on with train.resume={run}; or in another one, with run_dir=DIR besides"
    assert_told(ended, run, "Read-only file system", "EROFS", cure)
    assert names(run) == names(finished)
    assert_all_whole(run)
    train(tmp_path, *longer, *off, "run_dir=elsewhere").done()
    assert read_json(tmp_path / "elsewhere" / "status.json") == {"state": "completed"}
    assert target(tmp_path / "elsewhere", "last") == "step_00000008"
    assert target(tmp_path / "elsewhere", "best") == "step_00000004"


def test_what_one_rank_cannot_write_ends_both_at_once(train: Train, tmp_path: Path):
    run = tmp_path / "run"
    ended = train(tmp_path, *SAVING, "run_dir=run", ranks=2, deed=CANNOT_WRITE)
    assert ended.codes == [1, 1], ended.text
    status = read_json(run / "status.json")
    assert (status["kind"], status["figures"]["errno"]) == ("disk", "EIO")
    assert "Input/output error" in status["cause"] and "another rank" not in ended.text
    assert {"step_00000001", "step_00000002"} < names(run) and ".step_00000003.partial" not in names(run)
    assert_all_whole(run)


def assert_told(ended: Ended, run: Path, said: str, number: str, cure: str) -> None:
    status = read_json(run / "status.json")
    assert (status["state"], status["kind"]) == ("failed", "disk")
    assert said in status["cause"] and str(run / "checkpoints") in status["cause"]
    assert status["figures"] == {"folder": str(run / "checkpoints"), "errno": number}
    assert status["to_try"] == cure
    assert "Traceback" not in ended.text
    assert ended.text.count(f"gdino-lab: {status['cause']}\n") == 1 and ended.text.count(cure) == 1


# --- a rank that dies while it saves ---

DIES_SAVING = """
import os, signal
import gdino_lab.checkpoint_folder as checkpoint_folder
honest = checkpoint_folder.write_tensors
def dies(path, tensors):
    if path.name == "state_1-000.safetensors" and "00000003" in path.parent.name:
        path.write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(path, tensors)
checkpoint_folder.write_tensors = dies
"""


@pytest.mark.thorough
def test_one_rank_of_two_killed_while_saving(train: Train, tmp_path: Path):
    run = tmp_path / "run"
    ended = train(tmp_path, *SAVING, "run_dir=run", ranks=2, deed=DIES_SAVING)
    assert ended.codes == [1, -9], ended.text
    assert {"step_00000001", "step_00000002", ".step_00000003.partial"} < names(run)
    assert_all_whole(run)
    start, said = newest_whole(run / "checkpoints")
    assert (start.step, said) == (2, [])
    text = train(tmp_path, "train.resume=run", *SAVING, ranks=2).done()
    assert f"going on from {start.folder}, step 2" in text
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert not [name for name in names(run) if name.endswith(".partial")]
    assert_all_whole(run)


# --- more epochs than planned ---

FIRST_SCORE = """
import gdino_lab.trainer as trainer
honest = trainer.evaluate
def telling(run):
    found = honest(run)
    print("SCORE", repr(found.selection))
    return found
trainer.evaluate = telling
"""


def test_twenty_epochs_and_then_thirty_more(train: Train, tmp_path: Path):
    run = tmp_path / "run"
    counts = "data.counts={train: 8, validation: 4, test_good: 2, test_logical: 2, test_structural: 2}"
    words = [counts, f"data.root={tmp_path / 'set'}", "train.effective_batch=8", "train.micro_batch=8"]
    train(tmp_path, *words, "train.epochs=20", "run_dir=run").done()
    before = read_metrics(run, "epoch")
    assert len(before) == 20
    text = train(tmp_path, *words, "train.epochs=50", "train.resume=run", deed=FIRST_SCORE).done()
    first = next(line for line in text.splitlines() if line.startswith("SCORE"))
    assert float(first.split()[1]) == before[-1]["auroc_validation_edits/mean"]
    assert "schedule: as if 50 steps had been asked for from the start, not 20" in text
    assert "proved: outputs and score" in text
    epochs = read_metrics(run, "epoch")
    assert epochs[:20] == before and [row["epoch"] for row in epochs] == list(range(1, 51))
    assert steps(run) == list(range(1, 51))
