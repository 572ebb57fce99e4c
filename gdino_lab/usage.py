"""What a run used: seconds by phase, peak memory."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Phases:
    """Wall-clock seconds by phase: with phases("train"): ..."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def peak_bytes_by_rank(device: torch.device) -> list[dict[str, int]] | None:
    """The allocator's peaks of each rank, bytes; None on CPU, where there is no allocator to ask. Collective."""
    if device.type != "cuda":
        return None
    mine = {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }
    peaks: list = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, mine)
    return peaks


def host_peak_bytes() -> int:
    """Peak resident bytes of this process (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
