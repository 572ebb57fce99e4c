"""gdino-lab plan: nothing started, nothing written, everything said."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gdino_lab.commands.main import main
from tests.conftest import environment


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gdino-lab"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["plan", *words])
        assert not list(tmp_path.iterdir())
        return code, *capsys.readouterr()

    return run


def test_a_machine_without_the_gpu_the_weights_or_the_data(call):
    code, out, _ = call("hardware=rtx3090_single", "data.image_size=[128,192]")
    assert code == 0
    for said in ("accumulation = 4", "train_micro_batch_size_per_gpu", "activations", "host", "It fits 24.00 GiB"):
        assert said in out
    assert "The data are not there yet" in out


def test_json_holds_the_same(call):
    code, out, _ = call("task=detection", "hardware=rtx3090_dual", "data.image_size=[128,192]", "plan.format=json")
    found = json.loads(out)
    assert code == 0 and found["world_size"] == 2 and found["deepspeed"]["zero_optimization"]["stage"] == found["zero_stage"]
    predicted = found["predicted"]
    assert predicted["peak"] == sum(predicted["device"].values()) and predicted["fits"] is True
    assert any("dominate" in words for words in found["words"])


def test_what_is_refused_of_a_run_is_refused_of_its_plan(call):
    for words, said in ((["plan.format=xml"], "plan.format=xml"), (["tuning.freeze=[nonsense]"], "nonsense")):
        code, _, err = call(*words)
        assert code == 2 and said in err


@pytest.mark.slow
def test_the_hub_is_not_asked(tmp_path):
    """Where it cannot be reached each file would be tried for half a minute."""
    words = ["model=grounding_dino_tiny", "hardware=rtx3090_dual", "data.image_size=[800,1333]"]
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "gdino_lab", "plan", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment() | unreachable, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "It fits 24.00 GiB" in done.stdout
    assert "127.0.0.1" not in done.stdout + done.stderr
