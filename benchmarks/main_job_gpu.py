"""The main job on a GPU: Grounding DINO tiny (random weights) at 800x1333, 20 optimizer steps, in two precisions; then
every precision and ZeRO stage at nano size, to see that each trains.

    python benchmarks/main_job_gpu.py OUT [--nano-only]

Prints a table and leaves OUT/results.json. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

TINY = [
    "hardware=rtx3090_single",
    "model=grounding_dino_tiny",
    "model.pretrained=null",
    "data=synthetic_loco",
    "data.canvas=[800,1333]",
    "data.image_size=[800,1333]",
    "data.counts={train: 80, validation: 8, test_good: 8, test_logical: 12, test_structural: 5}",
    "optimizer.lr=1e-4",
    "train.max_steps=20",
    "train.log_every=1",
    "tracker=none",
]
NANO = [
    "hardware=h200_single",
    "data.counts={train: 64, validation: 8, test_good: 8, test_logical: 12, test_structural: 5}",
    "train.max_steps=8",
    "train.log_every=1",
    "train.workers=0",
    "tracker=none",
]
CELLS = [
    [f"precision={precision}", f"zero=stage{stage}", f"offload={offload}"]
    for precision, stage, offload in (
        ("tf32", 1, "none"),
        ("bf16", 2, "none"),
        ("bf16", 3, "optimizer_and_params"),
        ("fp16", 1, "optimizer"),
        ("fp16", 3, "none"),
        ("fp16_autocast", 2, "optimizer"),
        ("bf16_autocast", 3, "none"),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nano-only", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = [] if arguments.nano_only else [("tiny", [*TINY, f"precision={each}"]) for each in ("fp32", "bf16_autocast")]
    jobs += [("nano", [*NANO, *cell]) for cell in CELLS]
    rows = []
    for number, (name, overrides) in enumerate(jobs):
        rows.append(measure(name, overrides, arguments.out / f"{number}"))
        (arguments.out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)


def measure(name: str, overrides: list[str], folder: Path) -> dict:
    command = [sys.executable, "-m", "gdino_lab", "train", *overrides, f"run_dir={folder}"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / f"{folder.name}.log").write_text(done.stdout + done.stderr)
    row = {
        "model": name,
        **dict(each.split("=", 1) for each in overrides if each.split("=")[0] in ("precision", "zero", "offload")),
        "code": done.returncode,
        "wall_s": round(time.perf_counter() - start, 1),
    }
    if done.returncode != 0:
        return row | {"error": (done.stderr.strip().splitlines() or ["?"])[-3:]}
    summary = json.loads((folder / "summary.json").read_text())
    return row | {
        "peak_gib": round(max(peak["allocated"] for peak in summary["peak_bytes"]) / 2**30, 2),
        "reserved_gib": round(max(peak["reserved"] for peak in summary["peak_bytes"]) / 2**30, 2),
        "host_gib": round(summary["host_peak_bytes"] / 2**30, 2),
        "images_per_s": summary["images_per_s"],
        "loss_first": round(summary["loss"]["first"], 4),
        "loss_last": round(summary["loss"]["last"], 4),
        "skipped": summary["skipped_steps"],
        "seconds": {key: round(value) for key, value in summary["seconds"].items()},
    }


if __name__ == "__main__":
    main()
