"""What README, docs and the help tell a person to type is accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gdino_lab import preparation
from gdino_lab.commands.main import composed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "conf" / "hydra" / "help" / "gdino_lab.yaml"]
COMPOSING = re.compile(r"(?:^ *|`|time )gdino-lab (?:train|plan|ladder)((?: (?:[^`\n\\#]|\\\n)+)?)", re.MULTILINE)


def commands() -> dict[str, list[str]]:
    """The overrides of each `gdino-lab train`, `plan` and `ladder`, by where it is written."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        for match in COMPOSING.finditer(text):
            words = [word for word in shlex.split(match[1].replace("\\\n", " ")) if "=" in word]
            if words:
                found[f"{page.name}:{text[: match.start(1)].count(chr(10)) + 1} {' '.join(words)}"] = words
    return found


def test_they_are_found():
    assert len(commands()) > 15


@pytest.mark.parametrize("where", commands())
def test_a_command_is_accepted(where: str, tmp_path: Path):
    values = [word.replace("CAP", "8").replace("RUN_FOLDER", str(tmp_path)) for word in commands()[where]]
    sweep = re.compile(r"^([\w./]+=[^\[{,]+),.*$")  # of its jobs the first
    preparation.planned(composed(*(sweep.sub(r"\1", value) for value in values), f"run_dir={tmp_path}"))
