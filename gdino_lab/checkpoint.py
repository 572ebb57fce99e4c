"""What a checkpoint holds of an engine and its rank, and writing it while training goes on; the files are
gdino_lab/checkpoint_folder.py's."""

from __future__ import annotations

import errno
import math
import platform
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gdino_lab
from gdino_lab.checkpoint_folder import TRAINER, Stored, commit, name_of, tell_failure, write_share
from gdino_lab.errors import ConfigurationError, NotSaved
from gdino_lab.models.average import WeightAverage
from gdino_lab.pieces import AVERAGE, WEIGHT, Piece, buffers_of, counters, pieces, put_back, restore_counters
from gdino_lab.run_folder import read_json

RANDOM = "random"
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "numpy", "peft")


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
        trainer_state: Callable[[], dict[str, Any]],
        own: dict[str, dict[str, Tensor]],
        best: bool = False,
        also: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state and begin to write it. Collective.

        Args:
            trainer_state: what JSON holds, of rank 0; asked for while the state is being copied, so it may use the model and not
                change it.
            own: further tensors on the CPU, of this rank alone, by kind and name; see Stored.own.
            best: whether checkpoints/best is to be this one.
            also: done by rank 0 before the new checkpoint counts.

        Raises:
            NotSaved: the one before could not be written, or there is no room for this.
        """
        self.wait()
        rank = dist.get_rank()
        updates = average.updates if average is not None else 0
        with copied_to_host(pieces(engine, average), engine.device) as tensors:
            kept = deepcopy(trainer_state())  # written later, when training has gone on
            kept |= {"counters": counters(engine) | {"average_updates": updates}, "versions": versions()}
        for kind, named in (own | {RANDOM: random_state()}).items():
            tensors |= {f"{kind}/{name}:{rank}:0": tensor for name, tensor in named.items()}
        partial = self.folder / f".{name_of(step)}.partial"
        self._agree(lambda: self._make_room(partial, sum(each.nbytes for each in tensors.values())))

        def write() -> None:
            try:
                write_share(partial, rank, tensors, kept if rank == 0 else None)
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


@contextmanager
def copied_to_host(found: list[Piece], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The pieces that are this rank's to store, by the key they are stored under; copies, so that training may go on after the
    block. A GPU makes them while the block runs, which may read the pieces and not change them."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
    copies = {}
    with torch.cuda.stream(beside) if on_gpu else nullcontext():
        for piece in found:
            if piece.mine:
                values = piece.values
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
                copies[f"{piece.kind}:{piece.name}:{piece.start}"] = copy.copy_(values, non_blocking=True)
    try:
        yield copies
    finally:
        if on_gpu:
            beside.synchronize()


@cache
def versions() -> dict[str, str]:
    return {"gdino-lab": gdino_lab.__version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


# --- reading ----------------------------------------------------------------------------------------------------------


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
