"""The seed's first four attempts and how training scales, on two GPUs beside one: Grounding DINO tiny at 800x1333.

    python benchmarks/two_gpus.py measure OUT [--ranks 2 1]     on two GPUs: writes OUT/measured.jsonl
    python benchmarks/two_gpus.py compare MEASURED.jsonl        anywhere: predicts each cell, prints docs/two_gpus.md's tables

A cell takes optimizer steps on worst-case batches; its peak is torch.cuda.max_memory_allocated over all but the first step,
its speed that of the median step. Memory outside the allocator is what the driver counts as taken on the card less what the
allocator holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from gdino_lab.commands.main import composed

MODEL = [
    "task=anomaly", "model=grounding_dino_tiny", "model.pretrained=null", "data=synthetic_loco", "data.canvas=[800,1333]",
    "data.image_size=[800,1333]", "data.counts={train: 16, validation: 2, test_good: 1, test_logical: 1, test_structural: 1}",
    "train.workers=0", "tracker=none",
]  # fmt: skip
OFFLOADED = ["zero=stage3", "offload=optimizer_and_params"]
# conf/ladder/blog.yaml's first five rungs, and the first on one GPU.
RUNGS = [
    ("ZeRO-2", 2, ["zero=stage2", "offload=none", "bucket=500mb"]),
    ("ZeRO-3 + offload", 2, [*OFFLOADED, "bucket=500mb"]),
    ("bucket 5 MB", 2, [*OFFLOADED, "bucket=5mb"]),
    ("bucket 1 MB", 2, [*OFFLOADED, "bucket=1mb"]),
    ("ZeRO-2", 1, ["zero=stage2", "offload=none", "bucket=500mb"]),
    ("ZeRO-2 + offload", 1, ["zero=stage2", "offload=optimizer", "bucket=50mb"]),
]
STEPS = 5


def cells() -> list[dict]:
    """name, ranks, images a rank and step, and overrides of each cell."""
    found = [
        {
            "table": "rungs", "name": name, "ranks": ranks, "batch": 1,
            "words": [
                f"hardware=rtx3090_{'dual' if ranks == 2 else 'single'}", *words, "precision=fp32", "train.micro_batch=1",
                "train.effective_batch=4",
            ],
        }
        for name, ranks, words in RUNGS
    ]  # fmt: skip
    for ranks in (2, 1):
        for batch in (1, 8):
            for stage in (0, 2, 3):
                words = ["hardware=h200_single", f"hardware.devices={ranks}", f"zero=stage{stage}", "offload=none", "bucket=50mb"]
                words += ["precision=fp32", f"train.micro_batch={batch}", f"train.effective_batch={batch * ranks}"]
                found.append({"table": "scaling", "name": f"stage {stage}", "ranks": ranks, "batch": batch, "words": words})
    return found


def measure_one(cell: dict, out: Path) -> dict:
    """The cell's figures, of every rank where they differ."""
    import torch
    import torch.distributed as dist

    from gdino_lab import engine, trainer
    from gdino_lab.plan import make_plan
    from gdino_lab.run_folder import RunFolder
    from gdino_lab.usage import Phases

    settings = composed(*MODEL, *cell["words"])
    plan = make_plan(settings, 16, dist.get_world_size())
    before = torch.cuda.memory_allocated()
    run = trainer.build(settings, plan, RunFolder(out), lambda: False, Phases())
    images = plan.micro_batch
    batch = run.task.blank_batch(images, run.task.worst(images))
    batch["inputs"]["pixel_values"].normal_()  # black images give random weights gradients that are not finite
    seconds, start = [], time.perf_counter()
    for number, _ in enumerate(trainer.steps(run, iter([batch] * (STEPS * plan.accumulation)), STEPS)):
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if number == 0:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
    mine = {"peak": torch.cuda.max_memory_allocated() - before, "outside": outside()}
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    engine.discard(run.engine)
    return {"per_rank": ranks, "seconds": seconds, "images": plan.effective_batch, "skipped": int(run.engine.skipped_steps)}


def outside() -> int:
    """Bytes taken on this card that the allocator does not hold."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def work(out: Path) -> None:
    """One rank: the cells for this number of ranks."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cuda"
    import torch
    import torch.distributed as dist

    from gdino_lab.engine import start_distributed
    from gdino_lab.settings import instantiate

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    taken = {"context": outside()}
    start_distributed("cuda")
    dist.all_reduce(torch.ones(2**20, device="cuda"))
    taken["after the first all-reduce"] = outside()
    chosen = [cell for cell in cells() if cell["ranks"] == ranks]
    if rank == 0:
        instantiate(composed(*MODEL, *chosen[0]["words"]).data).prepare()
    dist.barrier()
    rows: list = [None] * ranks
    dist.all_gather_object(rows, taken)
    note(out, rank, {"table": "outside", "ranks": ranks, "per_rank": rows})
    for cell in chosen:
        try:
            found = measure_one(cell, out)
        except torch.cuda.OutOfMemoryError as error:
            print(f"rank {rank}, {cell['name']}: {str(error).splitlines()[0]}", flush=True)
            os._exit(1)  # the other rank waits for this one
        note(out, rank, cell | found)
        gc.collect()
        torch.cuda.empty_cache()


def note(out: Path, rank: int, row: dict) -> None:
    if rank == 0:
        print(json.dumps({key: value for key, value in row.items() if key != "words"}), flush=True)
        with (out / "measured.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(out: Path, ranks: list[int]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for count in ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        done = subprocess.run([*launcher, __file__, "work", str(out)])
        if done.returncode:
            print(f"on {count} GPU(s) not all cells were measured, see above", flush=True)


def predict(cell: dict) -> int:
    from gdino_lab.memory.forecast import forecast
    from gdino_lab.settings import instantiate
    from gdino_lab.tasks.protocol import Worst

    settings = composed(*MODEL, *cell["words"])
    task = instantiate(settings.task, seed=0)
    return forecast(settings, task, Worst(800, 1333, tokens=15, boxes=0), cell["ranks"]).peak


def compare(rows: list[dict]) -> None:
    def gib(size: int) -> str:
        return f"{size / 2**30:.2f}"

    def of_ranks(row: dict, name: str) -> str:
        return ", ".join(gib(each[name]) for each in row["per_rank"])

    print("Outside the allocator, GiB by rank:\n\n| GPUs | context | after the first all-reduce |\n|---|---|---|")
    for row in (each for each in rows if each["table"] == "outside"):
        print(f"| {row['ranks']} | {of_ranks(row, 'context')} | {of_ranks(row, 'after the first all-reduce')} |")
    speed = {
        (row["table"], row["name"], row["ranks"], row["batch"]): row["images"] / statistics.median(row["seconds"][1:])
        for row in rows
        if row["table"] != "outside"
    }
    print("\n| | GPUs | predicted GiB | measured GiB by rank | error | outside, GiB by rank | images/s |")
    print("|---|---|---|---|---|---|---|")
    for row in (each for each in rows if each["table"] == "rungs"):
        rate = speed["rungs", row["name"], row["ranks"], 1]
        predicted, peak = predict(row), max(each["peak"] for each in row["per_rank"])
        error = f"{100 * (predicted / peak - 1):+.1f} %"
        print(
            f"| {row['name']} | {row['ranks']} | {gib(predicted)} | {of_ranks(row, 'peak')} | {error} | "
            f"{of_ranks(row, 'outside')} | {rate:.2f} |"
        )
    print("\n| | batch a GPU | 1 GPU, images/s | 2 GPUs | ratio | GiB of a rank, 1 GPU | 2 GPUs (predicted) |")
    print("|---|---|---|---|---|---|---|")
    scaling = {(row["name"], row["ranks"], row["batch"]): row for row in rows if row["table"] == "scaling"}
    for (name, ranks, batch), two in scaling.items():
        one = scaling.get((name, 1, batch))
        if ranks == 1 or one is None:
            continue
        alone, both = speed["scaling", name, 1, batch], speed["scaling", name, 2, batch]
        peaks = f"{of_ranks(one, 'peak')} | {of_ranks(two, 'peak')} ({gib(predict(two))})"
        print(f"| {name} | {batch} | {alone:.2f} | {both:.2f} | {both / alone:.2f} | {peaks} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "work", "compare"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1])
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.path, arguments.ranks)
    elif arguments.what == "work":
        work(arguments.path)
    else:
        compare([json.loads(line) for line in arguments.path.read_text().splitlines()])


if __name__ == "__main__":
    main()
