"""Predicted memory beside measured: the same cells on a GPU and by `gdino-lab plan`'s forecast.

    python benchmarks/memory_cells.py measure OUT [--workers N]     on the GPU: writes OUT/measured.json
    python benchmarks/memory_cells.py compare MEASURED.json         anywhere: predicts each cell and prints the errors

A cell takes two optimizer steps on the worst-case batch; its figure is torch.cuda.max_memory_allocated over the second.
Workers share the card: each process has an allocator of its own, so they do not disturb each other's figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from gdino_lab.commands.main import composed

SIZES = {"512": (512, 512), "800": (800, 1333), "1200": (1200, 2000)}


def cells() -> list[dict]:
    """size, batch, precision, activations, zero, offload, tuning, task and model of each cell."""
    keys = ("size", "batch", "precision", "activations", "zero", "offload", "tuning", "task", "model")
    tiny, base = "grounding_dino_tiny", "grounding_dino_base"
    rows = [
        ("800", 1, "fp32", "keep", 0, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 1, "bf16", "keep", 0, "none", "full", "detection", tiny),
        ("800", 1, "bf16", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 1, "bf16_autocast", "keep", 0, "none", "full", "detection", tiny),
        ("800", 1, "bf16_autocast", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "keep", 2, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "keep", 2, "optimizer", "full", "detection", tiny),
        ("800", 1, "fp32", "recompute", 2, "optimizer", "full", "detection", tiny),
        ("800", 1, "bf16", "recompute", 2, "optimizer", "full", "detection", tiny),
        ("800", 1, "bf16", "keep", 3, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "recompute", 3, "none", "full", "detection", tiny),
        ("800", 1, "bf16", "recompute", 3, "optimizer", "full", "detection", tiny),
        ("800", 1, "bf16_autocast", "recompute", 2, "none", "full", "detection", tiny),
        ("800", 4, "bf16", "keep", 2, "none", "full", "detection", tiny),
        ("800", 4, "bf16_autocast", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 8, "bf16", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 2, "bf16_autocast", "keep", 0, "none", "full", "detection", tiny),
        ("512", 1, "fp32", "keep", 0, "none", "full", "detection", tiny),
        ("512", 8, "bf16", "recompute", 2, "none", "full", "detection", tiny),
        ("512", 4, "bf16_autocast", "keep", 2, "optimizer", "full", "detection", tiny),
        ("512", 2, "fp32", "recompute", 0, "none", "full", "detection", tiny),
        ("1200", 1, "fp32", "keep", 0, "none", "full", "detection", tiny),
        ("1200", 1, "bf16", "recompute", 0, "none", "full", "detection", tiny),
        ("1200", 2, "bf16_autocast", "recompute", 2, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "keep", 0, "none", "lora", "detection", tiny),
        ("800", 4, "bf16", "keep", 2, "none", "lora", "detection", tiny),
        ("800", 1, "fp32", "keep", 0, "none", "full", "anomaly", tiny),
        ("800", 1, "bf16", "recompute", 2, "optimizer", "full", "anomaly", tiny),
        ("800", 2, "bf16_autocast", "keep", 0, "none", "full", "anomaly", tiny),
        ("800", 4, "fp32", "recompute", 0, "none", "full", "anomaly", tiny),
        ("800", 1, "fp32", "keep", 0, "none", "frozen", "anomaly", tiny),
        ("512", 4, "bf16", "keep", 0, "none", "frozen", "anomaly", tiny),
        ("800", 24, "bf16", "recompute", 0, "none", "full", "detection", tiny),
        ("800", 1, "fp32", "keep", 0, "none", "full", "detection", base),
        ("800", 12, "bf16", "recompute", 0, "none", "full", "detection", base),
    ]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def overrides(cell: dict) -> list[str]:
    height, width = SIZES[cell["size"]]
    counts = (
        f"{{train: {cell['batch']}, val: 2}}"
        if cell["task"] == "detection"
        else f"{{train: {cell['batch']}, validation: 2, test_good: 1, test_logical: 1, test_structural: 1}}"
    )
    return [
        "hardware=h200_single",
        f"task={cell['task']}",
        f"model={cell['model']}",
        "model.pretrained=null",
        f"data.canvas=[{height},{width}]",
        f"data.image_size=[{min(height, width)},{max(height, width)}]",
        f"data.counts={counts}",
        f"precision={cell['precision']}",
        f"activations={cell['activations']}",
        f"zero=stage{cell['zero']}",
        f"offload={cell['offload']}",
        f"tuning={cell['tuning']}",
        f"train.micro_batch={cell['batch']}",
        f"train.effective_batch={cell['batch']}",
        "train.workers=0",
        "tracker=none",
    ]


def measure_one(cell: dict, out: Path) -> dict:
    """Bytes allocated when built, at the end of forward, and at most during each phase of the second step."""
    import torch

    from gdino_lab import trainer
    from gdino_lab.plan import make_plan
    from gdino_lab.run_folder import RunFolder
    from gdino_lab.scoring import to_device
    from gdino_lab.settings import instantiate
    from gdino_lab.usage import Phases

    settings = composed(*overrides(cell))
    data = instantiate(settings.data)
    data.prepare()
    plan = make_plan(settings, cell["batch"], 1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = trainer.build(settings, plan, RunFolder(out), lambda: False, Phases())
    run.engine.train()
    found = {"before": before, "built": torch.cuda.memory_allocated()}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        images = settings.train.micro_batch
        batch = to_device(run.task.blank_batch(images, run.task.worst(images)), run.device, run.dtype)
        batch["inputs"]["pixel_values"].normal_()  # black images give random weights gradients that are not finite
        found["start"] = torch.cuda.memory_allocated()
        outputs = run.engine(**batch["inputs"])
        found["peak_model"] = torch.cuda.max_memory_allocated()
        loss = sum(run.task.losses(outputs, batch, max(1, run.task.count(batch))).values())
        del outputs
        found["after_forward"] = torch.cuda.memory_allocated()
        found["peak_forward"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.engine.backward(loss)
        del loss
        found["peak_backward"], found["after_backward"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.engine.step()
        found["peak_step"], found["after_step"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del batch
    found["skipped"] = int(run.engine.skipped_steps)
    run.engine.destroy()
    return found


def work(number: int, chosen: list[dict], out: Path) -> None:
    import torch

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(29700 + number)
    os.environ["DS_ACCELERATOR"] = "cuda"
    from gdino_lab.engine import start_distributed

    start_distributed("cuda")
    for cell in chosen:
        try:
            row = cell | measure_one(cell, out)
        except Exception as error:  # one cell's failure is a row
            row = cell | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        with (out / f"part_{number}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key not in ("model",)}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def measure(out: Path, workers: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    running = [
        subprocess.Popen([sys.executable, __file__, "work", str(out), "--number", str(number), "--workers", str(workers)])
        for number in range(workers)
    ]
    for process in running:
        process.wait()
    rows = [json.loads(line) for part in sorted(out.glob("part_*.jsonl")) for line in part.read_text().splitlines()]
    order = [json.dumps(cell) for cell in cells()]
    rows.sort(key=lambda row: order.index(json.dumps({key: row[key] for key in cells()[0]})))
    (out / "measured.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} cells: {out / 'measured.json'}")


def predict(cell: dict) -> dict:
    from gdino_lab.memory.forecast import forecast
    from gdino_lab.settings import instantiate
    from gdino_lab.tasks.protocol import Worst

    settings = composed(*overrides(cell))
    task = instantiate(settings.task, seed=0)
    height, width = SIZES[cell["size"]]
    tokens, boxes = (12, 8) if cell["task"] == "detection" else (15, 0)  # as the drawn sets have
    return forecast(settings, task, Worst(height, width, tokens, boxes), ranks=1).as_dict()


def cell_of(row: dict) -> dict:
    return {key: row[key] for key in cells()[0]}


def measured_bytes(row: dict) -> int:
    """Most of a step, less what earlier cells of the same process left behind; cuBLAS keeps its workspace for all of them."""
    from gdino_lab.memory.forecast import CUBLAS_WORKSPACE

    return max(row["peak_forward"], row["peak_backward"], row["peak_step"]) - max(0, row["before"] - CUBLAS_WORKSPACE)


def step_bytes(predicted: dict) -> int:
    """Most of a step, as the cells were measured: none was evaluated."""
    return max(size for phase, size in predicted["peaks"].items() if phase != "evaluation")


def compare(rows: list[dict]) -> None:
    keys = [key for key in cells()[0] if key != "model"]
    print("  ".join(keys), " measured  predicted  error")
    errors = []
    for row in rows:
        measured, predicted = measured_bytes(row), predict(cell_of(row))
        step = step_bytes(predicted)
        errors.append(step / measured - 1)
        terms = {name: round(size / 2**30, 2) for name, size in predicted["device"].items()}
        shown = "  ".join(str(row[key]) for key in keys)
        print(f"{shown}  {measured / 2**30:.2f}  {step / 2**30:.2f}  {100 * errors[-1]:+.1f} %  {terms}", flush=True)
    print(f"{len(errors)} cells, worst {100 * max(map(abs, errors)):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "work", "compare"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--number", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.path, arguments.workers)
    elif arguments.what == "compare":
        compare(json.loads(arguments.path.read_text()))
    elif arguments.what == "work":
        work(arguments.number, cells()[arguments.number :: arguments.workers], arguments.path)


if __name__ == "__main__":
    main()
