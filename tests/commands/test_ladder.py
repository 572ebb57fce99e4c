"""gdino-lab ladder from end to end: a rung that runs out of memory, the next one trains as it would have by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gdino_lab.commands.main import main
from tests.conftest import SMALL, read_json, read_metrics, run

# The worst case of more than two images does not fit.
NARROW = """
import sys
import torch
import gdino_lab.probe as probe
from gdino_lab.commands.main import main

honest = probe.take_worst_steps

def narrow(settings, plan, folder):
    if plan.micro_batch > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return honest(settings, plan, folder)

probe.take_worst_steps = narrow  # spawned ranks import this file, so they get it too
if __name__ == "__main__":
    sys.exit(main())
"""
LADDER = """
rungs:
  - {name: four at once, overrides: [train.micro_batch=4]}
  - {name: capped, overrides: [train.micro_batch=4, hardware.memory_limit_gib=0.001]}
  - {name: two at once, overrides: [train.micro_batch=2]}
  - {name: one at once, overrides: [train.micro_batch=1]}
"""


@pytest.mark.slow
def test_trains_on_the_first_rung_that_fits_as_without_a_ladder(tmp_path: Path, small_set: Path):
    (tmp_path / "mine" / "ladder").mkdir(parents=True)
    (tmp_path / "mine" / "ladder" / "short.yaml").write_text(LADDER)
    script = tmp_path / "narrow.py"
    script.write_text(NARROW)
    common = [*SMALL, f"data.root={small_set}", "train.max_steps=2"]
    words = ["ladder", "--config-dir", str(tmp_path / "mine"), *common, "ladder=short", "train.probe=true", "out=climbed"]
    ended = run([sys.executable, str(script), *words], tmp_path, PYTHONPATH=str(Path.cwd())).assert_done()
    assert "trained on rung 3, two at once" in ended.out

    found = read_json(tmp_path / "climbed" / "ladder.json")
    assert found["trained"] == "two at once"
    assert [rung["outcome"] for rung in found["rungs"]] == ["out_of_memory", "skipped", "trained", ""]
    assert {path.name for path in (tmp_path / "climbed").iterdir()} == {"ladder.json", "01_four_at_once", "03_two_at_once"}
    assert read_json(tmp_path / "climbed" / "01_four_at_once" / "status.json")["state"] == "out_of_memory"

    run([sys.executable, "-m", "gdino_lab", "train", *common, "train.probe=false", "run_dir=plain"], tmp_path).assert_done()
    climbed, plain = tmp_path / "climbed" / "03_two_at_once", tmp_path / "plain"
    assert read_json(climbed / "plan.json") == read_json(plain / "plan.json")
    losses = [[row["loss"] for row in read_metrics(folder, "step")] for folder in (climbed, plain)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert read_json(climbed / "summary.json")["metrics"] == read_json(plain / "summary.json")["metrics"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ladder=blgo"], "Did you mean 'ladder/blog'?"),
        (["ladder=blog", "+ladder.rungs.0.overrides=[zero=stage9]"], "zero"),
        (["run_dir=x"], "out=DIR"),
        (["ladder=blog", "data.preset=eazy"], "data.preset=eazy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_leave_nothing(tmp_path: Path, monkeypatch, capsys, words: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gdino-lab"])
    assert main(["ladder", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_ladder_is_no_sweep(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gdino-lab"])
    assert main(["ladder", "-m", "zero=stage0,stage1"]) == 2
    assert "-m with ladder" in capsys.readouterr().err
