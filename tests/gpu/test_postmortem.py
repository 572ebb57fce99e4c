"""Deaths that only a GPU dies: each provoked for real, in a process of its own, and told from the words it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VICTIM = """
import json, os, sys
import torch
from gdino_lab import postmortem
from gdino_lab.machine.readings import read_all

settings = json.loads(sys.argv[1])
try:
    {deed}
except BaseException as error:
    found = postmortem.diagnose(error, read_all(None, on_device=True), settings)
    print(json.dumps(found.as_dict() | {{"said": f"{{type(error).__name__}}: {{error}}", "pid": os.getpid()}}))
"""
HOLDER = """
import sys, torch
held = []
leave = int(sys.argv[1])
torch.zeros(1, device="cuda")
while (free := torch.cuda.mem_get_info()[0]) > leave + 2**21:
    held.append(torch.empty(min(free - leave, 2**33), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""
SETTINGS = {
    "train": {"micro_batch": 2, "workers": 2, "hang_minutes": 30, "clip_norm": 1.0},
    "zero": {"stage": 2},
    "offload": {"optimizer": True, "parameters": False, "pin_memory": True},
    "precision": {"weights": "fp32", "autocast": None},
    "activations": {"recompute": True},
    "hardware": {"device": "cuda"},
    "tuning": {},
    "data": {"image_size": [800, 1333]},
    "optimizer": {"lr": 1e-4},
}


def dies_of(deed: str, tmp_path: Path) -> dict:
    victim = tmp_path / "victim.py"  # a file, as what really fails lies in one
    victim.write_text(VICTIM.format(deed=deed.replace("\n", "\n    ")))
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29517",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(victim), json.dumps(SETTINGS)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def card_taken(leave: int, card: int = 0):
    """Another process holds the card but for about `leave` bytes; yields its process id."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    command, environment = [sys.executable, "-c", HOLDER, str(leave)], os.environ | {"CUDA_VISIBLE_DEVICES": seen[card]}
    holder = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holds\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def test_allocator(tmp_path: Path):
    deed = (
        "torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.get_device_properties(0).total_memory)\n"
        "kept = [torch.empty(2**27, dtype=torch.uint8, device='cuda') for _ in range(12)]\n"
        "kept = kept[::2]\n"
        "torch.empty(2**30, dtype=torch.uint8, device='cuda')\n"
        "torch.empty(2**31, dtype=torch.uint8, device='cuda')"
    )
    found = dies_of(deed, tmp_path)
    figures = found["figures"]
    assert (found["kind"], found["to_try"]) == ("out_of_memory", "train.micro_batch=1")
    assert figures["asked_bytes"] in (2**30, 2**31) and figures["total_bytes"] > 2**32
    assert figures["allocated_bytes"] >= 6 * 2**27 and figures["reserved_bytes"] >= figures["allocated_bytes"]
    assert abs(figures["allowed_bytes"] - 2**31) < 2**26 and 0 <= figures["fragmentation"] < 1


def test_driver_memory_taken_by_another_process(tmp_path: Path):
    deed = "torch.ones(8, 8, device='cuda') @ torch.ones(8, 8, device='cuda')\ntorch.cuda.synchronize()"
    with card_taken(leave=100 * 2**20) as pid:
        found = dies_of(deed, tmp_path)
    assert found["kind"] in ("device_memory_taken", "out_of_memory")
    assert pid in [each["pid"] for each in found["figures"]["others"]] and str(pid) in found["cause"]


def test_nccl_memory_taken_by_another_process(tmp_path: Path):
    deed = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(8, device='cuda')\n"
        "keep = []\n"
        "while torch.cuda.mem_get_info()[0] > 2**25:\n"
        "    keep.append(torch.empty(2**24, dtype=torch.uint8, device='cuda'))\n"
        "dist.all_reduce(x)\n"
        "torch.cuda.synchronize()\n"
        "raise SystemExit('NCCL did with what there was')"
    )
    with card_taken(leave=2 * 2**30) as pid:
        found = dies_of(deed, tmp_path)
    assert found["kind"] == "device_memory_taken", found
    assert pid in [each["pid"] for each in found["figures"]["others"]]


def test_full_host_memory_of_a_free_card(tmp_path: Path):
    """The same failure where the source line does not say what it was for."""
    arguments = "{'pin' + '_memory': True}"
    found = dies_of(f"arguments = {arguments}\ntorch.empty(2**43, dtype=torch.uint8, **arguments)", tmp_path)
    assert found["kind"] == "pinned_memory"


def test_pinned_memory(tmp_path: Path):
    found = dies_of("torch.empty(2**43, dtype=torch.uint8, pin_memory=True)", tmp_path)
    assert (found["kind"], found["to_try"]) == ("pinned_memory", "offload.pin_memory=false")
    assert found["figures"]["host_total_bytes"] > 0 and "memlock_limit_bytes" in found["figures"]
