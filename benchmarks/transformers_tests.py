"""transformers' own tests of Grounding DINO, on its model as it is and with activations recomputed: the same must pass.

    python benchmarks/transformers_tests.py --transformers DIR

DIR is a checkout of transformers' repository at the installed version; its tests also need `parameterized` and
`datasets`. Without network, tests that need files of the hub are skipped or fail in both runs. Exits with 1 where the
two differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = "tests/models/grounding_dino/test_modeling_grounding_dino.py"


def pytest_configure() -> None:
    """This file as pytest's plugin: every model that a test builds recomputes."""
    from transformers import GroundingDinoModel

    from gdino_lab.models.recompute import recompute_activations

    build = GroundingDinoModel.__init__

    def build_and_patch(model, *args, **kwargs) -> None:
        build(model, *args, **kwargs)
        assert recompute_activations(model)

    # GroundingDinoForObjectDetection builds one of these, which holds all the layers.
    GroundingDinoModel.__init__ = build_and_patch


def outcomes(checkout: Path, *options: str) -> dict[str, str]:
    """How each test ended ("passed", "skipped", "failure" or "error"), run in a process of their own."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", TESTS, "-q", "-W", "ignore", f"--junitxml={report}", *options]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    verdicts = ("failure", "error", "skipped")
    return {case.get("name"): next((each.tag for each in case if each.tag in verdicts), "passed") for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", type=Path, required=True, metavar="DIR")
    checkout = parser.parse_args().transformers
    plain, patched = outcomes(checkout), outcomes(checkout, "-p", Path(__file__).stem)
    for name, found in (("plain", plain), ("recomputed", patched)):
        counts = sorted(Counter(found.values()).items())
        print(f"{name:10}", ", ".join(f"{count} {verdict}" for verdict, count in counts))
    different = [name for name in plain | patched if plain.get(name) != patched.get(name)]
    for name in different:
        print(f"{name}: {plain.get(name)}, recomputed {patched.get(name)}")
    if not different:
        print("the same outcome for every test")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
