"""NVIDIA's library with its answers made up."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace as Answer

import pytest
import torch

from gdino_lab.machine import devices


PARENT = os.getppid()


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two GPUs, each used by this process, by one of ours, and by one that is gone and does not say how much."""
    pynvml = pytest.importorskip("pynvml")

    def cannot_tell(device):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": {"GPU-a": 0, "GPU-b": 1}.get,
        "nvmlDeviceGetName": lambda device: "H200",
        "nvmlDeviceGetMemoryInfo": lambda device: Answer(total=100, free=60 + device, used=40 - device),
        "nvmlDeviceGetCudaComputeCapability": lambda device: (9, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda device: [
            Answer(pid=os.getpid(), usedGpuMemory=1),
            Answer(pid=PARENT, usedGpuMemory=30),
            Answer(pid=2**22 + 1, usedGpuMemory=None),
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": cannot_tell,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return pynvml


def test_a_driver_tells_who_holds_memory(pynvml, monkeypatch: pytest.MonkeyPatch):
    found = devices.read_driver()
    assert (found.version, found.cuda, found.error) == ("580.1", (12, 8), "")
    gpu, other = found.gpus
    assert (gpu.name, gpu.total, gpu.free, gpu.capability) == ("H200", 100, 60, (9, 0))
    assert (other.index, other.free) == (1, 61)
    assert [(each.pid, each.bytes) for each in gpu.holders] == [(PARENT, 30), (2**22 + 1, None)]
    assert gpu.holders[1].name == "of another container"

    def mismatch():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    assert devices.read_driver().broken


@pytest.mark.parametrize(("visible", "index", "free"), [("", 1, 61), ("1,0", 0, 61), ("GPU-b", 0, 61), ("1,0", 1, 60)])
def test_the_card_that_cuda_numbers_is_the_one_asked_about(pynvml, monkeypatch: pytest.MonkeyPatch, visible, index, free):
    def no_answer(index):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_answer)
    found = devices.read_device(index)
    assert (found.index, found.total, found.free) == (index, 100, free)
    assert [each.pid for each in found.others] == [PARENT, 2**22 + 1]
