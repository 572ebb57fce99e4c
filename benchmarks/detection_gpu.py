"""Detection on a GPU: 50 steps of Grounding DINO tiny (random weights) at 800x1333, batch 4, bf16 autocast; and the
transfers of the criterion.

    python benchmarks/detection_gpu.py OUT

Prints a table and leaves OUT/detection.json. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

TINY = [
    "task=detection",
    "hardware=h200_single",
    "model=grounding_dino_tiny",
    "model.pretrained=null",
    "data.canvas=[240,400]",
    "data.image_size=[800,1333]",
    "data.counts={train: 200, val: 8}",
    "task.augment.scales=[1.0,1.0]",
    "precision=bf16_autocast",
    "optimizer.lr=1e-4",
    "train.micro_batch=4",
    "train.effective_batch=4",
    "train.max_steps=50",
    "train.log_every=1",
    "train.workers=8",
    "tracker=none",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [measure(each, arguments.out) for each in ("keep", "recompute")]
    (arguments.out / "detection.json").write_text(json.dumps(rows, indent=2) + "\n")


def measure(activations: str, out: Path) -> dict:
    folder = out / f"run_{activations}"
    start = time.perf_counter()
    command = [sys.executable, "-m", "gdino_lab", "train", *TINY, f"activations={activations}", f"run_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    (out / f"{activations}.log").write_text(done.stdout + done.stderr)
    row = {"activations": activations, "code": done.returncode, "wall_s": round(time.perf_counter() - start, 1)}
    if done.returncode == 0:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if step["kind"] == "step"]
        losses = [step["loss"] for step in steps]
        rates = sorted(step["images_per_s"] for step in steps[10:])
        summary = json.loads((folder / "summary.json").read_text())
        row |= {
            "loss_first5": round(sum(losses[:5]) / 5, 3),
            "loss_last5": round(sum(losses[-5:]) / 5, 3),
            "images_per_s": round(rates[len(rates) // 2], 2),
            "peak_gib": round(summary["peak_bytes"][0]["allocated"] / 2**30, 2),
            "untrained": summary["untrained"],
        }
        (out / f"losses_{activations}.json").write_text(json.dumps(losses))
    print(row if done.returncode == 0 else done.stderr[-3000:], flush=True)
    return row


if __name__ == "__main__":
    main()
