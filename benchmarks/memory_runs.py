"""Whole runs on a GPU, worst case, steps and evaluation: the peak that `plan` predicts beside the one that was measured.

    python benchmarks/memory_runs.py [--only NAME ...]

grounding_dino_tiny with random weights at 800x1333. What benchmarks/memory_cells.py leaves out: evaluation, the moving average of
the weights, steps of several passes. Each is a `gdino-lab train` of two steps; both figures are its summary.json's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = [
    "hardware=h200_single", "model=grounding_dino_tiny", "model.pretrained=null", "data.image_size=[800,1333]", "bucket=50mb",
    "data.counts={train: 8, validation: 2, test_good: 1, test_logical: 1, test_structural: 1}", "train.max_steps=2",
    "train.micro_batch=1", "train.workers=0", "tracker=none",
]  # fmt: skip
ONE, FOUR = "train.effective_batch=1", "train.effective_batch=4"
RUNS = {
    "step": ["zero=stage0", "offload=none", "precision=fp32", "activations=recompute", ONE],
    "average": ["zero=stage0", "offload=none", "precision=fp32", "activations=recompute", ONE, "train.ema_decay=0.999"],
    "average, bf16, offload": [
        "zero=stage2", "offload=optimizer", "precision=bf16", "activations=recompute", ONE, "train.ema_decay=0.999"
    ],
    "passes": ["zero=stage0", "offload=none", "precision=fp32", "activations=recompute", FOUR],
    "passes, stage 1": ["zero=stage1", "offload=optimizer", "precision=bf16", "activations=recompute", FOUR],
    "evaluation": ["zero=stage0", "offload=none", "precision=fp32", "activations=keep", ONE, "tuning=frozen"],
}  # fmt: skip


def measured(words: list[str], folder: Path) -> str:
    """Predicted and measured GiB and how far apart they are, or why there is no such thing."""
    command = [sys.executable, "-m", "gdino_lab", "train", *COMMON, *words, f"data.root={folder.parent / 'set'}", f"run_dir={folder}"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        return f"exit code {ended.returncode}: {ended.stdout.strip().splitlines()[-1]}"
    summary = json.loads((folder / "summary.json").read_text())
    most, predicted = max(rank["allocated"] for rank in summary["peak_bytes"]), summary["predicted_peak_bytes"]
    return f"{predicted / 2**30:.2f} | {most / 2**30:.2f} | {100 * (predicted / most - 1):+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    chosen = parser.parse_args().only
    print("| run | predicted, GiB | measured, GiB | error, % |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(chosen):
            print(f"| {name}: `{' '.join(RUNS[name])}` | {measured(RUNS[name], Path(scratch) / str(number))} |", flush=True)


if __name__ == "__main__":
    main()
