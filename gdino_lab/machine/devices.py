"""GPUs, as NVIDIA's driver and as torch see them, and what a device can compute."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU; bytes are None where the driver does not tell."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver numbers it; sizes in bytes, `holders` without this process."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    holders: list[Holder] = field(default_factory=list)


@dataclass(frozen=True)
class Driver:
    """What NVIDIA's driver says. `cuda` is the newest version it runs; `error` says why it does not answer."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: list[Gpu] = field(default_factory=list)
    error: str = ""
    broken: bool = False
    """There is a driver, but it fails; False where there is none."""


@dataclass(frozen=True)
class Device:
    """Memory of the GPU that CUDA numbers `index`, bytes: the driver's view, then that of this process's allocator, and
    who else holds some. None: not told."""

    index: int
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    others: list[Holder] = field(default_factory=list)


def read_driver() -> Driver:
    """NVIDIA's driver, its GPUs and who holds their memory."""
    try:
        import pynvml
    except ImportError:
        return Driver(error="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Driver(error=str(error))
    except pynvml.NVMLError as error:
        return Driver(error=str(error), broken=True)
    try:
        newest = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return Driver(pynvml.nvmlSystemGetDriverVersion(), (newest // 1000, newest % 1000 // 10), gpus)
    except pynvml.NVMLError as error:
        return Driver(error=str(error), broken=True)
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(pynvml: ModuleType, index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(device))
    name, holders = pynvml.nvmlDeviceGetName(device), _read_holders(pynvml, device)
    return Gpu(index, name, memory.total, memory.free, capability, holders)


def read_device(index: int) -> Device:
    """This rank's GPU; each part on its own, since a driver out of memory answers only some questions."""
    figures: dict[str, Any] = {}
    with suppress(Exception):
        figures["free"], figures["total"] = torch.cuda.mem_get_info(index)
    with suppress(Exception):
        if torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats(index)
            for name, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
                figures[name] = stats[f"{key}.all.current"]
            figures["peak"] = stats["allocated_bytes.all.peak"]
    with suppress(Exception):
        memory, figures["others"] = _read_memory_by_driver(index)
        figures.setdefault("total", memory.total)
        figures.setdefault("free", memory.free)
    return Device(index, **figures)


def _read_memory_by_driver(index: int) -> tuple[Any, list[Holder]]:
    """The driver's memory figures of CUDA's device `index`, and the other processes that hold some of it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        # CUDA numbers what CUDA_VISIBLE_DEVICES leaves, the driver numbers all.
        visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        chosen = visible[index] if visible else str(index)
        if chosen.isdigit():
            device = pynvml.nvmlDeviceGetHandleByIndex(int(chosen))
        else:
            device = pynvml.nvmlDeviceGetHandleByUUID(chosen)
        return pynvml.nvmlDeviceGetMemoryInfo(device), _read_holders(pynvml, device)
    finally:
        pynvml.nvmlShutdown()


def _read_holders(pynvml: ModuleType, device: Any) -> list[Holder]:
    """The processes that hold memory of a GPU, without this one; `device` is the driver's handle."""
    held: dict[int, int | None] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        with suppress(pynvml.NVMLError):  # not every kind of GPU can tell
            held |= {process.pid: process.usedGpuMemory for process in ask(device)}
    return [Holder(pid, _process_name(pid), size) for pid, size in held.items() if pid != os.getpid()]


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "of another container"


def read_torch_cuda() -> tuple[int, str]:
    """CUDA devices torch can use; torch's own words where there is none."""
    try:
        torch.cuda.init()  # is_available() would say no, but not why
    except (RuntimeError, AssertionError) as error:
        return 0, str(error).splitlines()[0]
    return torch.cuda.device_count(), ""


def read_dtypes(device: str) -> dict[str, str]:
    """dtype -> why a small product fails there, empty where it does not."""
    errors = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        try:
            ones = torch.ones(16, 16, device=device, dtype=dtype)
            errors[name] = "" if (ones @ ones == 16).all() else "wrong result"
        except RuntimeError as error:
            errors[name] = str(error).splitlines()[0]
    return errors
