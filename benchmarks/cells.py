"""Does every cell train? Stage x precision x offload x ranks x task x activations, 20 steps each on the nano model.

    python benchmarks/cells.py --out docs/cells.md [--steps N] [--device cpu|cuda] [--ranks 1 2] [--jobs N] [--precisions fp32 ...]

A model is trained for each task first, so that the cells fine-tune as users do. Every cell takes the same batches (effective
batch 2) from its weights; its mean loss over the last 5 steps is set beside that of fp32 at stage 0 on one rank. Cells that
contradict themselves are listed with the reason they are refused for.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from gdino_lab.commands.main import composed
from gdino_lab.errors import ConfigurationError

STAGES = range(4)
PRECISIONS = ("fp32", "tf32", "bf16", "bf16_autocast", "fp16", "fp16_autocast")
OFFLOADS = ("none", "optimizer", "optimizer_and_params")
TASKS, ACTIVATIONS = ("anomaly", "detection"), ("keep", "recompute")
# bf16 keeps 8 bits of a number, fp16 11.
TOLERANCE = {"fp32": 0.01, "tf32": 0.02, "bf16": 0.05, "bf16_autocast": 0.05, "fp16": 0.05, "fp16_autocast": 0.05}
AVERAGED = 5  # steps at the end


def common(task: str, device: str) -> list[str]:
    """Small images, all of one size: padding to another image's size changes what the model answers."""
    counts = "{train: 64, val: 2}"
    if task == "anomaly":
        counts = "{train: 64, validation: 4, test_good: 2, test_logical: 2, test_structural: 2}"
    size = ["data.canvas=[64,96]", "data.image_size=[64,96]", f"data.counts={counts}", "train.workers=0", "tracker=none"]
    augment = ["task.augment.scales=[1,1]", "task.augment.crop=0"] if task == "detection" else []
    return [f"hardware={'cpu' if device == 'cpu' else 'h200_single'}", f"task={task}", *size, *augment]


def train_first(task: str, device: str, folder: Path) -> subprocess.Popen:
    """What makes the weights that the cells of `task` start from: `folder`/model."""
    words = [*common(task, device), "precision=fp32", f"run_dir={folder}", "train.epochs=10", "train.micro_batch=8"]
    command = [sys.executable, "-m", "gdino_lab", "train", *words, "train.effective_batch=8", "train.probe=false"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def overrides(cell: dict, device: str, ranks: int, trained: Path) -> list[str]:
    return [
        *common(cell["task"], device),
        f"model.pretrained={trained / cell['task'] / 'model'}",
        f"hardware.devices={ranks}",
        f"precision={cell['precision']}",
        f"zero=stage{cell['stage']}",
        f"offload={cell['offload']}",
        f"activations={cell['activations']}",
        "bucket=1mb",
        "optimizer.lr=1e-4",
        "schedule=constant",
        f"train.micro_batch={2 // ranks}",
        "train.effective_batch=2",
    ]


def cells(precisions: list[str]) -> list[dict]:
    keys = ("task", "activations", "stage", "precision", "offload")
    return [dict(zip(keys, each, strict=True)) for each in product(TASKS, ACTIVATIONS, STAGES, precisions, OFFLOADS)]


def take_steps(settings, steps: int, scratch: Path) -> tuple[float, int]:
    """(loss of the last steps, mean over them and the ranks; steps skipped)."""
    import torch
    import torch.distributed as dist

    from gdino_lab import trainer
    from gdino_lab.engine import discard
    from gdino_lab.plan import make_plan
    from gdino_lab.run_folder import RunFolder
    from gdino_lab.usage import Phases

    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = make_plan(settings, 64, ranks)
    run = trainer.build(settings, plan, RunFolder(scratch), lambda: False, Phases())
    dataset = run.task.train_set()
    batches = (
        run.task.collate([dataset[0, (2 * step + index) % 64] for index in range(rank, 2, ranks)]) for step in range(steps)
    )
    losses = [sum(terms.values()).float() for terms in trainer.steps(run, batches, steps)]
    value = torch.stack(losses[-AVERAGED:]).mean()
    dist.all_reduce(value)
    skipped = int(run.engine.skipped_steps)
    discard(run.engine)
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return value.item() / ranks, skipped


def work(arguments: argparse.Namespace, out: Path, trained: Path, share: slice) -> None:
    """One rank: its share of the cells in turn."""
    device = arguments.device
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["DS_ACCELERATOR"] = device
    import torch

    from gdino_lab.engine import start_distributed
    from gdino_lab.settings import instantiate

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start_distributed(device)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, cell in list(enumerate(cells(arguments.precisions)))[share]:
        row = {"number": number, "ranks": ranks, **cell}
        try:
            settings = composed(*overrides(cell, device, ranks, trained))
        except ConfigurationError as error:
            row["refused"] = error.complaints[0]
        else:
            instantiate(settings.data).prepare()
            try:
                row["loss"], row["skipped"] = take_steps(settings, arguments.steps, trained)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def table(rows: list[dict], steps: int) -> str:
    reference = {
        row["task"]: row["loss"]
        for row in rows
        if row["ranks"] == 1 and (row["stage"], row["precision"], row["offload"], row["activations"]) == (0, "fp32", "none", "keep")
    }
    lines, refused = [], {}
    worst: dict[str, float] = {}
    outside = failed = 0
    for row in rows:
        if "refused" in row:
            refused.setdefault(row["refused"].split(":")[-1].strip(), []).append(row)
            continue
        name = f"| {row['task']} | {row['activations']} | {row['ranks']} | {row['stage']} | {row['precision']} | {row['offload']} |"
        if "failed" in row:
            failed += 1
            lines.append(f"{name} FAILED: {row['failed']} | | |")
            continue
        off = abs(row["loss"] / reference[row["task"]] - 1)
        worst[row["precision"]] = max(worst.get(row["precision"], 0.0), off)
        outside += off > TOLERANCE[row["precision"]]
        lines.append(f"{name} {row['loss']:.4f} | {100 * off:.3f} | {row['skipped']} |")
    said = "\n".join(f"- {len(which)} cells: {why}" for why, which in sorted(refused.items()))
    spread = "\n".join(f"- {name}: {100 * off:.3f} % (tolerance {100 * TOLERANCE[name]:g} %)" for name, off in worst.items())
    return f"""# Every cell

`python benchmarks/cells.py {shlex.join(sys.argv[1:])}`: {len(lines) - failed} cells train, {failed} fail,
{outside} end outside their precision's tolerance, {sum(map(len, refused.values()))} are refused.

Farthest from fp32 at stage 0 on one rank, mean loss over steps {steps - AVERAGED + 1} to {steps}:

{spread}

Refused, with the reason:

{said}

| task | activations | ranks | ZeRO | precision | offload | loss | off, % | skipped |
|---|---|---|---|---|---|---|---|---|
""" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes, or pairs of ranks, that share the cells")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--work", nargs=3, metavar=("PART", "TRAINED", "JOB"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "fp32" not in arguments.precisions:
        parser.error("--precisions: fp32, which the others are compared with, has to be one of them")
    if arguments.work:
        part, trained, job = arguments.work
        work(arguments, Path(part), Path(trained), slice(int(job), None, arguments.jobs))
        return
    with tempfile.TemporaryDirectory() as scratch:
        ended(train_first(task, arguments.device, Path(scratch) / task) for task in TASKS)
        rows = []
        for ranks in arguments.ranks:
            rows += measured(arguments, ranks, Path(scratch))
            arguments.out.write_text(table(rows, arguments.steps))


def measured(arguments: argparse.Namespace, ranks: int, scratch: Path) -> list[dict]:
    """The rows of all cells on `ranks` ranks, in order."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    launcher += ["--out", str(arguments.out), "--jobs", str(arguments.jobs)]
    launcher += ["--steps", str(arguments.steps), "--device", arguments.device, "--precisions", *arguments.precisions]
    parts = [scratch / f"rows_{ranks}_{job}.jsonl" for job in range(arguments.jobs)]
    ended(subprocess.Popen([*launcher, "--work", str(part), str(scratch), str(job)]) for job, part in enumerate(parts))
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["number"])


def ended(processes: Iterable[subprocess.Popen]) -> None:
    """Once all have; they run side by side."""
    if any([process.wait() for process in list(processes)]):
        raise SystemExit("a process failed; its message is above")


if __name__ == "__main__":
    main()
