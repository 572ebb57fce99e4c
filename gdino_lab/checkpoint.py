"""What a checkpoint holds of an engine and its rank, and writing it while training goes on; the files are
gdino_lab/checkpoint_folder.py's."""

from __future__ import annotations

import errno
import math
import platform
import random
import re
import shutil
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import chain, groupby
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gdino_lab
from gdino_lab.checkpoint_folder import (
    TRAINER, Stored, add_answers, answers_of, commit, cut, name_of, tell_failure, write_share,
)  # fmt: skip
from gdino_lab.errors import ConfigurationError, NotSaved
from gdino_lab.models.average import WeightAverage
from gdino_lab.pieces import AVERAGE, WEIGHT, Piece, buffers_of, counters, pieces, put_back, restore_counters
from gdino_lab.proof import Digest
from gdino_lab.run_folder import read_json

RANDOM = "random"
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "numpy", "peft")
# Bytes of host memory allocated at once, or a single tensor's: a power of two, which torch makes of pinned memory.
BLOCK = 2**28


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Begun:
    """A checkpoint that is being written.

    ask: for what the model answers to the fixed image.  copied: set when what lies on a GPU is copied.  written: this rank's part
    of it, on rank 0 with the checkpoint's folder.  answered: the answers are there too; None until they are asked for.
    """

    ask: Callable[[], Digest]
    copied: Event
    written: Future[Path | None]
    answered: Future[None] | None = None

    def result(self) -> None:
        self.written.result()
        self.answered.result()


class Writer:
    """Writes checkpoints of one run while training goes on.

    `save` begins one. What lies on a GPU is copied to host memory by a thread, beside the next forward and backward pass. Then
    `before_step`, which comes before the weights change again, asks for the answers to the fixed image, behind the backward pass
    that the GPU is still busy with. A run that dies before leaves the checkpoint without answers.

    Args:
        folder: the run's checkpoints/.
        keep: how many of the newest stay; `last` and `best` always do.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.begun: Begun | None = None

    def save(
        self,
        engine: Any,
        average: WeightAverage | None,
        step: int,
        trainer_state: dict[str, Any],
        ask: Callable[[], Digest],
        own: dict[str, dict[str, Tensor]],
        best: bool = False,
        also: Callable[[], None] | None = None,
    ) -> None:
        """Begin to copy and write the state. Collective.

        Args:
            trainer_state: what JSON holds, of rank 0.
            ask: for what the model answers to the fixed image; called by `before_step`.
            own: further tensors on the CPU, of this rank alone, by kind and name; see Stored.own.
            best: whether checkpoints/best is to be this one.
            also: done by rank 0 before the new checkpoint counts.

        Raises:
            NotSaved: the one before could not be written, or there is no room for this.
        """
        self.wait()
        rank = dist.get_rank()
        updates = average.updates if average is not None else 0
        kept = trainer_state | {"counters": counters(engine) | {"average_updates": updates}, "versions": versions()}
        kept = deepcopy(kept)  # written later, when training has gone on
        steady, changing = on_gpu_until_a_step(engine, pieces(engine, average))
        tensors = dict(zip(changing, copies_on_host(list(changing.values())), strict=True))
        for kind, named in (own | {RANDOM: random_state()}).items():
            tensors |= {f"{kind}/{name}:{rank}:0": tensor for name, tensor in named.items()}
        partial = self.folder / f".{name_of(step)}.partial"
        size = sum(each.nbytes for each in chain(tensors.values(), steady.values()))
        self._agree(lambda: self._make_room(partial, size))
        now, copied = now_on(engine.device), Event()

        def write() -> Path | None:
            try:
                try:
                    tensors.update(zip(steady, copies_on_host(list(steady.values()), now), strict=True))
                finally:
                    copied.set()
                write_share(partial, rank, tensors, kept if rank == 0 else None)
                if rank > 0:
                    return None
                if also is not None:
                    also()
                return commit(partial, self.folder, step, dist.get_world_size(), best, self.keep)
            except BaseException:
                tell_failure(partial, rank)
                raise  # in `wait`, in the thread that trains

        self.begun = Begun(ask, copied, self.thread.submit(write))

    def before_step(self) -> None:
        """Comes before the weights change. Collective under ZeRO-3."""
        begun = self.begun
        if begun is not None and begun.answered is None:
            answers = begun.ask()
            begun.copied.wait()

            def add() -> None:  # when the one thread has written the rest
                if (checkpoint := begun.written.result()) is not None:
                    add_answers(checkpoint, answers)

            begun.answered = self.thread.submit(add)

    def wait(self) -> None:
        """Until what was begun is written. Collective.

        Raises:
            NotSaved: it could not be, on any rank.
        """
        if self.begun is not None:
            self.before_step()
            begun, self.begun = self.begun, None
            try:
                self._agree(begun.result)
            except NotSaved:
                self._clear_if_possible()
                raise

    def linger(self, seconds: float = 10) -> None:
        """Where a run ends for another reason, give what was begun a moment to be written."""
        if self.begun is not None:
            written, answered = self.begun.written, self.begun.answered
            futures.wait([written] if answered is None else [written, answered], seconds)
            if written.done() and written.exception() is not None:
                self._clear_if_possible()  # on a full disk this makes room to write down what happened

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


def on_gpu_until_a_step(engine: Any, found: list[Piece]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's pieces by the key they are stored under: those on a GPU that only a step changes, and the others. A forward pass
    may change buffers; what lies on the host is copied fastest by all its threads at once."""
    buffers = buffers_of(engine.module)
    steady, changing = {}, {}
    for piece in found:
        if piece.mine:
            kept = steady if piece.values.is_cuda and piece.name not in buffers else changing
            kept[f"{piece.kind}:{piece.name}:{piece.start}"] = piece.values
    return steady, changing


def now_on(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU has done what it was asked for until now."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@torch.no_grad()
def copies_on_host(values: list[Tensor], then: torch.cuda.Event | None = None) -> list[Tensor]:
    """Copies of 1-D tensors. With `then` those are on a GPU and copied as they are at that time, by a stream of its own."""
    if not values:
        return []
    if then is None:
        copies = side_by_side(values, pinned=False)
        torch._foreach_copy_(copies, values)
        return copies
    stream = torch.cuda.Stream(values[0].device)
    with torch.cuda.device(values[0].device), torch.cuda.stream(stream):  # a thread begins on GPU 0, and would open a context there
        copies = side_by_side(values, pinned=True)
        stream.wait_event(then)
        # One call, which leaves Python to the thread that trains: thousands would take longer to ask for than to make.
        torch._foreach_copy_(copies, values, non_blocking=True)
    stream.synchronize()
    return copies


def side_by_side(values: list[Tensor], pinned: bool) -> list[Tensor]:
    """Memory for a copy of each 1-D tensor, in few blocks: pinning it for each takes longer than filling it, and what lies side by
    side is written at once."""
    copies = list(values)
    numbers = sorted(range(len(values)), key=lambda number: str(values[number].dtype))
    for block in cut(numbers, lambda number: values[number].nbytes, BLOCK):
        for dtype, same in groupby(block, lambda number: values[number].dtype):
            same = list(same)
            sizes = [values[number].numel() for number in same]
            memory = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)
            for number, copy in zip(same, memory.split(sizes), strict=True):
                copies[number] = copy
    return copies


@cache
def versions() -> dict[str, str]:
    return {"gdino-lab": gdino_lab.__version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


# --- reading ----------------------------------------------------------------------------------------------------------


def load(engine: Any, average: WeightAverage | None, checkpoint: Path) -> dict[str, Any]:
    """Restore engine, average and random generators from a checkpoint that is whole; returns the trainer's state, and what the
    model answered to the fixed image under "answers"."""
    trainer_state = read_json(checkpoint / TRAINER) | {"answers": answers_of(checkpoint)}
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


def check_fits(module: nn.Module, checkpoint: Path, where: str) -> None:
    """Before `load` or `load_weights`.

    Raises:
        ConfigurationError: naming `where`, and tensors that are not in the checkpoint or have another size there.
    """
    wrong = []
    with Stored(checkpoint) as stored:
        for name, tensor in tensors_of(module).items():
            if (size := stored.size(WEIGHT, name)) != tensor.numel():
                wrong.append(f"{name} has {tensor.numel()} elements, there it has {size}" if size else f"{name} is not there")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigurationError(f"{where}: is of another model: {'; '.join(wrong[:3])}{more}")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the one name each is stored under."""
    return {name: each.detach() for name, each in (dict(module.named_parameters()) | buffers_of(module)).items()}


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
