"""Readers of what is installed: they neither wait nor look elsewhere."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gdino_lab.machine import software


def test_the_hub_is_not_waited_for():
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        address = f"http://localhost:{silent.getsockname()[1]}"
        assert "refused" in software.read_hub(address)
        silent.listen()
        assert software.read_hub(address, seconds=0.3) in ("no answer in 0.3 s", "timed out")


def test_built_operators_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert software.read_built_operators() == []
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert software.read_built_operators() == ["cpu_adam"]
