"""What a checkpoint holds, writing it while training goes on, and reading it only when it is whole.

    checkpoints/step_00000120/
        state_<rank>.safetensors   weights, optimizer states, averages and random generators (gdino_lab/pieces.py)
        trainer.json               progress, counters, proof, and the plan, settings and versions it belongs to
        manifest.json              bytes and SHA-256 of each file; written last, so a folder with one was finished
    checkpoints/last, best         links to two of these

Nothing in it is a pickle, so loading runs no code of whoever wrote it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gdino_lab.errors import NotSaved
import gdino_lab
from gdino_lab.models.average import WeightAverage
from gdino_lab.pieces import AVERAGE, WEIGHT, Piece, counters, pieces, put_back, restore_counters
from gdino_lab.run_folder import read_json, write_json

FORMAT = 1
MANIFEST, TRAINER = "manifest.json", "trainer.json"
LAST, BEST = "last", "best"
RANDOM = "random"
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "numpy", "peft")
CHUNK = 2**24  # bytes written and hashed at once
# A rank that has written its share waits this many seconds for the others'.
PATIENCE = 1800
# Names of dtypes in the safetensors format.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Damaged(Exception):
    """A checkpoint that is not whole; the message names the file."""


# --- writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes checkpoints of one run while training goes on: `save` returns once the state is copied to host memory.

    Args:
        folder: the run's checkpoints/.
        keep: how many of the newest stay; `last` and `best` always do.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.thread: Thread | None = None
        self.error: BaseException | None = None

    def save(
        self,
        engine: Any,
        average: WeightAverage | None,
        step: int,
        trainer_state: dict[str, Any],
        own: dict[str, dict[str, Tensor]],
        best: bool = False,
        also: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state and begin to write it. Collective.

        Args:
            trainer_state: what JSON holds, of rank 0.
            own: further tensors on the CPU, of this rank alone, by kind and name; see Stored.own.
            best: whether checkpoints/best is to be this one.
            also: done by rank 0 before the new checkpoint counts.

        Raises:
            NotSaved: the one before could not be written, or there is no room for this.
        """
        self.wait()
        rank = dist.get_rank()
        tensors = copied_to_host(pieces(engine, average), engine.device)
        for kind, named in (own | {RANDOM: random_state()}).items():
            tensors |= {f"{kind}/{name}:{rank}:0": tensor for name, tensor in named.items()}
        updates = average.updates if average is not None else 0
        trainer_state |= {"counters": counters(engine) | {"average_updates": updates}, "versions": versions()}
        partial = self.folder / f".{name_of(step)}.partial"
        self._agree(lambda: self._make_room(partial, sum(each.nbytes for each in tensors.values())))

        def write() -> None:
            try:
                write_share(partial, rank, tensors, trainer_state if rank == 0 else None)
                if rank == 0:
                    if also is not None:
                        also()
                    commit(partial, self.folder, step, dist.get_world_size(), best, self.keep)
            except BaseException as error:  # noqa: BLE001  told by `wait`, in the thread that trains
                self.error = error
                tell_failure(partial, rank)

        self.thread = Thread(target=write, name="checkpoint", daemon=False)
        self.thread.start()

    def wait(self) -> None:
        """Until what was begun is written. Collective.

        Raises:
            NotSaved: it could not be, on any rank.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            try:
                self._agree(self._tell)
            except NotSaved:
                self._clear_if_possible()
                raise

    def linger(self, seconds: float = 10) -> None:
        """Where a run ends for another reason, give what was begun a moment to be written."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.error is not None:
                self._clear_if_possible()  # on a full disk this makes room to write down what happened

    def _tell(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _make_room(self, partial: Path, needed: int) -> None:
        """Room on the disk, and an empty folder in it."""
        if dist.get_rank() > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        needed *= dist.get_world_size()  # the shares are about equal
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            said = f"{self.folder}: a checkpoint takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there"
            raise NotSaved(said, self.folder, errno.ENOSPC)
        partial.mkdir()

    def _clear(self) -> None:
        """Remove what was not finished, by this run or one that was killed."""
        if dist.get_rank() == 0:
            for stale in self.folder.glob(".*.partial"):
                shutil.rmtree(stale)

    def _clear_if_possible(self) -> None:
        with suppress(OSError):  # the disk may have become read-only; there is a worse thing to tell
            self._clear()

    def _agree(self, attempt: Callable[[], None]) -> None:
        """Do it on each rank; where one fails all do, or the others would wait for it for ever."""
        error: NotSaved | None = None
        try:
            attempt()
        except NotSaved as found:
            error = found
        except Exception as found:  # noqa: BLE001  raised below
            error = NotSaved(f"{self.folder}: {found}", self.folder, number_of(found))
            error.__cause__ = found
        if dist.get_world_size() > 1:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, error and (error.echo, str(error), error.errno))
            if any(told) and (error is None or error.echo):  # then it is told as the rank tells it that knows the cause
                _, said, number = min(filter(None, told), key=lambda each: each[0])
                error = NotSaved(said, self.folder, number, echo=True)
        if error is not None:
            raise error


def number_of(error: Exception) -> int | None:
    """The system's, which safetensors has in its message only."""
    told = re.search(r"os error (\d+)", str(error))
    return int(told[1]) if told else getattr(error, "errno", None)


def name_of(step: int) -> str:
    return f"step_{step:08}"


def copied_to_host(found: list[Piece], device: torch.device) -> dict[str, Tensor]:
    """The pieces that are this rank's to store, by the key they are stored under; copies, so that training may go on."""
    copies = {}
    for piece in found:
        if piece.mine:
            values = piece.values
            copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type == "cuda")
            copies[f"{piece.kind}:{piece.name}:{piece.start}"] = copy.copy_(values, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return copies


def versions() -> dict[str, str]:
    return {"gdino-lab": gdino_lab.__version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def write_share(partial: Path, rank: int, tensors: dict[str, Tensor], trainer_state: dict[str, Any] | None) -> None:
    """This rank's files and, last, what they are: .share_<rank>.json."""
    files = {}
    name = f"state_{rank}.safetensors"
    files[name] = write_tensors(partial / name, tensors)
    if trainer_state is not None:
        text = json.dumps(trainer_state, indent=1).encode()
        files[TRAINER] = write_bytes(partial / TRAINER, [memoryview(text)])
    write_json(partial / f".share_{rank}.json", files)


def tell_failure(partial: Path, rank: int) -> None:
    """To rank 0, which waits for this rank's share. What was written of it goes first: on a full disk there is no room else."""
    with suppress(OSError):
        (partial / f"state_{rank}.safetensors").unlink(missing_ok=True)
        (partial / f".failed_{rank}").touch()


def commit(partial: Path, folder: Path, step: int, ranks: int, best: bool, keep: int) -> None:
    """All shares are there: the folder gets its manifest, then its name, then the links that point to it."""
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
    manifest = json.dumps({"format": FORMAT, "step": step, "ranks": ranks, "time": time.time_ns(), "files": files}, indent=1)
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
    data = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in ordered.values()]
    return write_bytes(path, [memoryview(len(text).to_bytes(8, "little") + text), *data])


def write_bytes(path: Path, parts: list[memoryview]) -> dict[str, Any]:
    """Write, hash at the same time, and bring it to the disk; returns {"bytes", "sha256"}."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for chunk in chunks(parts):
            hashed = hasher.submit(digest.update, chunk)
            left = memoryview(chunk)
            while left:
                left = left[file.write(left) :]
            hashed.result()
        os.fsync(file.fileno())
    return {"bytes": sum(part.nbytes for part in parts), "sha256": digest.hexdigest()}


def chunks(parts: list[memoryview]) -> Any:
    """The same bytes in pieces of about CHUNK: small parts together, large ones cut."""
    small = bytearray()
    for part in parts:
        if part.nbytes < CHUNK // 16:
            small += part
            if len(small) >= CHUNK:
                yield bytes(small)
                small.clear()
            continue
        if small:
            yield bytes(small)
            small.clear()
        for start in range(0, part.nbytes, CHUNK):
            yield part[start : start + CHUNK]
    if small:
        yield bytes(small)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ----------------------------------------------------------------------------------------------------------


def written(folder: Path) -> list[Path]:
    """The checkpoints below `folder` that were finished, the newest first."""
    found = []
    for path in folder.glob("step_*"):
        try:
            found.append((int(read_json(path / MANIFEST)["time"]), path))
        except (OSError, ValueError, KeyError, TypeError):
            found.append((path.stat().st_mtime_ns, path))  # damaged: `verify` will say how
    return [path for _, path in sorted(found, reverse=True)]


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
    for name, known in files.items():
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
    verify_form(checkpoint, manifest)


def verify_form(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """A manifest may agree with files that no gdino-lab wrote: each must be of its format, none missing and none added.

    Raises:
        Damaged: naming the file and what it is not.
    """
    listed = {name for name in manifest["files"] if name.startswith("state_")}
    if manifest.get("ranks") != len(listed) or TRAINER not in manifest["files"]:
        raise Damaged(f"{checkpoint / MANIFEST}: names {len(listed)} share(s) for {manifest.get('ranks')} rank(s), or no {TRAINER}")
    for path in checkpoint.glob("state_*.safetensors"):
        if path.name not in listed:
            raise Damaged(f"{path}: is not in the manifest")
    with Stored(checkpoint):
        pass
    try:
        if not isinstance(read_json(checkpoint / TRAINER), dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{checkpoint / TRAINER}: is no JSON ({error})") from None


def load(engine: Any, average: WeightAverage | None, checkpoint: Path) -> dict[str, Any]:
    """Restore engine, average and random generators from a checkpoint that is whole; returns the trainer's state."""
    trainer_state = read_json(checkpoint / TRAINER)
    with Stored(checkpoint) as stored:
        put_back(engine, average, stored)
        restore_counters(engine, trainer_state["counters"])
        if average is not None and stored.names(AVERAGE):
            average.updates = trainer_state["counters"]["average_updates"]
        elif average is not None:
            average.restart()
        if generators := stored.own(RANDOM, dist.get_rank()):  # a rank there was none of keeps its own
            restore_random_state(generators)
    return trainer_state


def load_weights(module: nn.Module, checkpoint: Path, averages: bool = False) -> None:
    """Give a module that is no engine's yet the weights of a checkpoint, and nothing else.

    Args:
        averages: take the moving averages of those parameters that have one.

    Raises:
        KeyError: it holds no such weight.
    """
    with Stored(checkpoint) as stored, torch.no_grad():
        for name, tensor in tensors_of(module).items():
            kind = AVERAGE if averages and AVERAGE in stored.kinds(name) else WEIGHT
            tensor.view(-1).copy_(stored.read(kind, name, 0, tensor.numel()))


def misfits(module: nn.Module, checkpoint: Path) -> list[str]:
    """What hinders `load_weights`: a phrase a tensor."""
    wrong = []
    with Stored(checkpoint) as stored:
        for name, tensor in tensors_of(module).items():
            if (size := stored.size(WEIGHT, name)) != tensor.numel():
                wrong.append(f"{name} has {tensor.numel()} elements, there it has {size}" if size else f"{name} is not there")
    return wrong


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the one name each is stored under."""
    parameters = dict(module.named_parameters())
    buffers = {name: each for name, each in module.state_dict(keep_vars=True).items() if not isinstance(each, nn.Parameter)}
    return {name: each.detach() for name, each in (parameters | buffers).items()}


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


# --- random generators ------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Tensor]:
    """The generators of torch, CUDA, numpy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    form, numbers, pending = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_more": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor(numbers),
        "python_more": torch.tensor([form, math.nan if pending is None else pending], dtype=torch.float64),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_more"].tolist()
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    form, pending = state["python_more"].tolist()
    random.setstate((int(form), tuple(state["python"].tolist()), None if math.isnan(pending) else pending))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
