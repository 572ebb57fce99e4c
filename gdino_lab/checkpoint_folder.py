"""A checkpoint on the disk: written whole or not at all, and read only when it is as its manifest says.

    checkpoints/step_00000120/
        state_<rank>-<part>.safetensors   weights, optimizer states, averages and random generators (gdino_lab/pieces.py)
        trainer.json                      progress, counters, score, and the plan, settings and versions it belongs to
        manifest.json                     bytes and SHA-256 of each file; written last, so a folder with one was finished
        answers.json                      what the model answers to the fixed image; added while the next step is taken
    checkpoints/last, best                links to two of these

Nothing in it is a pickle, so loading runs no code of whoever wrote it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gdino_lab.errors import NotSaved
from gdino_lab.run_folder import read_json, replacing, write_json

FORMAT = 3
MANIFEST, TRAINER, ANSWERS = "manifest.json", "trainer.json", "answers.json"
LAST, BEST = "last", "best"
CHUNK = 2**24  # bytes written and hashed at once
PART = 2**27  # bytes a file of a share holds at most, unless a single tensor has more
THREADS = 4  # that write or read a file each: one hashes while another writes and a third waits for the disk
# A rank that has written its share waits this many seconds for the others'.
PATIENCE = 1800
# Names of dtypes in the safetensors format.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

T = TypeVar("T")


class Damaged(Exception):
    """A checkpoint that is not whole; the message names the file."""


# --- writing ----------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step_{step:08}"


def write_share(partial: Path, rank: int, tensors: dict[str, Tensor], trainer_state: dict[str, Any] | None) -> None:
    """This rank's files and, last, what they are: .share_<rank>.json."""
    parts = {f"state_{rank}-{number:03}.safetensors": part for number, part in enumerate(parts_of(tensors))}
    with ThreadPoolExecutor(THREADS) as threads:
        entries = threads.map(write_tensors, map(partial.joinpath, parts), parts.values())
        files = dict(zip(parts, entries, strict=True))
    if trainer_state is not None:
        text = json.dumps(trainer_state, indent=1).encode()
        files[TRAINER] = write_bytes(partial / TRAINER, [memoryview(text)])
    write_json(partial / f".share_{rank}.json", files)


def tell_failure(partial: Path, rank: int) -> None:
    """To rank 0, which waits for this rank's share. What was written of it goes first: on a full disk there is no room else."""
    with suppress(OSError):
        for part in partial.glob(f"state_{rank}-*.safetensors"):
            part.unlink()
        (partial / f".failed_{rank}").touch()


def commit(partial: Path, folder: Path, step: int, ranks: int, best: bool, keep: int) -> Path:
    """Once all shares are there the folder gets its manifest, then its name, which is returned, then the links that point to it."""
    shares = [partial / f".share_{rank}.json" for rank in range(ranks)]
    deadline = time.monotonic() + PATIENCE
    while not all(share.exists() for share in shares):
        if any(partial.glob(".failed_*")) or time.monotonic() > deadline:
            raise NotSaved(f"{partial}: another rank has not written its share", folder, echo=True)
        time.sleep(0.01)
    files: dict[str, Any] = {}
    for share in shares:
        files |= read_json(share)
        share.unlink()
    order = 1 + max(map(order_of, written(folder)), default=0)
    manifest = json.dumps({"format": FORMAT, "step": step, "ranks": ranks, "order": order, "files": files}, indent=1)
    write_bytes(partial / MANIFEST, [memoryview(manifest.encode())])
    sync_folder(partial)
    target = first_free(folder / name_of(step))
    os.rename(partial, target)
    sync_folder(folder)
    point(folder / LAST, target)
    if best:
        point(folder / BEST, target)
    sync_folder(folder)
    prune(folder, keep)
    return target


def bring(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint among those of another run: no byte is copied where the file system can link, since none ever changes.

    Raises:
        FileExistsError: another one of that name is there.
        OSError: it cannot be written; nothing of it is left.
    """
    target = folder / checkpoint.name
    if target.exists():
        if read_json(target / MANIFEST) != read_json(checkpoint / MANIFEST):
            raise FileExistsError(errno.EEXIST, "another checkpoint of that name is there", str(target))
        return target
    with replacing(target) as partial:
        shutil.copytree(checkpoint, partial, copy_function=link_or_copy)
        sync_folder(partial)
    sync_folder(folder)
    return target


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def add_answers(checkpoint: Path, answers: dict[str, Any]) -> None:
    """What the model answers to the fixed image; comes when the other files are written, so the manifest does not know of it."""
    temporary = checkpoint / f".{ANSWERS}"
    write_bytes(temporary, [memoryview(json.dumps(answers, indent=1).encode())])
    os.rename(temporary, checkpoint / ANSWERS)
    sync_folder(checkpoint)


def first_free(path: Path) -> Path:
    """A run that went on from an earlier step comes to the same step again."""
    return next(each for each in chain([path], (path.with_name(f"{path.name}_{n}") for n in count(2))) if not each.exists())


def point(link: Path, target: Path) -> None:
    """`link` becomes a link to `target` in the same folder, at once."""
    temporary = link.with_name(f".{link.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`, `last` and `best`."""
    needed = {(folder / link).resolve() for link in (LAST, BEST) if (folder / link).exists()}
    for old in written(folder)[keep:]:
        if old.resolve() not in needed:
            doomed = old.with_name(f".{old.name}.partial")  # no longer whole, and known to be
            os.rename(old, doomed)
            shutil.rmtree(doomed)


def parts_of(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same tensors in the same order, cut where PART would be exceeded; one part where there are none."""
    return [dict(part) for part in cut(tensors.items(), lambda item: item[1].nbytes, PART)] or [{}]


def cut(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """The items in their order, in lists of at most `limit` in sum, unless a single one is more."""
    lists: list[list[T]] = []
    held = 0
    for item in items:
        if not lists or held + size(item) > limit:
            lists.append([])
            held = 0
        lists[-1].append(item)
        held += size(item)
    return lists


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A safetensors file, hashed while it is written (github.com/huggingface/safetensors, "Format"); its entry in the
    manifest."""
    header: dict[str, Any] = {}
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each lies aligned
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_bytes(path, [memoryview(len(text).to_bytes(8, "little") + text), *bytes_of(list(ordered.values()))])


def bytes_of(tensors: list[Tensor]) -> list[memoryview]:
    """The bytes of 1-D tensors, in their order; as one where they follow each other in memory: each turn of the thread that writes
    them keeps the one that trains waiting for Python's lock."""
    runs: list[tuple[torch.UntypedStorage, int, int]] = []  # and the first byte in it, and the one after the last
    for tensor in tensors:
        values = tensor.view(torch.uint8)
        storage, start = values.untyped_storage(), values.storage_offset()
        end = start + values.numel()
        if runs and runs[-1][0].data_ptr() == storage.data_ptr() and runs[-1][2] == start:
            storage, start, _ = runs.pop()
        runs.append((storage, start, end))
    return [
        memoryview(torch.empty(0, dtype=torch.uint8).set_(storage, start, (end - start,)).numpy()) for storage, start, end in runs
    ]


def write_bytes(path: Path, parts: list[memoryview]) -> dict[str, Any]:
    """Hash, write and bring it to the disk; returns {"bytes", "sha256"}."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for start in range(0, part.nbytes, CHUNK):
                left = part[start : start + CHUNK]
                digest.update(left)
                while left:
                    left = left[file.write(left) :]
        os.fsync(file.fileno())
    return {"bytes": sum(part.nbytes for part in parts), "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ----------------------------------------------------------------------------------------------------------


def written(folder: Path) -> list[Path]:
    """The checkpoints below `folder` that were finished, the newest first, and before them those that cannot say when."""
    orders = {path: order_of(path) for path in folder.glob("step_*")}
    return sorted(orders, key=lambda path: (orders[path] == 0, orders[path], path), reverse=True)


def order_of(checkpoint: Path) -> int:
    """1 for the first of a run; no clock tells what came after what. 0 where it cannot be read: `verify` says why."""
    try:
        return int(read_json(checkpoint / MANIFEST)["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def best_until(step: int, folder: Path) -> Path | None:
    """The best of a run's checkpoints, unless it is of a later step."""
    best = (folder / BEST).resolve()
    try:
        return best if read_json(best / MANIFEST)["step"] <= step else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(checkpoint: Path) -> None:
    """Read every file and compare it with the manifest.

    Raises:
        Damaged: naming the file, what it is and what it should be.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        files, form = dict(manifest["files"]), manifest["format"]
    except FileNotFoundError:
        raise Damaged(f"{checkpoint / MANIFEST}: is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{checkpoint / MANIFEST}: cannot be read ({error})") from None
    if form != FORMAT:
        raise Damaged(f"{checkpoint / MANIFEST}: format {form}, this gdino-lab reads {FORMAT}")
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(lambda name: verify_file(checkpoint, name, files[name]), sorted(files)):
            pass  # of several damaged ones the first by name is told
    verify_form(checkpoint, manifest)


def verify_file(checkpoint: Path, name: str, known: Any) -> None:
    """Compare a file with what the manifest knows of it.

    Raises:
        Damaged: see `verify`.
    """
    path = checkpoint / name
    if Path(name).name != name:
        raise Damaged(f"{checkpoint / MANIFEST}: names a file elsewhere, {name}")
    try:
        size = path.stat().st_size
        if not isinstance(known, dict) or not isinstance(known.get("sha256"), str):
            raise Damaged(f"{checkpoint / MANIFEST}: says neither bytes nor SHA-256 of {name}")
        if size != known.get("bytes"):
            raise Damaged(f"{path}: has {size} bytes, the manifest says {known.get('bytes')}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
    if digest != known["sha256"]:
        raise Damaged(f"{path}: its SHA-256 is {digest[:12]}…, the manifest says {known['sha256'][:12]}…")


def verify_form(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """A manifest may agree with files that no gdino-lab wrote: each must be of its format, none missing and none added.

    Raises:
        Damaged: naming the file and what it is not.
    """
    listed = {name for name in manifest["files"] if name.startswith("state_")}
    shares = {name.partition("-")[0] for name in listed}
    ranks = manifest.get("ranks")
    if len(shares) != ranks or shares != {f"state_{rank}" for rank in range(len(shares))} or TRAINER not in manifest["files"]:
        named = ", ".join(sorted(shares)) or "no share"
        raise Damaged(f"{checkpoint / MANIFEST}: names {named} for {ranks} rank(s), or no {TRAINER}")
    for path in checkpoint.glob("state_*.safetensors"):
        if path.name not in listed:
            raise Damaged(f"{path}: is not in the manifest")
    with Stored(checkpoint):
        pass
    for path in filter(Path.exists, (checkpoint / TRAINER, checkpoint / ANSWERS)):
        try:
            if not isinstance(read_json(path), dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{path}: is no JSON ({error})") from None


def answers_of(checkpoint: Path) -> dict[str, Any] | None:
    """What the model answered to the fixed image; None where the run died before it was asked."""
    path = checkpoint / ANSWERS
    return read_json(path) if path.exists() else None


@dataclass(frozen=True)
class Run:
    """Elements `start` to `stop` of a parameter, and where they are stored."""

    start: int
    stop: int
    file: Any
    key: str


class Stored:
    """The tensors of a checkpoint by kind and name, put together from the shares of all ranks as they are asked for.

    Raises:
        Damaged: a file is no safetensors file.
    """

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.by_name: dict[str, set[str]] = {}
        self.files = []
        for path in sorted(checkpoint.glob("state_*.safetensors")):
            try:
                file = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise Damaged(f"{path}: is no safetensors file ({error})") from None
            self.files.append(file)
            for key in file.keys():
                try:
                    kind, name, start = key.rsplit(":", 2)
                    length = int(np.prod(file.get_slice(key).get_shape()))
                    run = Run(int(start), int(start) + length, file, key)
                except ValueError:
                    raise Damaged(f"{path}: holds {key}, which is no KIND:NAME:START") from None
                self.runs.setdefault((kind, name), []).append(run)
                self.by_name.setdefault(name, set()).add(kind)

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self.files:
            file.__exit__(None, None, None)

    def kinds(self, name: str) -> set[str]:
        return self.by_name.get(name, set())

    def names(self, kind: str) -> set[str]:
        return {name for each, name in self.runs if each == kind}

    def size(self, kind: str, name: str) -> int:
        """Elements stored, from the first to where one is missing; 0 where there are none."""
        position = 0
        for run in sorted(self.runs.get((kind, name), []), key=lambda run: run.start):
            position = max(position, run.stop) if run.start <= position else position
        return position

    def own(self, kind: str, rank: int) -> dict[str, Tensor]:
        """What one rank stored for itself under `kind`, by name; empty where there was no such rank."""
        found = {}
        for each in self.kinds(str(rank)):
            if each.startswith(f"{kind}/"):
                (run,) = self.runs[each, str(rank)]
                found[each.removeprefix(f"{kind}/")] = run.file.get_tensor(run.key)
        return found

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Elements `start` to `start + length` of a flattened parameter, 1-D.

        Raises:
            KeyError: not all of them are stored.
        """
        stop, parts = start + length, []
        position = start
        for run in sorted(self.runs.get((kind, name), []), key=lambda run: run.start):
            if run.start <= position < run.stop and position < stop:
                upto = min(stop, run.stop)
                parts.append(run.file.get_slice(run.key)[position - run.start : upto - run.start])
                position = upto
        if position < stop:
            raise KeyError(f"{self.checkpoint}: holds no {kind} of {name} from element {position} to {stop}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)
