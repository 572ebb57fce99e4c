"""How long does a checkpoint keep training waiting, and how long does it take to be written?

    python benchmarks/checkpoint.py [--device cuda] [--model grounding_dino_tiny] [--rounds 7] [--words WORD ...]

In each round, side by side: some steps, as many with a save before the first, the state copied to host memory and nothing else,
the answers to the fixed image, `save` until all is on the disk, and the same bytes written by one `write` with fsync. Medians
over the rounds; what training loses is the median of each round's difference. Before them one more `save` and steps, told by
themselves: host memory for the copy is allocated there, and the fixed image is read.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from gdino_lab.commands.main import composed

STEPS = 8  # which take longer than the writing, and so feel all that it takes of the machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", nargs="*", default=[], help="overrides")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as scratch:
        measure(arguments, Path(scratch))


def measure(arguments: argparse.Namespace, scratch: Path) -> None:
    import torch
    from gdino_lab import checkpoint, engine, trainer
    from gdino_lab.pieces import pieces
    from gdino_lab.plan import make_plan
    from gdino_lab.run_folder import RunFolder
    from gdino_lab.settings import instantiate
    from gdino_lab.usage import Phases

    engine.start_distributed(arguments.device)
    words = [
        f"hardware={'h200_single' if arguments.device == 'cuda' else 'cpu'}", f"model={arguments.model}", f"data.root={scratch / 'set'}",
        "model.pretrained=null", "data.counts={train: 8, validation: 4, test_good: 2, test_logical: 2, test_structural: 2}",
        "train.micro_batch=1", "train.effective_batch=1", "train.workers=0", "tracker=none", *arguments.words,
    ]  # fmt: skip
    if arguments.model != "nano":
        words.append("data.image_size=[800,1333]")
    settings = composed(*words)
    instantiate(settings.data).prepare()
    run = trainer.build(settings, make_plan(settings, 8, 1), RunFolder(scratch), lambda: False, Phases())
    dataset = run.task.train_set()
    for _ in trainer.steps(run, iter([run.task.collate([dataset[0, index]]) for index in range(2)]), 2):
        pass

    def waited() -> None:
        if arguments.device == "cuda":
            torch.cuda.synchronize()

    batches = [run.task.collate([dataset[0, index]]) for index in range(STEPS)]
    returned: list[float] = []

    def steps_take(save_first: bool) -> float:
        waited()
        begin = time.perf_counter()
        if save_first:
            trainer.save(run, trainer.Progressed(), evaluation=None)
            returned.append(time.perf_counter() - begin)
        for _ in trainer.steps(run, iter(batches), STEPS):
            pass
        waited()
        return time.perf_counter() - begin

    def copied() -> float:
        waited()
        begin = time.perf_counter()
        steady, changing = checkpoint.on_gpu_until_a_step(run.engine, pieces(run.engine, run.average))
        checkpoint.copies_on_host(list(changing.values()))
        checkpoint.copies_on_host(list(steady.values()), checkpoint.now_on(run.device))
        return time.perf_counter() - begin

    def answered() -> float:
        waited()
        begin = time.perf_counter()
        trainer.digest(run)
        return time.perf_counter() - begin

    def saved() -> float:
        waited()
        begin = time.perf_counter()
        trainer.save(run, trainer.Progressed(), evaluation=None)
        run.writer.wait()
        return time.perf_counter() - begin

    def written() -> float:
        begin = time.perf_counter()
        with (scratch / "plain").open("wb", buffering=0) as file:
            left = data
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        return time.perf_counter() - begin

    size = sum(piece.values.nbytes for piece in pieces(run.engine, run.average) if piece.mine)
    data = memoryview(bytearray(os.urandom(2**20) * (size // 2**20 + 1)))[:size]
    steps_take(save_first=False)
    plain = steps_take(save_first=False)
    first = steps_take(save_first=True) - plain
    run.writer.wait()
    rounds: dict[str, list[float]] = {name: [] for name in ("steps", "loses", "returns", "copied", "answered", "saved", "written")}
    for number in range(arguments.rounds + 1):
        plain = steps_take(save_first=False)
        loses = steps_take(save_first=True) - plain
        run.writer.wait()
        row = {
            "steps": plain, "loses": loses, "returns": returned[-1], "copied": copied(), "answered": answered(), "saved": saved(),
            "written": written(),
        }  # fmt: skip
        if number:  # the first warms up
            for name, seconds in row.items():
                rounds[name].append(seconds)
    found = {name: statistics.median(values) for name, values in rounds.items()}
    print(f"{size / 1e9:.3f} GB on {arguments.device}, {arguments.model}, medians of {arguments.rounds} rounds")
    print(f"training loses  {found['loses']:.3f} s in {STEPS} steps of {found['steps'] / STEPS:.3f} s; the first time {first:.3f} s")
    print(f"save returns in {found['returns']:.3f} s; copy alone {found['copied']:.3f} s, the fixed image's answers alone {found['answered']:.3f} s")
    print(f"on the disk     {found['saved']:.3f} s: write and fsync alone {found['written']:.3f} s, ratio {found['saved'] / found['written']:.2f}")
    print("each round      " + "; ".join(f"{name} {' '.join(f'{value:.3f}' for value in values)}" for name, values in rounds.items()))


if __name__ == "__main__":
    main()
