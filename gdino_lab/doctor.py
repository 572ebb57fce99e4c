"""What this machine can do: each reading of gdino_lab/machine goes to a `judge_...`: what it means, and the cure."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from huggingface_hub import constants as hub
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gdino_lab.machine import devices, host, software
from gdino_lab.machine.devices import Driver, Gpu

GIB = 2**30
NAMED_PACKAGES = ("torch", "deepspeed", "transformers", "hydra-core")
# What others hold of a GPU before it is worth a word: a desktop or an idle context stays below.
SHARE_OF_OTHERS = 0.05
# fp32 weights, gradients and two Adam moments of the 172 M parameters of Grounding DINO tiny.
OFFLOAD_BYTES = 16 * 172_000_000
# Docker gives a container 64 MB; NCCL and a few data processes want more.
SHARED_BYTES = GIB
DISK_BYTES = 10e9
OPEN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    subject: str
    verdict: Literal["ok", "warning", "problem"]
    detail: str
    cure: str = ""
    """What to do; empty where all is well."""


def examine() -> list[Finding]:
    """Every check on this machine, with the current folder as the place of outputs/."""
    driver = devices.read_driver()  # before anything here or below touches a GPU
    with ThreadPoolExecutor() as pool:  # what waits, waits together
        probe = pool.submit(software.read_deepspeed)
        answer = pool.submit(software.read_hub, hub.ENDPOINT) if not hub.HF_HUB_OFFLINE else None
        compiler = pool.submit(software.read_compiler)
        sees, cuda_error = devices.read_torch_cuda()
        python, requirements = software.read_declared()
        findings = [
            judge_python(platform.python_version(), python),
            judge_packages(requirements, software.read_installed(requirements)),
            judge_torch(torch.version.cuda, sees, cuda_error, os.environ.get("CUDA_VISIBLE_DEVICES"), driver),
            *(judge_gpu(gpu) for gpu in driver.gpus),
            *(
                judge_gpu_dtypes(index, torch.cuda.get_device_capability(index), devices.read_dtypes(f"cuda:{index}"))
                for index in range(sees)
            ),
            judge_cpu_dtypes(devices.read_dtypes("cpu"), host.read_bf16_instructions()),
            judge_host_memory(psutil.virtual_memory().available, psutil.swap_memory().total, host.read_memory_limit()),
            judge_shared_memory(host.read_shared()),
            judge_leftovers(host.read_leftovers()),
            judge_pinned_memory(host.read_memlock()),
            judge_compiler(*compiler.result()),
            judge_nvcc(software.read_nvcc(), torch.version.cuda),
            judge_ninja(software.read_ninja()),
            judge_deepspeed(*probe.result()),
            judge_operators(probe.result()[0], software.read_built_operators(), os.environ.get("DS_PIN_MEMORY_BACKEND", "")),
            judge_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST", "")),
            judge_open_files(host.read_open_files()),
            judge_threads(os.environ.get("OMP_NUM_THREADS", ""), os.cpu_count() or 1, host.read_usable_cores()),
            judge_hub(hub.ENDPOINT, answer and answer.result()),
            judge_disk(*host.read_disk(Path("outputs"))),
        ]
    return findings


# --- pure from here on -----------------------------------------------------------------------------------------------


def judge_python(version: str, allowed: str) -> Finding:
    """`allowed`: the range pyproject.toml declares; empty allows any."""
    if SpecifierSet(allowed).contains(version, prereleases=True):
        return Finding("Python", "ok", f"{version}; allowed is {allowed or 'any'}")
    return Finding("Python", "problem", f"{version}; allowed is {allowed}", "make PYTHON=python3.12 train")


def judge_packages(requirements: list[str], installed: dict[str, str | None]) -> Finding:
    """Installed versions (None: not installed) against the ranges pyproject.toml declares."""
    if not requirements:
        return Finding("packages", "warning", "gdino-lab is not installed: ranges unknown", "pip install -e .")
    wanted = [Requirement(text) for text in requirements]
    wrong = [
        each
        for each in wanted
        if installed[each.name] is None or not each.specifier.contains(installed[each.name], prereleases=True)
    ]
    if wrong:
        found = [f"{each.name} {installed[each.name] or 'missing'}, wanted {each.specifier or 'any'}" for each in wrong]
        cure = "pip install " + " ".join(f"'{each}'" for each in wrong)
        return Finding("packages", "problem", "; ".join(found), cure)
    named = ", ".join(f"{name} {installed[name]}" for name in NAMED_PACKAGES if installed.get(name))
    return Finding("packages", "ok", f"{named}; all {len(wanted)} are in range")


def judge_torch(built_for: str | None, sees: int, error: str, visible: str | None, driver: Driver) -> Finding:
    """Whether torch reaches the GPUs there are.

    Args:
        built_for: the CUDA version torch was built for, None for a CPU build.
        sees: CUDA devices torch can use.
        error: torch's own words where it can use none.
        visible: CUDA_VISIBLE_DEVICES, None where it is not set.
    """
    build = f"built for CUDA {built_for}" if built_for else "built for the CPU"
    supported = "{}.{}".format(*driver.cuda)
    if sees and driver.error:
        detail = f"{build}, uses {sees} GPU(s); who holds their memory is unknown: {driver.error}"
        return Finding("torch", "warning", detail, "pip install nvidia-ml-py, or look with nvidia-smi")
    if sees:
        chosen = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        uses = f"uses {sees} of {len(driver.gpus)} GPU(s){chosen}"
        return Finding("torch", "ok", f"{build}, {uses}; driver {driver.version} runs CUDA up to {supported}")
    if driver.broken:
        cure = "restart the machine, or reinstall the driver"
        return Finding("torch", "problem", f"the NVIDIA driver fails: {driver.error}", cure)
    if not driver.gpus:
        why = driver.error or "the driver lists none"
        return Finding("torch", "warning", f"{build}; no CUDA device ({why})", "hardware=cpu")
    there = f"{len(driver.gpus)} GPU(s) are there"
    if built_for is None:
        cure = f"install a torch for CUDA {supported} or older (pytorch.org/get-started), or hardware=cpu"
        return Finding("torch", "problem", f"{build}, but {there}", cure)
    if visible is not None:
        detail = f"{there}, hidden by CUDA_VISIBLE_DEVICES={visible}"
        return Finding("torch", "warning", detail, "unset CUDA_VISIBLE_DEVICES")
    if driver.cuda < tuple(map(int, built_for.split(".")[:2])):
        cure = f"a newer driver, or a torch for CUDA {supported} or older (pytorch.org/get-started); hardware=cpu works"
        return Finding("torch", "problem", f"{build}, but driver {driver.version} runs CUDA up to {supported}", cure)
    cure = "restart the machine; in a container: --gpus all; hardware=cpu works"
    return Finding("torch", "problem", f"{build}, {there}, yet torch cannot use them: {error}", cure)


def judge_gpu(gpu: Gpu) -> Finding:
    """A GPU's memory, and every process that holds some of it."""
    held = ", ".join(f"{each.name} (pid {each.pid}) {gib(each.bytes)}" for each in gpu.holders)
    size = f"{gpu.name}, capability {gpu.capability[0]}.{gpu.capability[1]}, {gib(gpu.free)} free of {gib(gpu.total)}"
    detail = f"{size}; held by {held}" if held else size
    used = gpu.total - gpu.free
    known = sum(each.bytes or 0 for each in gpu.holders)
    if max(used, known) <= SHARE_OF_OTHERS * gpu.total:
        return Finding(f"GPU {gpu.index}", "ok", detail)
    whole = math.floor(gpu.free / GIB)
    limit = f"hardware.memory_limit_gib={whole}" if whole else "CUDA_VISIBLE_DEVICES=N for another GPU, or hardware=cpu"
    if not gpu.holders:
        return Finding(f"GPU {gpu.index}", "warning", f"{detail}; who holds the rest cannot be seen from here", limit)
    pids = " ".join(str(each.pid) for each in gpu.holders)
    return Finding(f"GPU {gpu.index}", "warning", detail, f"end what is yours (kill {pids}), or {limit}")


def judge_gpu_dtypes(index: int, capability: tuple[int, int], errors: dict[str, str]) -> Finding:
    """`errors`: dtype -> why a small product failed, empty where it did not."""
    subject = f"cuda:{index} dtypes"
    if errors["fp32"]:
        cure = "a torch for capability {}.{} (pytorch.org/get-started), or free its memory".format(*capability)
        return Finding(subject, "problem", errors["fp32"], cure)
    failing = [f"{name} fails: {error}" for name, error in errors.items() if error]
    # Before Ampere, torch computes bf16 products by way of fp32 and ignores tf32.
    if capability < (8, 0):
        failing.append(f"capability {capability[0]}.{capability[1]} has no tf32, and bf16 only by emulation")
    if failing:
        return Finding(subject, "warning", "; ".join(failing), "precision=fp32 or precision=fp16_autocast")
    return Finding(subject, "ok", "fp32, tf32, bf16 and fp16 work")


def judge_cpu_dtypes(errors: dict[str, str], native: bool) -> Finding:
    """`native`: whether the processor has bf16 instructions."""
    if errors["bf16"]:
        return Finding("CPU dtypes", "warning", f"bf16 fails: {errors['bf16']}", "precision=fp32 with hardware=cpu")
    speed = "with instructions for it" if native else "without instructions for it, so slower than fp32"
    return Finding("CPU dtypes", "ok", f"fp32 works; bf16 works {speed}")


def judge_host_memory(available: int, swap: int, limit: tuple[int, int] | None) -> Finding:
    """Bytes. `limit`: a container's limit and what is left of it."""
    left, within = available, ""
    if limit is not None and limit[1] < available:
        left, within = limit[1], f" within the container's limit of {gib(limit[0])}"
    needs = f"offload=optimizer of 172 M parameters takes {gib(OFFLOAD_BYTES)}"
    detail = f"{gib(left)} available{within}, {gib(swap)} swap; {needs}"
    if left < OFFLOAD_BYTES:
        return Finding("host memory", "warning", detail, "close other programs, or offload=none")
    return Finding("host memory", "ok", detail)


def judge_shared_memory(size: tuple[int, int] | None) -> Finding:
    """Bytes of /dev/shm: all and free; None where there is none."""
    if size is None:
        return Finding("/dev/shm", "ok", "this system has none")
    detail = f"{gib(size[1])} free of {gib(size[0])}"
    if size[1] < SHARED_BYTES:
        cure = "in a container: --shm-size=8g or --ipc=host; else free it, or train.workers=0 and one GPU"
        return Finding("/dev/shm", "warning", f"{detail}; NCCL and data processes exchange through it", cure)
    return Finding("/dev/shm", "ok", detail)


def judge_leftovers(sizes: list[int]) -> Finding:
    """Bytes of each deepspeed_* file in /dev/shm; this project's runs leave none."""
    if not sizes:
        return Finding("/dev/shm leftovers", "ok", "no deepspeed_* files")
    detail = f"{len(sizes)} deepspeed_* file(s), {sum(sizes) / 1e6:.0f} MB of memory"
    return Finding("/dev/shm leftovers", "warning", detail, "while no DeepSpeed program runs: rm /dev/shm/deepspeed_*")


def judge_pinned_memory(limit: int) -> Finding:
    """Bytes of `ulimit -l`; -1: unlimited."""
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    return Finding("pinned memory", "ok", f"ulimit -l {shown}; what CUDA pins for offload is not counted against it")


def judge_compiler(version: str, error: str) -> Finding:
    """`version`: the compiler's first line, empty where there is none; `error`: why it could not compile C++20."""
    if version and not error:
        return Finding("C++ compiler", "ok", version)
    detail = f"{version} fails: {error}" if version else "no c++ or g++"
    cure = "apt install g++ (only torch.compile and DeepSpeed's operators would need it)"
    return Finding("C++ compiler", "warning", detail, cure)


def judge_nvcc(version: str, built_for: str | None) -> Finding:
    """`version`: as 13.0, empty without nvcc."""
    found = version or "none"
    if built_for is None:
        return Finding("nvcc", "ok", f"{found}; of no use to a torch built for the CPU")
    if version and version.split(".")[0] != built_for.split(".")[0]:
        detail = f"{version}, but torch is built for CUDA {built_for}: DeepSpeed refuses to build CUDA operators"
        return Finding("nvcc", "warning", detail, f"nvcc {built_for}, should you want one; this project builds none")
    return Finding("nvcc", "ok", f"{found}; this project compiles nothing with it")


def judge_ninja(path: str | None) -> Finding:
    return Finding("ninja", "ok", path) if path else Finding("ninja", "warning", "none", "pip install ninja")


def judge_deepspeed(probe: dict | None, error: str) -> Finding:
    """`probe`: what DeepSpeed said of itself; None where importing it failed with `error`."""
    if probe is None:
        cure = 'python -c "import deepspeed" shows all of it; mend that, or reinstall deepspeed'
        return Finding("DeepSpeed", "problem", f"cannot be imported: {error}", cure)
    return Finding("DeepSpeed", "ok", f"imports, accelerator {probe['accelerator']}")


def judge_operators(probe: dict | None, built: list[str], pin_backend: str) -> Finding:
    """`built`: operators compiled on this machine earlier; `pin_backend`: DS_PIN_MEMORY_BACKEND."""
    if pin_backend.strip().lower() == "native":
        detail = "DS_PIN_MEMORY_BACKEND=native: every rank would compile pin_memory at once"
        return Finding("operators", "warning", detail, "unset DS_PIN_MEMORY_BACKEND")
    can = "compatible" if probe and probe["cpu_adam"] else "not compatible"
    state = "built" if "cpu_adam" in built or (probe and probe["prebuilt"]) else "not built"
    return Finding(
        "operators",
        "ok",
        "none is needed or compiled: torch's fused AdamW steps on GPU and, under offload, on the CPU "
        "(zero_force_ds_cpu_optimizer=false), and deepspeed_shm_comm is switched off. "
        f"DeepSpeed's CPUAdam is {can} and {state}, FusedAdam not used",
    )


def judge_arch_list(value: str) -> Finding:
    """TORCH_CUDA_ARCH_LIST; DeepSpeed reads numbers only."""
    if re.search(r"\d[a-z]", value):
        plain = re.sub(r"(\d)[a-z]+", r"\1", value)
        detail = f"{value}: letters break the build of DeepSpeed's FusedAdam, which is not used here"
        return Finding("TORCH_CUDA_ARCH_LIST", "warning", detail, f'TORCH_CUDA_ARCH_LIST="{plain}"')
    return Finding("TORCH_CUDA_ARCH_LIST", "ok", value or "not set")


def judge_open_files(limit: int) -> Finding:
    """`ulimit -n`; -1: unlimited."""
    if limit != resource.RLIM_INFINITY and limit < OPEN_FILES:
        return Finding("open files", "warning", f"{limit}; data processes want more", "ulimit -n 4096")
    return Finding("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit}")


def judge_threads(asked: str, cores: int, usable: float) -> Finding:
    """Threads of a run of one rank.

    Args:
        asked: OMP_NUM_THREADS, empty where a run chooses: all of the machine's `cores`.
        usable: cores that this process may use, by affinity and container quota.
    """
    threads = int(asked) if asked.isdigit() else cores
    detail = f"{threads} for one rank, {usable:g} core(s) usable of {cores}"
    if threads > usable:
        cure = f"OMP_NUM_THREADS={max(1, int(usable))}"
        return Finding("threads", "warning", f"{detail}: they get in each other's way", cure)
    if 2 * threads <= usable:
        return Finding("threads", "warning", f"OMP_NUM_THREADS={asked}: {detail}", "unset OMP_NUM_THREADS")
    return Finding("threads", "ok", detail)


def judge_hub(endpoint: str, error: str | None) -> Finding:
    """`error`: why the hub cannot be reached, empty where it can, None where it was not asked."""
    if error is None:
        return Finding("hub", "ok", "not asked, since HF_HUB_OFFLINE is set: weights come from the cache or a folder")
    if error:
        cure = f"where there is a network: hf download {software.HUB_ID} --local-dir DIR; then model.pretrained=DIR"
        return Finding("hub", "warning", f"{endpoint}: {error}", cure)
    return Finding("hub", "ok", f"{endpoint} answers")


def judge_disk(folder: str, free: int) -> Finding:
    """Free bytes where outputs/ lies or will lie."""
    detail = f"{free / 1e9:.0f} GB free for {folder}"
    if free < DISK_BYTES:
        detail += "; each checkpoint of 172 M parameters takes 2 GB"
        return Finding("disk", "warning", detail, "free some, or run_dir=DIR elsewhere")
    return Finding("disk", "ok", detail)


def gib(size: int | None) -> str:
    return "? GiB" if size is None else f"{size / GIB:.1f} GiB"
