"""`pip install .` gives a gdino-lab that finds its configuration from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def test_installed_program_finds_its_configuration(tmp_path: Path):
    site, elsewhere = tmp_path / "site", tmp_path / "else where"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(ROOT)], check=True, capture_output=True)
    assert (site / "gdino_lab" / "models" / "vocab.txt").is_file()
    ended = run([str(site / "bin" / "gdino-lab"), "train", "--cfg", "job"], elsewhere, PYTHONPATH=str(site))
    assert "_target_: gdino_lab.tasks.anomaly.AnomalyTask" in ended.assert_done().out
    where = "import gdino_lab.commands.main as m; print(m.conf_folder())"
    found = run([sys.executable, "-c", where], elsewhere, PYTHONPATH=str(site)).assert_done()
    assert Path(found.out.strip()) == site / "gdino_lab" / "conf"
