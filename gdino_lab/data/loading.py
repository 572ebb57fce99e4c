"""Which samples a rank sees, in which order: the same images make up step N whatever the number of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# Of a terminal or a scheduler, to every process of a run.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EpochSampler:
    """(epoch, index) pairs of one rank, shuffled by (seed, epoch), from the `start`-th on.

    The ranks take turns along one permutation, so consecutive runs of effective_batch images are the optimizer steps
    for any number of ranks.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, seed: int, shuffle: bool):
        self.places = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        self.start = 0

    def set_position(self, epoch: int, start: int = 0) -> None:
        self.places.set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for place, index in enumerate(self.places):
            if place >= self.start:
                yield self.places.epoch, index

    def __len__(self) -> int:
        return max(0, len(self.places) - self.start)


def loader(
    dataset: Dataset,
    sampler: EpochSampler,
    batch_size: int,
    workers: int,
    collate: Callable,
    pin_memory: bool,
    taken_at_once: int = 1,
) -> DataLoader:
    """Batches in the sampler's order. The processes stay from epoch to epoch: a sample names its own epoch.

    Args:
        taken_at_once: batches that the reader asks for before it computes; as many are kept ready.
    """
    context = None
    if workers:
        # Forked workers would inherit the engine's threads and CUDA state; spawned ones take seconds each to start.
        context = get_context("forkserver")
        context.set_forkserver_preload(["gdino_lab.data.forkserver", "gdino_lab.data.loco", "gdino_lab.data.detection", "torch"])
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=partial(_collate_in_shared_memory, collate) if workers else collate,
        pin_memory=pin_memory,
        prefetch_factor=max(2, -(-taken_at_once // workers)) if workers else None,
        multiprocessing_context=context,
        persistent_workers=workers > 0,
        worker_init_fn=_live_as_long_as_the_rank if workers else None,
        # Each new iterator draws a number: from the generator that dropout uses, a resumed run would draw one more.
        generator=torch.Generator(),
    )


def _collate_in_shared_memory(collate: Callable, samples: list[Any]) -> Any:
    """Left to torch, a thread of the data process moves a batch there. Where /dev/shm is full that thread can only print
    so, and the rank would wait for the batch for ever."""
    batch = collate(samples)
    _share(batch)
    return batch


def _share(value: Any) -> None:
    if isinstance(value, Tensor):
        value.share_memory_()
    elif isinstance(value, dict):
        for each in value.values():
            _share(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _share(each)


def _live_as_long_as_the_rank(worker: int) -> None:
    """Torch has a data process listen to SIGTERM again; see gdino_lab.data.forkserver."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with_the_rank, daemon=True).start()


def _end_with_the_rank() -> None:
    """Torch looks whether the parent is gone, but that is the server which forked this process and lives as long as it
    does: after a rank that was killed both would stay, with their memory, for ever."""
    parent_process().join()
    os._exit(1)
