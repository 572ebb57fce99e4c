"""Which death it was, with figures, and what to paste: on the words that libraries really say."""

from __future__ import annotations

import errno
import os
import queue
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from gdino_lab import postmortem, settings as settings_module
from gdino_lab.commands.main import composed
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.errors import ConfigurationError, NotSaved
from gdino_lab.machine.devices import Device, Holder
from gdino_lab.machine.host import Host
from gdino_lab.machine.readings import Readings
from gdino_lab.models.not_finite import NotFinite
from gdino_lab.postmortem import Diagnosis, diagnose, diagnose_exit

GIB = 2**30
NOTHING = Readings()
FINE = Host(64 * GIB, 40 * GIB, 0, None, None, {7: 3 * GIB})
SHORT = replace(FINE, available=GIB)

NEW = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is free. "
    "Process 1234 has 10.00 GiB memory in use. Including non-PyTorch memory, this process has 67.87 GiB memory in use. "
    "Of the allocated memory 66.06 GiB is allocated by PyTorch, and 1.12 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
CAPPED = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 139.80 GiB of which 101.00 GiB is "
    "free. 24.00 GiB allowed; Of the allocated memory 23.90 GiB is allocated by PyTorch, with 512.00 KiB allocated in "
    "private pools (e.g., CUDA Graphs), and 90.00 MiB is reserved by PyTorch but unallocated."
)
MISSPELT = (
    "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free. Of "
    "the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes "
    "free; 19.15 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)


def settings(*overrides: str) -> dict:
    return settings_module.as_dict(composed(*overrides))


@pytest.fixture(scope="module")
def cpu() -> dict:
    return settings("train.workers=0")


def test_allocator_figures_of_every_form_of_the_message():
    new = postmortem.parse_out_of_memory(NEW)
    assert new == {
        "gpu": 0, "asked_bytes": 2 * GIB, "total_bytes": int(79.15 * GIB), "free_bytes": int(1.25 * GIB),
        "process_bytes": int(67.87 * GIB), "allocated_bytes": int(66.06 * GIB), "unallocated_bytes": int(1.12 * GIB),
        "reserved_bytes": int(66.06 * GIB) + int(1.12 * GIB), "fragmentation": pytest.approx(1.12 / 67.18, abs=1e-4),
        "others": [{"pid": 1234, "bytes": 10 * GIB}],
    }  # fmt: skip
    capped = postmortem.parse_out_of_memory(CAPPED)
    assert (capped["gpu"], capped["asked_bytes"], capped["allowed_bytes"]) == (3, 20 * 2**20, 24 * GIB)
    assert (capped["free_bytes"], capped["allocated_bytes"]) == (101 * GIB, int(23.9 * GIB))
    assert capped["unallocated_bytes"] == 90 * 2**20
    misspelt = postmortem.parse_out_of_memory(MISSPELT)
    assert (misspelt["total_bytes"], misspelt["free_bytes"]) == (6 * GIB, 0)
    assert misspelt["fragmentation"] == pytest.approx(2.3 / 5.23, abs=1e-3)
    old = postmortem.parse_out_of_memory(OLD)
    assert (old["total_bytes"], old["free_bytes"], old["reserved_bytes"]) == (8 * GIB, 0, int(19.15 * GIB))
    assert old["unallocated_bytes"] == int(19.15 * GIB) - int(17.2 * GIB)
    assert postmortem.parse_out_of_memory("CUDA out of memory.") == {}


def test_allocator_out_of_memory_is_told_with_figures(cpu):
    found = diagnose(torch.OutOfMemoryError(NEW), NOTHING, settings("hardware.device=cuda", "hardware.devices=1"))
    assert found.kind == "out_of_memory"
    for words in ("2.0 GiB on GPU 0", "1.2 GiB of 79.1 GiB free", "66.1 GiB", "1.1 GiB in pieces", "process 1234 holds 10.0 GiB"):
        assert words in found.cause
    assert "expandable_segments" not in found.to_try  # the pieces together would not do
    assert found.to_try == "train.micro_batch=1 activations=recompute"
    in_pieces = diagnose(torch.OutOfMemoryError(MISSPELT), NOTHING, cpu)
    assert "enough if they were one" in in_pieces.cause and in_pieces.to_try.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments")
    capped = diagnose(torch.OutOfMemoryError(CAPPED), NOTHING, cpu).cause
    assert "24.0 GiB allowed by hardware.memory_limit_gib" in capped
    # Without figures in the message those of the readings stay.
    device = Device(0, 24 * GIB, GIB, 20 * GIB, 22 * GIB, 21 * GIB, [Holder(5, "Xorg", GIB)])
    bare = diagnose(torch.OutOfMemoryError("CUDA out of memory."), Readings(device=device), cpu)
    assert bare.figures["reserved_bytes"] == 22 * GIB and bare.figures["others"][0]["name"] == "Xorg"


def test_cures_are_those_the_run_does_not_have_yet():
    """Each is taken in turn, and each is an override that composes."""
    given, seen = ["hardware=rtx3090_single", "zero=stage0", "offload=none", "train.micro_batch=2"], []
    for _ in range(6):
        cure = postmortem.memory_cure(settings(*given))
        seen.append(cure)
        given += cure.split()
    assert seen[:5] == [
        "train.micro_batch=1 activations=recompute",
        "offload=optimizer zero=stage2",
        "precision=bf16_autocast",
        "zero=stage3 offload=optimizer_and_params bucket=5mb",
        "data.image_size=[64,96]",
    ]
    assert postmortem.memory_cure(settings("hardware.device=cuda", "zero=stage3", "tuning=lora", "train.micro_batch=1")) == (
        "offload=optimizer"
    )
    assert settings(seen[4])["data"]["image_size"] == [64, 96]


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 "
    "'out of memory'"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError(NCCL),
        torch.distributed.DistBackendError(NCCL.replace("Cuda failure 2 'out of memory'", "Failed to CUDA calloc async 24 bytes")),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["nccl", "nccl 2.28", "cuda", "cublas", "cudnn"],
)
def test_memory_that_the_driver_did_not_have(error, cpu):
    others = [Holder(11, "python", GIB), Holder(12, "Xorg", 9 * GIB), Holder(13, "hidden", None)]
    found = diagnose(error, Readings(device=Device(1, 24 * GIB, 0, 10 * GIB, 12 * GIB, others=others)), cpu)
    assert found.kind == "device_memory_taken"
    assert "GPU 1" in found.cause and "process 12 (Xorg) holds 9.0 GiB, process 11 (python) holds 1.0 GiB" in found.cause
    assert [each["pid"] for each in found.figures["others"]] == [12, 11, 13]
    assert found.to_try.startswith("end process 12 and 11 and 13")
    alone = diagnose(error, Readings(device=Device(0, 24 * GIB, 0, 10 * GIB, 12 * GIB)), cpu)
    assert alone.figures["outside_allocator_bytes"] == 12 * GIB and "train.micro_batch=1" in alone.to_try
    assert diagnose(error, NOTHING, cpu).kind == "device_memory_taken"


@pytest.mark.parametrize(
    ("kills", "host", "kind"),
    [(1, FINE, "host_memory"), (None, SHORT, "host_memory"), (0, SHORT, "killed"), (None, FINE, "killed"), (None, None, "killed")],
    ids=["counted", "used up", "used up, not counted", "enough", "unknown"],
)
def test_signal_9_is_the_kernels_only_with_evidence(cpu, kills, host, kind):
    found = diagnose_exit(-9, 1, Readings(host, kills), cpu)
    assert found.kind == kind and "rank 1 died by signal 9" in found.cause
    assert found.figures.get("host_available_bytes") == (host and host.available)
    if host:
        assert "of 64.0 GiB host memory were available, the run held 3.0 GiB" in found.cause
    if kind == "host_memory":
        assert found.to_try == "train.micro_batch=1 activations=recompute"


def test_a_containers_limit_counts_as_memory(cpu):
    found = diagnose_exit(-9, 0, Readings(replace(FINE, limit=8 * GIB, left=GIB // 8)), cpu)
    assert found.kind == "host_memory" and "128.0 MiB of the container's 8.0 GiB" in found.cause
    assert found.figures["container_left_bytes"] == GIB // 8


def test_data_process_that_was_killed():
    def told(exitcode: int, readings: Readings) -> Diagnosis:
        with pytest.raises(RuntimeError) as caught:
            notice([SimpleNamespace(pid=77, exitcode=exitcode)])
        return diagnose(caught.value, readings, settings("train.workers=4"))

    found = told(-9, Readings(FINE, oom_kills=1))
    assert (found.kind, found.to_try) == ("host_memory", "train.workers=0")
    assert "data process 77 died by signal 9" in found.cause
    assert told(-9, Readings(FINE, oom_kills=0)).kind == "killed"
    assert told(-7, Readings(shared=(GIB, 0))).kind == "shared_memory"
    assert told(-11, NOTHING).figures == {"signal": 11} and told(1, NOTHING).figures == {"exit_code": 1}


def notice(failed_workers: list) -> None:
    """As torch does, with nothing of what happened but the process ids."""
    raise RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly") from queue.Empty()


class Deadly(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_torch_tells_how_a_data_process_ended():
    data = Deadly()
    batches = loader(data, EpochSampler(data, 0, 1, seed=0, shuffle=False), 1, 1, torch.stack, pin_memory=False)
    with pytest.raises(RuntimeError) as caught:
        next(iter(batches))
    found = diagnose(caught.value, Readings(FINE, oom_kills=0), settings("train.workers=1"))
    assert found.kind == "killed" and found.figures["signal"] == 9 and "data process" in found.cause


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 TiB for an array with shape (1099511627776,) and data type float64"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["numpy", "torch", "fork"],
)  # fmt: skip
def test_memory_that_the_host_refused(error, cpu):
    found = diagnose(error, Readings(FINE), cpu)
    assert found.kind == "host_memory" and "40.0 GiB of 64.0 GiB" in found.cause
    assert found.figures.get("asked_bytes") == (8796093022208 if "Default" in str(error) else None)


def pin_memory() -> None:
    raise RuntimeError("CUDA error: out of memory")


def test_pinned_memory_is_told_by_where_it_was_asked_for():
    offloaded = settings("hardware=rtx3090_single")
    with pytest.raises(RuntimeError) as caught:
        pin_memory()
    found = diagnose(caught.value, Readings(FINE, memlock=8 * 2**20), offloaded)
    assert (found.kind, found.to_try) == ("pinned_memory", "offload.pin_memory=false")
    assert "ulimit -l is 8.0 MiB" in found.cause and found.figures["memlock_limit_bytes"] == 8 * 2**20
    thread = RuntimeError("Caught AcceleratorError in pin memory thread for device 0.\nCUDA error: out of memory")
    found = diagnose(thread, Readings(FINE, memlock=-1), settings("hardware=rtx3090_single", "offload=none"))
    assert (found.kind, found.to_try) == ("pinned_memory", "train.workers=0") and "unlimited" in found.cause
    roomy = Readings(FINE, memlock=-1, device=Device(0, 24 * GIB, 20 * GIB))
    assert diagnose(RuntimeError("CUDA error: out of memory"), roomy, offloaded).kind == "pinned_memory"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to open shared memory object </torch_123_456_7> in read-write mode: No space left on device (28)"),
        RuntimeError("DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that dataloader's workers are "
                     "out of shared memory. Please try to raise your shared memory limit."),
        RuntimeError("unable to write to file </torch_325_1>: No space left on device (28)"),
        torch.distributed.DistBackendError("NCCL error: Error while creating shared memory segment /dev/shm/nccl-X (size 9637888)"),
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/psm_1"),
    ],
    ids=["open", "bus error", "write", "nccl", "multiprocessing"],
)  # fmt: skip
def test_shared_memory_in_the_words_of_each(error):
    with_workers = settings("train.workers=2")
    found = diagnose(error, Readings(shared=(64 * 2**20, 0)), with_workers)
    assert (found.kind, found.to_try) == ("shared_memory", "train.workers=0")
    assert "0 bytes of 64.0 MiB free" in found.cause and found.figures["shm_free_bytes"] == 0
    assert "--shm-size" in diagnose(error, NOTHING, settings("train.workers=0")).to_try


def test_a_full_disk_is_no_full_shared_memory(cpu):
    full = OSError(errno.ENOSPC, "No space left on device", "outputs/model.safetensors")
    found = diagnose(full, Readings(shared=(GIB, GIB)), cpu)
    assert (found.kind, found.figures) == ("disk", {"errno": "ENOSPC", "file": "outputs/model.safetensors"})
    assert found.to_try == f"make room there, then go on with train.resume={postmortem.THIS_RUN}"
    assert diagnose(OSError(errno.ENOSPC, "No space left on device"), Readings(shared=(GIB, 0)), cpu).kind == "shared_memory"
    many = RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)")
    found = diagnose(many, Readings(open_files=1024), cpu)
    assert found.kind == "shared_memory" and "ulimit -n" in found.to_try and found.figures["open_files_limit"] == 1024


def test_bus_error_is_shared_memory_only_where_that_is_full(cpu):
    assert diagnose_exit(-7, 0, Readings(shared=(GIB, 0)), cpu).kind == "shared_memory"
    found = diagnose_exit(-7, 0, Readings(shared=(GIB, GIB)), cpu)
    assert found.kind == "other" and "SIGBUS" in found.cause
    assert diagnose_exit(-11, 0, NOTHING, cpu).figures["signal"] == 11
    assert diagnose_exit(3, 0, NOTHING, cpu).figures == {"exit_code": 3}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), "lost_peer"),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."), "lost_peer"),
        (RuntimeError("[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete"), "hang"),
        (KeyError("nut"), "other"),
        (ConfigurationError("image.png: not a readable image"), "refused"),
    ],
)
def test_what_is_no_lack_of_memory(error, kind, cpu):
    found = diagnose(error, Readings(SHORT, 3, (GIB, 0)), cpu)
    assert found.kind == kind and found.cause


def test_cause_behind_a_wrapper_and_of_a_data_process(cpu):
    try:
        raise RuntimeError("a wrapper") from torch.OutOfMemoryError(NEW)
    except RuntimeError as error:
        assert diagnose(error, NOTHING, cpu).kind == "out_of_memory"
    worker = ValueError("Caught ValueError in DataLoader worker process 0.\nTraceback ...\nValueError: nut")
    assert diagnose(worker, NOTHING, cpu).cause == "ValueError: nut"


# --- a checkpoint that could not be written ---


@pytest.mark.parametrize(
    ("number", "name", "cure"),
    [
        (errno.ENOSPC, "ENOSPC", "make room there, then go on with train.resume=/runs/1 train.keep=1"),
        (errno.EROFS, "EROFS", "make the folder writable, then go on with train.resume=/runs/1; or in another one, with run_dir=DIR besides"),
        (errno.EIO, "EIO", "see whether the disk is well, then go on with train.resume=/runs/1"),
    ],
)  # fmt: skip
def test_checkpoint_that_could_not_be_written(number, name, cure, cpu):
    error = NotSaved(f"/runs/1/checkpoints: [Errno {number}] /dev/shm", Path("/runs/1/checkpoints"), number)
    error.__cause__ = OSError(number, "/dev/shm")
    found = diagnose(error, Readings(shared=(64, 0)), cpu)
    assert (found.kind, found.to_try) == ("disk", cure)
    assert found.cause == f"a checkpoint could not be written: /runs/1/checkpoints: [Errno {number}] /dev/shm"
    assert found.figures == {"folder": "/runs/1/checkpoints", "errno": name}


def test_checkpoint_that_could_not_be_written_for_another_mistake(cpu):
    error = NotSaved("/runs/1/checkpoints: no such dtype", Path("/runs/1/checkpoints"))
    error.__cause__ = KeyError("no such dtype")
    assert diagnose(error, NOTHING, cpu).cause == "KeyError: 'no such dtype'"


# --- a loss that is not finite ---


def not_finite(**figures) -> NotFinite:
    empty = {"what": "loss", "step": 7, "terms": [], "inputs": [], "identity": "[(3, ...)]"}
    return NotFinite(empty | figures)


def test_a_loss_that_is_not_finite_says_where_it_began_and_what_helps():
    found = {"module": "detector.layer", "type": "Linear", "nan": 2, "infinite": 0, "of": 8, "inputs_finite": True}
    sick, sound = not_finite(**found, weights_finite=False), not_finite(**found, weights_finite=True)
    half = settings("hardware.device=cuda", "hardware.devices=1", "precision=fp16", "zero=stage1", "optimizer.lr=1e-3")
    full = settings("optimizer.lr=1e-3", "train.clip_norm=0")
    told = diagnose(sick, NOTHING, half)
    assert told.kind == "not_finite" and "at step 7" in told.cause and "detector.layer (Linear)" in told.cause
    assert "an earlier step broke them" in told.cause and told.to_try == "optimizer.lr=0.0001"
    assert diagnose(sound, NOTHING, half).to_try == "precision=bf16_autocast"
    assert diagnose(sound, NOTHING, full).to_try == "optimizer.lr=0.0001 train.clip_norm=1.0"
    assert diagnose(sound, NOTHING, settings("precision=bf16_autocast")).to_try == "precision=fp32"
    assert "loss terms focal" in diagnose(not_finite(terms=["focal"]), NOTHING, full).cause
    given = diagnose(not_finite(inputs=["pixel_values"], **found, weights_finite=True), NOTHING, full)
    assert "pixel_values" in given.cause and "(3, ...)" in given.to_try
    assert diagnose(NotFinite({}), NOTHING, full).kind == "lost_peer"


def test_an_overflow_at_every_loss_scale_is_told_with_another_precision():
    settings = settings_module.as_dict(composed("hardware=rtx3090_single", "precision=fp16"))
    raised = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")  # DeepSpeed's
    found = diagnose(raised, Readings(), settings)
    assert (found.kind, found.to_try) == ("not_finite", "precision=bf16_autocast")
    assert "fp16" in found.cause
