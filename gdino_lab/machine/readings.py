"""Everything at once, for a post-mortem."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdino_lab.machine.devices import Device, read_device
from gdino_lab.machine.host import Host, read_host, read_memlock, read_oom_kills, read_open_files, read_shared


@dataclass(frozen=True)
class Readings:
    """What the machine said when a rank died; None where there was nothing to ask."""

    host: Host | None = None
    oom_kills: int | None = None
    """Processes the kernel ended for lack of memory since the run began."""
    shared: tuple[int, int] | None = None
    """Total and free bytes of /dev/shm."""
    memlock: int | None = None
    """Bytes a process may lock in memory; -1: any number."""
    device: Device | None = None
    open_files: int | None = None
    """Files a process may have open; -1: any number."""


def read_all(oom_kills_before: int | None, on_device: bool) -> Readings:
    """Everything a dying rank can say; what cannot be asked any more is left out.

    Args:
        oom_kills_before: what read_oom_kills said when the run began.
    """
    return Readings(
        _or_none(read_host, [os.getpid()]),
        kills_since(oom_kills_before),
        _or_none(read_shared),
        _or_none(read_memlock),
        _or_none(read_device, int(os.environ.get("LOCAL_RANK", 0))) if on_device else None,
        _or_none(read_open_files),
    )


def kills_since(before: int | None) -> int | None:
    """Processes the kernel ended for lack of memory since read_oom_kills said `before`."""
    now = _or_none(read_oom_kills)
    return None if now is None or before is None else now - before


def _or_none(read: Callable, *arguments: Any) -> Any:
    """A post-mortem must not die of its own questions."""
    try:
        return read(*arguments)
    except Exception:
        return None
