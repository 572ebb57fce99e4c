"""Files of checkpoints: whole, linked, kept as many as asked for, put together from ranks; what is damaged is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from safetensors.torch import load_file

from gdino_lab import checkpoint_folder
from gdino_lab.checkpoint_folder import Damaged, Stored


def made(folder: Path, step: int = 1, keep: int = 9, best: bool = False) -> Path:
    """A checkpoint of two ranks without an engine."""
    partial = folder / f".{checkpoint_folder.name_of(step)}.partial"
    partial.mkdir(parents=True)
    checkpoint_folder.write_share(partial, 1, {"weight:b:4": torch.arange(4.0) + step}, None)
    checkpoint_folder.write_share(partial, 0, {"weight:b:0": torch.arange(4.0), "state/m:b:0": torch.ones(4)}, {"progressed": {"step": step}})
    checkpoint_folder.commit(partial, folder, step, 2, best, keep)
    return checkpoint_folder.written(folder)[0]


def test_links_point_to_whole_folders_and_old_ones_go(tmp_path: Path):
    for step in range(1, 7):
        made(tmp_path, step, keep=2, best=step == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best", "last", "step_00000002", "step_00000005", "step_00000006",
    ]  # fmt: skip
    assert (tmp_path / "last").resolve().name == "step_00000006"
    assert (tmp_path / "best").resolve().name == "step_00000002"


def test_what_is_newer_is_told_by_no_clock(tmp_path: Path):
    paths = [made(tmp_path, step) for step in (3, 1, 2)]
    for age, path in enumerate(paths):
        for file in (path, *path.iterdir()):
            os.utime(file, (10**9 - age, 10**9 - age))
    assert checkpoint_folder.written(tmp_path) == paths[::-1]
    (paths[1] / "manifest.json").write_text("{")  # what cannot say is looked at first
    assert checkpoint_folder.written(tmp_path) == [paths[1], paths[2], paths[0]]


def test_a_checkpoint_is_brought_where_no_link_can_be(tmp_path: Path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    path, other = made(tmp_path / "one"), tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(os, "link", fails)
    brought = checkpoint_folder.bring(path, other)
    checkpoint_folder.verify(brought)
    assert checkpoint_folder.bring(path, other) == brought and brought.name == path.name
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {file.name: file.read_bytes() for file in brought.iterdir()}


def test_answers_come_later(tmp_path: Path):
    path = made(tmp_path)
    assert checkpoint_folder.answers_of(path) is None
    checkpoint_folder.add_answers(path, {"logits": [0.5, 1.0, 2.0]})
    checkpoint_folder.verify(path)
    assert checkpoint_folder.answers_of(path) == {"logits": [0.5, 1.0, 2.0]}


def test_a_step_taken_again_gets_a_folder_of_its_own(tmp_path: Path):
    first, again = made(tmp_path, 3, best=True), made(tmp_path, 3)
    assert first != again and checkpoint_folder.written(tmp_path) == [again, first]
    assert (tmp_path / "best").resolve() == first.resolve()


def test_parts_of_ranks_are_put_together(tmp_path: Path):
    with Stored(made(tmp_path)) as stored:
        assert stored.read("weight", "b", 0, 8).tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        assert stored.read("weight", "b", 3, 3).tolist() == [3, 1, 2]
        assert stored.kinds("b") == {"weight", "state/m"}
        with pytest.raises(KeyError, match="state/m of b from element 4 to 6"):
            stored.read("state/m", "b", 2, 4)


def relist(path: Path, change: Callable[[dict], object]) -> None:
    """Change what the manifest names."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))


def called(path: Path, name: str, other: str) -> None:
    """Give a file another name, also in the manifest."""
    (path / name).rename(path / other)
    relist(path, lambda files: files.update({other: files.pop(name)}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json: cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"format": 1, "files": {}}'), f"format 1, this gdino-lab reads {checkpoint_folder.FORMAT}"),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json: is missing"),
        (lambda path: (path / "answers.json").write_text("{"), "answers.json: is no JSON"),
        (lambda path: (path / "state_1-000.safetensors").unlink(), "state_1-000.safetensors: is missing"),
        (lambda path: (path / "trainer.json").write_text("{}"), "trainer.json: has 2 bytes, the manifest says"),
        (lambda path: relist(path, lambda files: files.pop("state_1-000.safetensors")), "names state_0 for 2 rank"),
        (lambda path: relist(path, lambda files: files.clear()), "names no share for 2 rank"),
        (lambda path: called(path, "state_1-000.safetensors", "state_2-000.safetensors"), "names state_0, state_2 for 2 rank"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, harm, said: str):
    path = made(tmp_path)
    checkpoint_folder.verify(path)
    harm(path)
    with pytest.raises(Damaged, match=said):
        checkpoint_folder.verify(path)


@given(st.data())
@hypothesis_settings(max_examples=30, deadline=None)
def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("harmed")
    path = made(folder)
    file = path / data.draw(st.sampled_from(["state_0-000.safetensors", "state_1-000.safetensors", "trainer.json"]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    file.write_bytes(content)
    with pytest.raises(Damaged, match=file.name):
        checkpoint_folder.verify(path)
    shutil.rmtree(folder)


# --- several files a share ---


SHARE = {
    "weight:a:0": torch.arange(2.0),
    "weight:b:0": torch.arange(3.0),
    "weight:b:3": torch.arange(3.0, 9.0),
    "weight:c:0": torch.ones(1),
    "weight:d:0": torch.ones(3),
    "weight:e:0": torch.ones(1),
}


def part(number: int) -> str:
    return f"state_0-{number:03}.safetensors"


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one rank in files of at most four numbers."""
    monkeypatch.setattr(checkpoint_folder, "PART", 16)
    partial = tmp_path / ".partial"
    partial.mkdir()
    checkpoint_folder.write_share(partial, 0, SHARE, {})
    checkpoint_folder.commit(partial, tmp_path, step=1, ranks=1, best=False, keep=1)
    return checkpoint_folder.written(tmp_path)[0]


def test_a_share_is_read_back_from_its_parts(in_parts: Path):
    checkpoint_folder.verify(in_parts)
    held = [sorted(load_file(path)) for path in sorted(in_parts.glob("*.safetensors"))]
    assert held == [["weight:a:0"], ["weight:b:0"], ["weight:b:3"], ["weight:c:0", "weight:d:0"], ["weight:e:0"]]
    with Stored(in_parts) as stored:
        for name in "abcde":
            whole = torch.cat([tensor for key, tensor in SHARE.items() if f":{name}:" in key])
            assert torch.equal(stored.read("weight", name, 0, len(whole)), whole)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / part(3)).unlink(), f"{part(3)}: is missing"),
        (lambda path: (path / part(2)).write_bytes((path / part(2)).read_bytes()[:-1] + b"?"), f"{part(2)}: its SHA-256 is"),
        (lambda path: shutil.copy(path / part(4), path / part(5)), f"{part(5)}: is not in the manifest"),
        (lambda path: [(path / part(number)).unlink() for number in (4, 1, 3)], f"{part(1)}: is missing"),
    ],
    ids=["missing", "damaged", "added", "first of several"],
)
def test_a_harmed_part_is_named(in_parts: Path, harm, said: str):
    harm(in_parts)
    with pytest.raises(Damaged, match=said):
        checkpoint_folder.verify(in_parts)


def test_no_part_stays_of_a_share_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(path: Path, tensors: dict) -> dict:
        if path.name == part(2):
            raise OSError("no room")
        return honest(path, tensors)

    honest = checkpoint_folder.write_tensors
    monkeypatch.setattr(checkpoint_folder, "PART", 16)
    monkeypatch.setattr(checkpoint_folder, "write_tensors", fails)
    (tmp_path / "state_1-000.safetensors").touch()
    with pytest.raises(OSError, match="no room"):
        checkpoint_folder.write_share(tmp_path, 0, SHARE, {})
    assert (tmp_path / part(0)).exists()
    checkpoint_folder.tell_failure(tmp_path, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"state_1-000.safetensors", ".failed_0"}


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_parts_hold_all_once_in_order_and_no_more_than_they_may(sizes: list[int], most: int):
    tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "PART", most)
        parts = checkpoint_folder.parts_of(tensors)
    assert [name for each in parts for name in each] == list(tensors)
    for each in parts:
        assert len(each) == 1 or sum(tensor.nbytes for tensor in each.values()) <= most
    for one, other in pairwise(parts):  # none could have been spared
        assert sum(tensor.nbytes for tensor in one.values()) + next(iter(other.values())).nbytes > most


DTYPES = list(checkpoint_folder.DTYPES)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 50)), max_size=8))
@hypothesis_settings(max_examples=40, deadline=None)
def test_any_tensors_are_read_back_by_safetensors(tmp_path_factory: pytest.TempPathFactory, shapes: list):
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    tensors = {f"kind:{number}:0": (torch.randn(size) * 9).to(dtype) for number, (dtype, size) in enumerate(shapes)}
    entry = checkpoint_folder.write_tensors(path, tensors)
    assert entry["bytes"] == path.stat().st_size
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_neighbours_in_memory_are_written_as_one(places: list[tuple[int, int]], dtype: torch.dtype):
    memory = torch.arange(26.0).to(dtype)
    tensors = [memory[start : start + size] for start, size in places] + [torch.ones(2), torch.ones(3)]
    found = checkpoint_folder.bytes_of(tensors)
    assert b"".join(found) == b"".join(bytes(tensor.view(torch.uint8).tolist()) for tensor in tensors)
    apart = sum(before[0] + before[1] != after[0] for before, after in pairwise(places))
    assert len(found) == 2 + (apart + 1 if places else 0)


def test_large_and_small_parts_are_written_as_they_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "CHUNK", 64)
    parts = [bytes([number % 251]) * number for number in (1, 3, 200, 2, 64, 63, 5, 129)]
    entry = checkpoint_folder.write_bytes(tmp_path / "file", [memoryview(part) for part in parts])
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert entry["bytes"] == sum(map(len, parts))
