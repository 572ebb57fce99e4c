"""Imports go down the house: commands -> launch -> trainer -> engine, tasks, models, data -> losses, metrics -> plan."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gdino_lab

PACKAGE = Path(gdino_lab.__file__).parent
# Floors from the top; a module may import from its own floor and from those below.
FLOORS = [
    {"__main__"},
    {"commands"},
    {"ladder"},
    {"launch"},
    {"preparation", "probe"},
    {"trainer", "finished", "consolidated"},
    {"resume"},
    {"checkpoint"},
    {"checkpoint_folder", "pieces"},
    {"engine", "memory", "meters", "postmortem", "progress", "scoring", "watch"},
    {"tasks"},
    {"models", "data", "usage", "doctor"},
    {"losses", "machine", "metrics", "plan", "proof", "run_folder"},
    {"settings"},
    {"errors"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Names directly below gdino_lab that `path` imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            head, *tail = node.module.split(".")
            if head == "gdino_lab":
                found |= {tail[0]} if tail else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gdino_lab.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_goes_up(path: Path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        assert not imports(path)
        return
    up = {name for name in imports(path) if FLOOR[name] < FLOOR[own]}
    assert not up, f"{own} imports {up}"


def test_only_the_engine_talks_to_deepspeed():
    talking = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "deepspeed" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed")
    }
    assert talking == {"engine.py"}


@pytest.mark.parametrize("pure", ["losses", "metrics", "plan", "proof", "settings", "errors"])
def test_pure_code_has_no_effects(pure: str):
    """No files, processes or DeepSpeed; Hydra only where the schema is."""
    paths = [path for path in FILES if path.relative_to(PACKAGE).with_suffix("").parts[0] == pure]
    assert paths
    banned = {"subprocess", "os", "shutil", "multiprocessing", "deepspeed", "psutil"}
    for path in paths:
        modules = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        assert not modules & banned, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_that_could_run_code(path: Path):
    """torch.load with weights_only=True at most; numpy's pickles neither."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
        if isinstance(node, ast.Call):
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            assert given.get("weights_only", True) is True and not given.get("allow_pickle")
            assert not given.get("trust_remote_code")
            if ast.unparse(node.func) == "torch.load":
                assert "weights_only" in given
