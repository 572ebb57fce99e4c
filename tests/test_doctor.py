"""What each reading means: every verdict and its cure on made-up machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gdino_lab import doctor
from gdino_lab.commands.main import composed
from gdino_lab.doctor import GIB, Finding
from gdino_lab.machine import software
from gdino_lab.machine.devices import Driver, Gpu, Holder
from gdino_lab.models import grounding_dino
from tests.conftest import read_json

FREE = Gpu(0, "NVIDIA GeForce RTX 3090", 24 * GIB, int(23.5 * GIB), (8, 6))
TAKEN = replace(FREE, free=10 * GIB, holders=[Holder(12, "python", 13 * GIB), Holder(13, "Xorg", None)])
DRIVER = Driver("580.1", (13, 0), [FREE])
OLD = Driver("535.1", (12, 2), [FREE])
WORKS = {"fp32": "", "bf16": "", "fp16": ""}
PROBE = {"accelerator": "cpu", "cpu_adam": True, "prebuilt": False}
INSTALLED = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8"}
WANTED = ["torch>=2.11", "deepspeed<0.20,>=0.19.8"]


def holds(found: Finding, verdict: str, detail: str, cure: str) -> None:
    assert found.verdict == verdict, found
    assert detail in found.detail, found
    assert cure in found.cure if cure else found.cure == "", found


@pytest.mark.parametrize(
    ("found", "verdict", "detail", "cure"),
    [
        (doctor.judge_python("3.12.1", ">=3.11,<3.14"), "ok", "3.12.1", ""),
        (doctor.judge_python("3.12.1", ""), "ok", "any", ""),
        (doctor.judge_python("3.14.0", ">=3.11,<3.14"), "problem", "allowed is >=3.11,<3.14", "PYTHON=python3.12"),
        (doctor.judge_packages(WANTED, INSTALLED), "ok", "torch 2.13.0+cpu, deepspeed 0.19.8; all 2", ""),
        (doctor.judge_packages([], {}), "warning", "not installed", "pip install -e ."),
        (
            doctor.judge_packages(WANTED, INSTALLED | {"deepspeed": "0.20.1"}),
            "problem", "deepspeed 0.20.1, wanted <0.20,>=0.19.8", "pip install 'deepspeed<0.20,>=0.19.8'",
        ),
        (doctor.judge_packages(WANTED, INSTALLED | {"torch": None}), "problem", "torch missing", "'torch>=2.11'"),
    ],
)  # fmt: skip
def test_software(found, verdict, detail, cure):
    holds(found, verdict, detail, cure)


@pytest.mark.parametrize(
    ("found", "verdict", "detail", "cure"),
    [
        (doctor.judge_torch("13.0", 1, "", None, DRIVER), "ok", "1 of 1 GPU(s); driver 580.1 runs CUDA up to 13.0", ""),
        (doctor.judge_torch("13.0", 1, "", "1", DRIVER), "ok", "(CUDA_VISIBLE_DEVICES=1)", ""),
        (doctor.judge_torch("13.0", 1, "", None, Driver(error="not installed")), "warning", "unknown", "nvidia-ml-py"),
        (doctor.judge_torch(None, 0, "no", None, Driver(error="none")), "warning", "no CUDA device", "hardware=cpu"),
        (doctor.judge_torch("13.0", 0, "no", None, Driver("580.1")), "warning", "lists none", "hardware=cpu"),
        (doctor.judge_torch(None, 0, "no", None, DRIVER), "problem", "CPU, but 1 GPU(s)", "CUDA 13.0 or older"),
        (doctor.judge_torch("13.0", 0, "no", "", DRIVER), "warning", "hidden", "unset CUDA_VISIBLE_DEVICES"),
        (doctor.judge_torch("13.0", 0, "no", None, OLD), "problem", "535.1 runs CUDA up to 12.2", "a newer driver"),
        (doctor.judge_torch("12.1", 0, "no kernel", None, OLD), "problem", "cannot use them: no kernel", "--gpus all"),
        (
            doctor.judge_torch("13.0", 0, "no", None, Driver(error="version mismatch", broken=True)),
            "problem", "driver fails: version mismatch", "restart",
        ),
        (doctor.judge_gpu(FREE), "ok", "capability 8.6, 23.5 GiB free of 24.0 GiB", ""),
        (doctor.judge_gpu(replace(FREE, holders=[Holder(9, "Xorg", GIB // 2)])), "ok", "by Xorg (pid 9) 0.5 GiB", ""),
        (doctor.judge_gpu(TAKEN), "warning", "python (pid 12) 13.0 GiB, Xorg (pid 13) ? GiB", "kill 12 13"),
        (doctor.judge_gpu(TAKEN), "warning", "10.0 GiB free", "hardware.memory_limit_gib=10"),
        (doctor.judge_gpu(replace(TAKEN, holders=[])), "warning", "cannot be seen", "hardware.memory_limit_gib=10"),
        (doctor.judge_gpu(replace(TAKEN, free=GIB // 2)), "warning", "0.5 GiB free", "for another GPU"),
        (doctor.judge_gpu_dtypes(0, (8, 0), WORKS), "ok", "tf32", ""),
        (doctor.judge_gpu_dtypes(0, (7, 5), WORKS), "warning", "7.5 has no tf32", "precision=fp16_autocast"),
        (doctor.judge_gpu_dtypes(0, (9, 0), WORKS | {"bf16": "odd"}), "warning", "bf16 fails: odd", "precision=fp32"),
        (doctor.judge_gpu_dtypes(0, (12, 0), WORKS | {"fp32": "no kernel"}), "problem", "no kernel", "capability 12.0"),
        (doctor.judge_cpu_dtypes(WORKS, True), "ok", "with instructions", ""),
        (doctor.judge_cpu_dtypes(WORKS, False), "ok", "slower than fp32", ""),
        (doctor.judge_cpu_dtypes(WORKS | {"bf16": "odd"}, False), "warning", "odd", "precision=fp32"),
    ],
)  # fmt: skip
def test_devices(found, verdict, detail, cure):
    holds(found, verdict, detail, cure)


@pytest.mark.parametrize(
    ("found", "verdict", "detail", "cure"),
    [
        (doctor.judge_host_memory(8 * GIB, GIB, None), "ok", "8.0 GiB available, 1.0 GiB swap; offload", ""),
        (doctor.judge_host_memory(8 * GIB, 0, (64 * GIB, 60 * GIB)), "ok", "8.0 GiB available, 0.0", ""),
        (doctor.judge_host_memory(8 * GIB, 0, (4 * GIB, 3 * GIB)), "ok", "3.0 GiB available within the", ""),
        (doctor.judge_host_memory(2 * GIB, 0, None), "warning", "takes 2.6 GiB", "offload=none"),
        (doctor.judge_shared_memory(None), "ok", "none", ""),
        (doctor.judge_shared_memory((8 * GIB, 8 * GIB)), "ok", "8.0 GiB free of 8.0 GiB", ""),
        (doctor.judge_shared_memory((64 << 20, 64 << 20)), "warning", "0.1 GiB", "--shm-size=8g"),
        (doctor.judge_leftovers([]), "ok", "no deepspeed_*", ""),
        (doctor.judge_leftovers([69_000_000] * 2), "warning", "2 deepspeed_* file(s), 138 MB", "rm /dev/shm/"),
        (doctor.judge_pinned_memory(8 << 20), "ok", "8 MiB", ""),
        (doctor.judge_pinned_memory(-1), "ok", "unlimited", ""),
        (doctor.judge_open_files(-1), "ok", "unlimited", ""),
        (doctor.judge_open_files(256), "warning", "256", "ulimit -n"),
        (doctor.judge_threads("", 16, 16.0), "ok", "16 for one rank", ""),
        (doctor.judge_threads("8", 16, 15.0), "ok", "15 core(s) usable of 16", ""),
        (doctor.judge_threads("", 64, 2.5), "warning", "64 for one rank, 2.5 core(s)", "OMP_NUM_THREADS=2"),
        (doctor.judge_threads("", 64, 0.5), "warning", "0.5", "OMP_NUM_THREADS=1"),
        (doctor.judge_threads("1", 16, 16.0), "warning", "OMP_NUM_THREADS=1", "unset"),
        (doctor.judge_hub("https://h", ""), "ok", "https://h answers", ""),
        (doctor.judge_hub("https://h", None), "ok", "HF_HUB_OFFLINE", ""),
        (doctor.judge_hub("https://h", "no answer"), "warning", "https://h: no answer", "hf download"),
        (doctor.judge_disk("/runs", int(50e9)), "ok", "50 GB free for /runs", ""),
        (doctor.judge_disk("/runs", int(9e9)), "warning", "9 GB", "run_dir=DIR"),
    ],
)  # fmt: skip
def test_host(found, verdict, detail, cure):
    holds(found, verdict, detail, cure)


@pytest.mark.parametrize(
    ("found", "verdict", "detail", "cure"),
    [
        (doctor.judge_compiler("g++ 12.2", ""), "ok", "g++ 12.2", ""),
        (doctor.judge_compiler("", ""), "warning", "no c++", "apt install g++"),
        (doctor.judge_compiler("g++ 7", "no c++20"), "warning", "g++ 7 fails: no c++20", "apt install g++"),
        (doctor.judge_nvcc("", None), "ok", "none; of no use", ""),
        (doctor.judge_nvcc("", "13.0"), "ok", "none; this project compiles nothing", ""),
        (doctor.judge_nvcc("13.1", "13.0"), "ok", "13.1", ""),
        (doctor.judge_nvcc("12.4", "13.0"), "warning", "refuses to build", "nvcc 13.0"),
        (doctor.judge_ninja("/bin/ninja"), "ok", "/bin/ninja", ""),
        (doctor.judge_ninja(None), "warning", "none", "pip install ninja"),
        (doctor.judge_deepspeed(PROBE, ""), "ok", "accelerator cpu", ""),
        (doctor.judge_deepspeed(None, "CUDA_HOME"), "problem", "CUDA_HOME", "import deepspeed"),
        (doctor.judge_operators(PROBE, [], "torch"), "ok", "compatible and not built", ""),
        (doctor.judge_operators(PROBE, ["cpu_adam"], "torch"), "ok", "compatible and built", ""),
        (doctor.judge_operators(None, [], "torch"), "ok", "not compatible and not built", ""),
        (doctor.judge_operators(PROBE, [], "native"), "warning", "compile pin_memory", "unset DS_PIN_MEMORY_BACKEND"),
        (doctor.judge_arch_list(""), "ok", "not set", ""),
        (doctor.judge_arch_list("8.6 9.0+PTX"), "ok", "8.6 9.0+PTX", ""),
        (doctor.judge_arch_list("8.6;9.0a+PTX"), "warning", "FusedAdam", 'TORCH_CUDA_ARCH_LIST="8.6;9.0+PTX"'),
    ],
)  # fmt: skip
def test_compilers_and_operators(found, verdict, detail, cure):
    holds(found, verdict, detail, cure)


def test_what_offload_takes_is_of_the_published_model():
    """172 M, and the id to download, are those of model=grounding_dino_tiny."""
    node = composed("model=grounding_dino_tiny").model
    assert node["pretrained"] == software.HUB_ID
    with torch.device("meta"):
        model, _ = grounding_dino.build(node["architecture"], config={})
    parameters = sum(each.numel() for each in model.parameters())
    assert 16 * parameters == pytest.approx(doctor.OFFLOAD_BYTES, rel=0.01)


@pytest.mark.thorough
@pytest.mark.slow
def test_runs_compile_no_operator(gdino, tmp_path: Path):
    """Two ranks that compile at once have crashed; ours have nothing to compile, even where DeepSpeed usually does."""
    words = ["hardware=cpu_dual", "zero=stage3", "offload=optimizer_and_params", "train.max_steps=1", "run_dir=run"]
    built = tmp_path / "operators"
    built.mkdir()
    gdino("train", *words, "train.micro_batch=2", TORCH_EXTENSIONS_DIR=str(built)).assert_done()
    assert read_json(tmp_path / "run" / "plan.json")["world_size"] == 2
    assert list(built.iterdir()) == []
