"""Memory, cores, limits and disk of the machine, or of the container around this process."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Host:
    """Memory of the machine at one moment, bytes; `limit` and `left` are the container's, None without one."""

    total: int
    available: int
    swap_free: int
    limit: int | None
    left: int | None
    processes: dict[int, int]
    """Resident bytes by process id: the ranks with their data processes."""

    def share_left(self) -> float:
        shares = [self.available / self.total]
        if self.limit:
            shares.append(self.left / self.limit)
        return min(shares)


def read_host(ranks: list[int]) -> Host:
    """Host memory now; `ranks` are the process ids whose trees are counted."""
    memory, limit = psutil.virtual_memory(), read_memory_limit()
    sizes: dict[int, int] = {}
    for rank in ranks:
        with suppress(psutil.Error):
            tree = [psutil.Process(rank), *psutil.Process(rank).children(recursive=True)]
            for each in tree:
                with suppress(psutil.Error):
                    sizes[each.pid] = each.memory_info().rss
    return Host(memory.total, memory.available, psutil.swap_memory().free, *(limit or (None, None)), sizes)


def read_memory_limit(folders: Iterator[Path] | None = None) -> tuple[int, int] | None:
    """The container's memory limit and what is left of it, bytes; None where nothing limits."""
    found = []
    for folder in cgroup_folders("memory") if folders is None else folders:
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= 2**60:  # version 1 writes "none" as a huge number
            continue
        stat = (folder / "memory.stat").read_text() if (folder / "memory.stat").exists() else ""
        counts = dict(line.split() for line in stat.splitlines())
        cache = counts.get("total_inactive_file", counts.get("inactive_file", 0))  # given back when needed
        found.append((limit, limit - used + int(cache)))
    return min(found, key=lambda pair: pair[1], default=None)


def read_oom_kills(folders: Iterator[Path] | None = None, whole: Path = Path("/proc/vmstat")) -> int | None:
    """Processes the kernel has ended for lack of memory: in this control group, or on the machine where that is not told."""
    innermost = next(iter(cgroup_folders("memory") if folders is None else folders), None)
    paths = [] if innermost is None else [innermost / "memory.events", innermost / "memory.oom_control"]
    for path in (*paths, whole):
        with suppress(OSError):
            counts = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) > 1)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def read_usable_cores(folders: Iterator[Path] | None = None) -> float:
    """Cores by affinity and by the container's quota."""
    usable = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in cgroup_folders("cpu") if folders is None else folders:
        quota = _number(folder, "cpu.max", "cpu.cfs_quota_us")
        period = _number(folder, "cpu.cfs_period_us") or 100_000
        if (folder / "cpu.max").exists():
            period = int((folder / "cpu.max").read_text().split()[1])
        if quota is not None and quota > 0:
            usable = min(usable, quota / period)
    return usable


def cgroup_folders(
    controller: str, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """This process's control group of either version and those around it: each may set a limit."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        innermost = base / path.lstrip("/")
        yield from (each for each in (innermost, *innermost.parents) if each.is_relative_to(base) and each.is_dir())


def _number(folder: Path, *names: str) -> int | None:
    """The first number in the first of the files that is there; None for 'max' or no file."""
    for path in (folder / name for name in names):
        if path.exists():
            word = path.read_text().split()[0]
            return None if word == "max" else int(word)
    return None


def read_bf16_instructions(path: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has them."""
    words = set(path.read_text().split()) if path.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def read_shared() -> tuple[int, int] | None:
    """Total and free bytes of /dev/shm; None where there is none."""
    if not SHARED.is_dir():
        return None
    size = shutil.disk_usage(SHARED)
    return size.total, size.free


def read_leftovers() -> list[int]:
    """Bytes of each file that DeepSpeed's CPU all-reduce left in /dev/shm."""
    return [path.stat().st_size for path in SHARED.glob("deepspeed_*")]


def read_memlock() -> int:
    """Bytes that a process may lock in memory (ulimit -l); -1: any number."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def read_open_files() -> int:
    """Files that a process may have open (ulimit -n); -1: any number."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def read_disk(folder: Path) -> tuple[str, int]:
    """`folder`, resolved, and the free bytes where it lies or will lie."""
    folder = folder.resolve()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return str(folder), shutil.disk_usage(there).free
