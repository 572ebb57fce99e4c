"""Packages, compilers, DeepSpeed and the hub, as they are here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from threading import Thread

import torch
from packaging.requirements import Requirement

HUB_SECONDS = 2.0
HUB_ID = "IDEA-Research/grounding-dino-tiny"


def read_declared() -> tuple[str, list[str]]:
    """Python's range and the requirements of pyproject.toml without extras; ("", []) where it is not installed."""
    try:
        declared = metadata.metadata("gdino-lab")["Requires-Python"]
        requirements = metadata.requires("gdino-lab") or []
    except metadata.PackageNotFoundError:
        return "", []
    return declared, [text for text in requirements if "extra ==" not in text]


def read_installed(requirements: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in (Requirement(text).name for text in requirements):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def read_compiler() -> tuple[str, str]:
    """The first line of c++ --version, and why it cannot compile; both empty where there is none."""
    path = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if path is None:
        return "", ""
    version = (_output([path, "--version"]).splitlines() or [path])[0]
    command = [path, "-std=c++20", "-x", "c++", "-c", "-", "-o", "/dev/null"]
    try:
        tried = subprocess.run(command, input="#include <concepts>\n", capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return version, str(error)
    failed = tried.stderr.strip() or f"exit code {tried.returncode}"
    return version, failed.splitlines()[0] if tried.returncode else ""


def read_ninja() -> str | None:
    """Its path: on PATH, or beside this Python, where a virtual environment that is not activated has it."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def read_nvcc() -> str:
    """nvcc's version as 13.0; empty where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    release = re.search(r"release (\d+\.\d+)", _output([path, "--version"])) if path else None
    return release[1] if release else ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""



# In a process of its own: importing DeepSpeed takes seconds, prints, and fails where its surroundings are broken.
PROBE = """
import json, sys
from contextlib import redirect_stdout
from importlib.util import find_spec
with redirect_stdout(sys.stderr):
    import deepspeed
    accelerator = deepspeed.get_accelerator()
    builder = accelerator.create_op_builder("CPUAdamBuilder")
    found = {
        "accelerator": accelerator.device_name(),
        "cpu_adam": builder is not None and bool(builder.is_compatible()),
        "prebuilt": find_spec("deepspeed.ops.adam.cpu_adam_op") is not None,
    }
print("FOUND", json.dumps(found))
"""


def read_deepspeed() -> tuple[dict | None, str]:
    """accelerator, cpu_adam (compatible) and prebuilt; or None and the error."""
    variables = {"DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu"}
    try:
        tried = subprocess.run(
            [sys.executable, "-c", PROBE], env=os.environ | variables, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return None, "it takes more than a minute"
    for line in tried.stdout.splitlines():
        if line.startswith("FOUND "):
            return json.loads(line[6:]), ""
    return None, (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]


def read_built_operators() -> list[str]:
    """Names of the operators that torch has compiled and kept, DeepSpeed's among them."""
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    return sorted({path.stem for path in root.rglob("*.so")})


def read_hub(endpoint: str, seconds: float = HUB_SECONDS) -> str:
    """Why the hub gives no file, empty where it does; answers within `seconds`, whatever the name servers do."""
    answers: list[str] = []

    def ask() -> None:
        request = urllib.request.Request(f"{endpoint}/{HUB_ID}/resolve/main/config.json", method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
            answers.append("")
        except urllib.error.HTTPError as error:
            error.close()
            answers.append(f"answers with {error.code}")
        except (OSError, ValueError) as error:
            answers.append(str(getattr(error, "reason", error)))

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer in {seconds:g} s"
