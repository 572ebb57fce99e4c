"""Why a rank died and what to change: from the error or the exit code, and from what gdino_lab/machine read. Pure.

Whatever is told in figures is bytes, seconds or a count, as its name says.
"""

from __future__ import annotations

import errno
import linecache
import queue
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gdino_lab.errors import ConfigurationError, NotSaved, Unproved
from gdino_lab.machine.devices import Device
from gdino_lab.machine.readings import Readings
from gdino_lab.models.not_finite import NotFinite
from gdino_lab.run_folder import LOST_PEER

ALLOCATOR, DEVICE_TAKEN, HOST, PINNED, SHARED_MEMORY = (
    "out_of_memory", "device_memory_taken", "host_memory", "pinned_memory", "shared_memory",
)  # fmt: skip
OUT_OF_MEMORY_KINDS = (ALLOCATOR, DEVICE_TAKEN, HOST, PINNED, SHARED_MEMORY)
NOT_FINITE, HANG, KILLED, DISK, OTHER = "not_finite", "hang", "killed", "disk", "other"
REFUSED, UNPROVED = "refused", "unproved"
# Below this share left, memory counts as used up: the last reading is some tenths of a second old.
NOTHING_LEFT = 0.05
# Stands for the run's folder in what there is to try.
THIS_RUN = "<this run>"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Of AdamW from published weights: what a far larger one is brought down to at once.
SANE_RATE = 1e-4

Settings = dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    kind: str
    cause: str
    """One sentence."""
    figures: dict[str, Any] = field(default_factory=dict)
    to_try: str = ""
    """Overrides to paste, or words where no override helps."""

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "cause": self.cause, "figures": self.figures, "to_try": self.to_try}


# --- judging an exception -------------------------------------------------------------------------------------------


def diagnose(error: BaseException, readings: Readings, settings: Settings) -> Diagnosis:
    """What an exception means; everything about the machine comes in `readings`, about the run in `settings`."""
    root = error
    # An empty queue is only how torch notices that a data process has died.
    while root.__cause__ is not None and not isinstance(root.__cause__, queue.Empty) and not _of_disk(root):
        root = root.__cause__
    said = str(root)
    if isinstance(root, ConfigurationError):
        return Diagnosis(UNPROVED if isinstance(root, Unproved) else REFUSED, cause_of(root), {}, "correct what the message names")
    if isinstance(root, NotFinite):
        if not root.figures:
            return Diagnosis(LOST_PEER, cause_of(root))
        return Diagnosis(NOT_FINITE, str(root), root.figures, not_finite_cure(root.figures, settings))
    if _of_disk(root):
        return _disk(root, settings)
    if isinstance(root, torch.OutOfMemoryError) or re.search(r"CUDA out of memory\. Tried to allocate", said):
        return _allocator(said, readings, settings)
    short = any(text in said for text in ("out of memory", "cudaHostAlloc", "cudaHostRegister"))
    driver = short and any(name in said for name in ("CUDA", "Cuda", "NCCL"))
    # CUDA uses the same words for the host's memory; with room on the card it was not the card's.
    if short and _pins(root) or driver and _has_room(readings.device):
        return _pinned(root, readings, settings)
    if _shared_memory(root, readings):
        return _shared(root, readings, settings)
    if isinstance(root, OSError) and root.errno in NO_ROOM:
        return Diagnosis(
            DISK, f"the disk is full: {cause_of(root)}", {"errno": errno.errorcode[root.errno]} | _known(file=root.filename),
            f"make room there, then go on with train.resume={THIS_RUN}",
        )  # fmt: skip
    if driver or "ALLOC_FAILED" in said or re.search(r"Failed to CUDA \w*alloc", said):
        return _device_taken(root, readings, settings)
    if (dead := _dead_data_process(root)) is not None:
        return _died(f"data process {dead[0]}", dead[1], readings, settings)
    refusals = ("can't allocate memory", "Cannot allocate memory", "out of memory")
    if isinstance(root, MemoryError) or getattr(root, "errno", None) == errno.ENOMEM or any(each in said for each in refusals):
        return _host(f"the host refused memory: {cause_of(root)}", readings, settings, asked=_asked_of_host(said))
    if re.search(r"Timed out waiting \d+ ?ms|[Cc]ollective operation timeout", said):
        # The process group's own patience, where `train.hang_minutes` is off or longer.
        return Diagnosis(HANG, f"another rank never came: {cause_of(root)}", {}, hang_cure([], settings))
    if "loss scale already at minimum" in said:
        cause = "gradients overflowed in fp16 at every loss scale down to 1"
        return Diagnosis(NOT_FINITE, cause, {"loss_scale": 1.0}, not_finite_cure({}, settings))
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    if isinstance(root, torch.distributed.DistError) or any(text in said for text in lost):
        return Diagnosis(LOST_PEER, cause_of(root))
    return Diagnosis(OTHER, cause_of(root), {"exception": type(root).__name__})


def cause_of(error: BaseException) -> str:
    """One line. An error of a data process comes with that process's traceback: its last line says what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "in DataLoader worker process" in lines[0]:
        return lines[-1]
    if isinstance(error, ConfigurationError):
        return "; ".join(lines)
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _allocator(said: str, readings: Readings, settings: Settings) -> Diagnosis:
    figures = parse_out_of_memory(said)
    device = readings.device
    if device is not None:
        known = {
            "total_bytes": device.total,
            "free_bytes": device.free,
            "allocated_bytes": device.allocated,
            "reserved_bytes": device.reserved,
            "peak_allocated_bytes": device.peak,
        }
        figures = {name: value for name, value in known.items() if value is not None} | figures
        figures["others"] = _holders(device, figures.get("others", []))
    asked, unallocated, cure = figures.get("asked_bytes"), figures.get("unallocated_bytes"), memory_cure(settings)
    if asked is None:
        return Diagnosis(ALLOCATOR, said.splitlines()[0] if said else ALLOCATOR, figures, cure)
    cause = f"torch's allocator was asked for {amount(asked)}"
    if "total_bytes" in figures and "free_bytes" in figures:
        where = f" on GPU {figures['gpu']}" if "gpu" in figures else ""
        cause += f"{where} with {amount(figures['free_bytes'])} of {amount(figures['total_bytes'])} free"
    if "allowed_bytes" in figures:
        cause += f", {amount(figures['allowed_bytes'])} allowed by hardware.memory_limit_gib"
    if "allocated_bytes" in figures:
        cause += f"; it holds {amount(figures['allocated_bytes'])}"
    if unallocated is not None:
        cause += f" and {amount(unallocated)} in pieces between ({100 * figures['fragmentation']:.0f} % of what it reserved)"
        if unallocated >= asked:
            cause += ", enough if they were one"
            cure = f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in front of the command, which joins pieces; or {cure}"
    if figures.get("others"):
        cause += f"; {_told(figures['others'])}"
    return Diagnosis(ALLOCATOR, cause, figures, cure)


SIZE = r"([\d.]+) ?(bytes|KiB|MiB|GiB|TiB|PiB)"
UNITS = {unit: 1024**power for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"))}
# What torch's allocator says, in its words since 2.1 and, after the bar, in those before.
SAID = {
    "asked_bytes": rf"Tried to allocate {SIZE}",
    "total_bytes": rf"total capaci?ty of {SIZE}|{SIZE} total capacity",
    "free_bytes": rf"of which {SIZE} is free|{SIZE} free",
    "allowed_bytes": rf"{SIZE} allowed",
    "process_bytes": rf"this process has {SIZE} memory in use",
    "allocated_bytes": rf"{SIZE} is allocated by PyTorch|{SIZE} already allocated",
    "unallocated_bytes": rf"{SIZE} is reserved by PyTorch but unallocated",
    "reserved_bytes": rf"{SIZE} reserved in total by PyTorch",
}


def parse_out_of_memory(said: str) -> dict[str, Any]:
    """The figures in the message of a torch.OutOfMemoryError; `fragmentation` is the share of what the allocator has
    reserved that it could not give out."""
    figures: dict[str, Any] = {}
    if found := re.search(r"GPU (\d+)", said):
        figures["gpu"] = int(found[1])
    for name, pattern in SAID.items():
        if found := re.search(pattern, said):
            number, unit = (group for group in found.groups() if group is not None)
            figures[name] = int(float(number) * UNITS[unit])
    allocated = figures.get("allocated_bytes")
    if allocated is not None:
        if "reserved_bytes" in figures:
            figures.setdefault("unallocated_bytes", max(0, figures["reserved_bytes"] - allocated))
        if "unallocated_bytes" in figures:
            figures["reserved_bytes"] = allocated + figures["unallocated_bytes"]
            figures["fragmentation"] = round(figures["unallocated_bytes"] / max(1, figures["reserved_bytes"]), 4)
    others = re.findall(rf"Process (\d+) has {SIZE} memory in use", said)
    if others:
        figures["others"] = [{"pid": int(pid), "bytes": int(float(number) * UNITS[unit])} for pid, number, unit in others]
    return figures


def _device_taken(error: BaseException, readings: Readings, settings: Settings) -> Diagnosis:
    """CUDA, NCCL, cuBLAS or cuDNN got no memory from the driver: torch's allocator was not even asked."""
    device = readings.device or Device(0)
    others = _holders(device, [])
    figures = _known(
        gpu=device.index, total_bytes=device.total, free_bytes=device.free, allocated_bytes=device.allocated,
        reserved_bytes=device.reserved,
    ) | {"others": others}  # fmt: skip
    cause = f"the driver had no memory left on GPU {device.index}"
    if device.free is not None:
        cause += f" ({amount(device.free)} of {amount(device.total)} free)"
    if others:
        cause += f": {_told(others)}"
    elif device.reserved and device.total:
        rest = device.total - (device.free or 0) - device.reserved
        figures["outside_allocator_bytes"] = rest
        cause += f": torch's allocator holds {amount(device.reserved)}, CUDA's contexts and other processes {amount(rest)}"
    cause += f" ({cause_of(error)})"
    cure = memory_cure(settings)
    if others:
        cure = f"end process {' and '.join(str(other['pid']) for other in others)}, or choose another card by CUDA_VISIBLE_DEVICES; or {cure}"
    return Diagnosis(DEVICE_TAKEN, cause, figures, cure)


def _holders(device: Device, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Other processes on the card, the largest first, from the driver and from what torch's message told."""
    found = {each["pid"]: each for each in told}
    found |= {each.pid: {"pid": each.pid, "name": each.name, "bytes": each.bytes} for each in device.others}
    return sorted(found.values(), key=lambda each: -(each["bytes"] or 0))


def _told(others: list[dict[str, Any]]) -> str:
    words = []
    for each in others:
        name = f" ({each['name']})" if each.get("name") else ""
        words.append(f"process {each['pid']}{name} holds {'some' if each['bytes'] is None else amount(each['bytes'])}")
    return ", ".join(words)


def _pinned(error: BaseException, readings: Readings, settings: Settings) -> Diagnosis:
    figures = _host_figures(readings) | _known(memlock_limit_bytes=readings.memlock)
    limit = readings.memlock
    words = "" if limit is None else f", ulimit -l is {'unlimited' if limit < 0 else amount(limit)}"
    return Diagnosis(
        PINNED,
        f"the host had no memory to pin{_host_words(readings)}{words} ({cause_of(error)})",
        figures,
        pinned_cure(settings),
    )


def _pins(error: BaseException) -> bool:
    """Whether the error came from page-locking host memory: CUDA's own words do not say for what it had none."""
    if any(text in str(error) for text in ("cudaHostAlloc", "cudaHostRegister", "pin memory thread")):
        return True
    return any("pin_memory" in name or "pin_memory" in line for _, name, line in _frames(error))


def _has_room(device: Device | None) -> bool:
    """Whether the card had much more left than CUDA asks for by itself: the allocator's own requests fail otherwise."""
    return device is not None and device.free is not None and device.free > 2 * UNITS["GiB"]


def _shared_memory(error: BaseException, readings: Readings) -> bool:
    said = str(error)
    words = (
        "shared memory object", "out of shared memory", "insufficient shared memory", "shared memory segment", "/dev/shm",
        "killed by signal: Bus error", "/torch_",
    )  # fmt: skip
    if any(text in said for text in words):
        return True
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in said
    # The semaphores of data processes lie in /dev/shm, and their failure names no file.
    return full and (_used_up(readings.shared) or any("SemLock" in line for *_, line in _frames(error)))


def _shared(error: BaseException, readings: Readings, settings: Settings) -> Diagnosis:
    cause = cause_of(error)
    if "Too many open files" in str(error):
        return Diagnosis(
            SHARED_MEMORY,
            f"the data processes share more pieces of memory than this process may have files open ({cause})",
            _known(open_files_limit=readings.open_files) | _shared_figures(readings),
            shared_cure(settings, "raise the limit: ulimit -n 65536"),
        )
    return Diagnosis(
        SHARED_MEMORY, f"no room in /dev/shm{_shared_words(readings)} ({cause})", _shared_figures(readings), shared_cure(settings)
    )


def _dead_data_process(error: BaseException) -> tuple[int, int] | None:
    """Process id and exit code, where a data process has died. Torch's message has no exit code, since data processes
    are children of a server and the kernel tells that one alone; but the frame that raised holds the processes."""
    trace = error.__traceback__
    while trace is not None:
        for process in trace.tb_frame.f_locals.get("failed_workers", ()):
            return process.pid, process.exitcode
        trace = trace.tb_next
    return None


def _host(cause: str, readings: Readings, settings: Settings, asked: int | None = None) -> Diagnosis:
    figures = _known(asked_bytes=asked) | _host_figures(readings)
    return Diagnosis(HOST, cause + _host_words(readings), figures, host_cure(settings))


def _asked_of_host(said: str) -> int | None:
    found = re.search(r"tried to allocate (\d+) bytes", said)
    return int(found[1]) if found else None


def _frames(error: BaseException) -> Iterator[tuple[str, str, str]]:
    """File, function and source line of each frame of the traceback."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, code.co_name, linecache.getline(code.co_filename, trace.tb_lineno)
        trace = trace.tb_next


def _of_disk(error: BaseException) -> bool:
    """Whether a checkpoint could not be written, and not for a mistake of another kind on the way to the disk."""
    return isinstance(error, NotSaved) and (error.errno is not None or error.__cause__ is None)


def _disk(error: NotSaved, settings: Settings) -> Diagnosis:
    figures = {"folder": str(error.folder)} | _known(errno=error.errno and errno.errorcode.get(error.errno))
    return Diagnosis(DISK, f"a checkpoint could not be written: {error}", figures, disk_cure(error, settings))


# --- judging a death without a word ---------------------------------------------------------------------------------


def diagnose_exit(exitcode: int, rank: int, readings: Readings, settings: Settings) -> Diagnosis:
    """What it means that a rank ended with `exitcode` (negative: minus the signal) and left no message."""
    return _died(f"rank {rank}", exitcode, readings, settings)


def _died(who: str, exitcode: int, readings: Readings, settings: Settings) -> Diagnosis:
    if exitcode >= 0:
        return Diagnosis(OTHER, f"{who} died by exit code {exitcode} without a word", {"exit_code": exitcode})
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    how = f"{who} died by signal {number} ({name}) without a word"
    if number == signal.SIGKILL:
        return _killed(how, readings, settings)
    if number == signal.SIGBUS and _used_up(readings.shared):
        return Diagnosis(
            SHARED_MEMORY, f"{how}: no room in /dev/shm{_shared_words(readings)}",
            {"signal": number} | _shared_figures(readings), shared_cure(settings),
        )  # fmt: skip
    return Diagnosis(OTHER, how, {"signal": number} | _host_figures(readings) | _shared_figures(readings))


def _killed(how: str, readings: Readings, settings: Settings) -> Diagnosis:
    """Signal 9: the kernel for lack of memory, or somebody else."""
    figures = {"signal": int(signal.SIGKILL)} | _host_figures(readings)
    if readings.oom_kills:
        return Diagnosis(HOST, f"{how}: the kernel ended it for lack of memory{_host_words(readings)}", figures, host_cure(settings))
    # A counter that is there and did not move is an alibi: the kernel counts each of its kills.
    if readings.oom_kills is None and readings.host is not None and readings.host.share_left() < NOTHING_LEFT:
        return Diagnosis(HOST, f"{how}: memory was used up{_host_words(readings)}", figures, host_cure(settings))
    alibi = "" if readings.oom_kills is None else ", the kernel ended no process for lack of memory"
    return Diagnosis(
        KILLED,
        f"{how}{_host_words(readings)}{alibi}",
        figures,
        "find out who sent it (a batch system's limit, a person, a container's end), then go on with "
        f"train.resume={THIS_RUN}",
    )


def _used_up(size: tuple[int, int] | None) -> bool:
    return size is not None and size[1] < NOTHING_LEFT * size[0]


# --- cures ----------------------------------------------------------------------------------------------------------


def memory_cure(settings: Settings) -> str:
    """Overrides that save memory where the model is computed, the cheapest that the run does not have yet."""
    train, zero, offload, precision = (settings[name] for name in ("train", "zero", "offload", "precision"))
    lora = settings["tuning"].get("_target_", "").endswith(".Lora")
    recompute = settings["activations"]["recompute"]
    free = ["train.micro_batch=1"] if train["micro_batch"] > 1 else []
    if not recompute and not (zero["stage"] == 3 and lora):
        free.append("activations=recompute")
    if free:
        return " ".join(free)
    if settings["hardware"]["device"] == "cuda":
        if not offload["optimizer"]:
            return "offload=optimizer" + ("" if zero["stage"] else " zero=stage2")
        if precision["weights"] == "fp32" and precision["autocast"] is None:
            return "precision=bf16_autocast"
        if not offload["parameters"] and not lora:
            return "zero=stage3 offload=optimizer_and_params bucket=5mb"
    return smaller_images(settings)


def smaller_images(settings: Settings) -> str:
    sides = settings["data"].get("image_size", 0)
    sides = list(sides) if isinstance(sides, (list, tuple)) else [sides]
    smaller = [max(32, int(0.75 * side) // 32 * 32) for side in sides]
    return f"data.image_size={smaller if len(smaller) > 1 else smaller[0]}".replace(" ", "")


def host_cure(settings: Settings) -> str:
    """Overrides that save host memory."""
    offload = settings["offload"]
    if settings["train"]["workers"] > 0:
        return "train.workers=0"
    if settings["hardware"]["device"] == "cpu":
        return memory_cure(settings)
    if offload["parameters"]:
        return "offload=optimizer zero=stage2"
    return "offload=none" if offload["optimizer"] else smaller_images(settings)


def pinned_cure(settings: Settings) -> str:
    offload = settings["offload"]
    if offload["pin_memory"] and (offload["optimizer"] or offload["parameters"]):
        return "offload.pin_memory=false"
    return host_cure(settings)


def shared_cure(settings: Settings, otherwise: str = "") -> str:
    if settings["train"]["workers"] > 0:
        return "train.workers=0"
    return otherwise or "make /dev/shm larger (docker run --shm-size=8g), or NCCL_SHM_DISABLE=1 in front of the command"


def disk_cure(error: NotSaved, settings: Settings) -> str:
    """What is to change there; the run then goes on from the checkpoint before."""
    run = error.folder.parent
    if error.errno in NO_ROOM:
        fewer = " train.keep=1" if settings["train"]["keep"] > 1 else ""
        return f"make room there, then go on with train.resume={run}{fewer}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"make the folder writable, then go on with train.resume={run}; or in another one, with run_dir=DIR besides"
    return f"see whether the disk is well, then go on with train.resume={run}"


def not_finite_cure(figures: dict[str, Any], settings: Settings) -> str:
    """Half precision first, where the weights are whole; then the size of the steps."""
    if figures.get("inputs"):
        return f"look at the images: {figures.get('identity', 'see the log')}"
    precision, rate = settings["precision"], settings["optimizer"].get("lr")
    if figures.get("weights_finite") is not False:
        if "fp16" in (precision["weights"], precision["autocast"]):
            return "precision=bf16_autocast"
        if precision["weights"] == "bf16":
            return "precision=bf16_autocast"
        if precision["autocast"] == "bf16":
            return "precision=fp32"
    clip = [] if settings["train"]["clip_norm"] else ["train.clip_norm=1.0"]
    return " ".join([f"optimizer.lr={min(rate / 10, SANE_RATE):g}" if rate else "a smaller learning rate", *clip])


def hang_cure(stack: list[str], settings: Settings) -> str:
    """By where the rank stands that the others wait for."""
    if any("torch/utils/data/" in line for line in stack) and settings["train"]["workers"] > 0:
        return "train.workers=0"
    if communicates(stack) and settings["hardware"]["device"] == "cuda":
        return "NCCL_P2P_DISABLE=1 in front of the command, where cards cannot reach each other's memory"
    return f"train.hang_minutes={2 * settings['train']['hang_minutes']:g} if it was only slow"


def communicates(stack: list[str]) -> bool:
    """Whether a rank stands in a collective operation, that is, waits for others."""
    return any("torch/distributed/distributed_c10d" in line or "deepspeed/comm/" in line for line in stack)


# --- figures and words ----------------------------------------------------------------------------------------------


def amount(size: float) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} bytes"


def _known(**figures: Any) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}


def _host_figures(readings: Readings) -> dict[str, Any]:
    figures = _known(oom_kills=readings.oom_kills)
    if (host := readings.host) is not None:
        figures |= {"host_total_bytes": host.total, "host_available_bytes": host.available, "swap_free_bytes": host.swap_free}
        figures |= _known(container_limit_bytes=host.limit, container_left_bytes=host.left)
        figures["process_bytes"] = {str(pid): size for pid, size in host.processes.items()}
    return figures


def _host_words(readings: Readings) -> str:
    host = readings.host
    if host is None:
        return ""
    words = f"; {amount(host.available)} of {amount(host.total)} host memory were available"
    if host.limit:
        words += f", {amount(max(0, host.left))} of the container's {amount(host.limit)}"
    if host.processes:
        words += f", the run held {amount(sum(host.processes.values()))}"
    return words


def _shared_figures(readings: Readings) -> dict[str, Any]:
    return {} if readings.shared is None else dict(zip(("shm_total_bytes", "shm_free_bytes"), readings.shared, strict=True))


def _shared_words(readings: Readings) -> str:
    return "" if readings.shared is None else f", {amount(readings.shared[1])} of {amount(readings.shared[0])} free"
