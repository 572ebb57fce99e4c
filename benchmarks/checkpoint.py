"""How long does a checkpoint keep training waiting, and how long does it take to be written?

    python benchmarks/checkpoint.py [--device cuda] [--model grounding_dino_tiny] [--rounds 7] [--words WORD ...]

In each round, side by side: some steps, as many with a save before the first, as many with one that asks nothing of the fixed
image, the state copied to host memory and nothing else, the answers to the fixed image, `save` until all is on the disk, and the
same bytes written by one `write` with fsync. Medians over the rounds. What a step loses is the median of each round's difference
to the same step without a save; what training waits is measured where it waits: in `save`, and for the copy before the weights
change. Before the rounds one more `save` and steps, told by themselves: host memory for the copy is allocated there, and the
fixed image is read.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from unittest import mock

from gdino_lab.commands.main import composed

STEPS = 8  # which on a GPU take longer than the writing, and so feel all that it takes of the machine


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

    def steps_take(save_first: bool = False) -> list[float]:
        waited()
        times = [time.perf_counter()]
        if save_first:
            trainer.save(run, trainer.Progressed(), evaluation=None)
        for _ in trainer.steps(run, iter(batches), STEPS):
            waited()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def asking_nothing() -> tuple[list[float], float]:
        """What the steps with a save take, and how long of that training waits."""
        waits = [0.0]

        def timed(function):
            def call(*arguments):
                begin = time.perf_counter()
                function(*arguments)
                waits[0] += time.perf_counter() - begin

            return call

        with (
            mock.patch.object(trainer, "digest", lambda run: {}),
            mock.patch.object(run.writer, "save", timed(run.writer.save)),
            mock.patch.object(run.writer, "before_step", timed(run.writer.before_step)),
        ):
            return steps_take(save_first=True), waits[0]

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
    steps_take()
    first = steps_take(save_first=True)[0] - steps_take()[0]
    run.writer.wait()
    rounds: dict[str, list[float]] = {}
    for number in range(arguments.rounds + 1):
        plain = steps_take()
        with_save = steps_take(save_first=True)
        run.writer.wait()
        nothing_asked, waits = asking_nothing()
        run.writer.wait()
        row = {
            "a step": statistics.median(plain), "the first loses": with_save[0] - plain[0], "asking nothing": nothing_asked[0] - plain[0],
            "a later one loses": statistics.median(with_save[1:]) - statistics.median(plain[1:]), "waits": waits, "copied": copied(),
            "answered": answered(), "saved": saved(), "written": written(),
        }  # fmt: skip
        for name, seconds in row.items() if number else ():  # the first warms up
            rounds.setdefault(name, []).append(seconds)
    found = {name: statistics.median(values) for name, values in rounds.items()}
    print(f"{size / 1e9:.3f} GB on {arguments.device}, {arguments.model}, medians of {arguments.rounds} rounds, seconds")
    print(f"training waits {found['waits']:.3f} for a save; the copy alone takes {found['copied']:.3f}")
    print(
        f"the first step after it takes {found['the first loses']:.3f} longer than {found['a step']:.3f}, "
        f"{found['asking nothing']:.3f} where nothing is asked of the fixed image, whose answers alone take {found['answered']:.3f}; "
        f"a later step {found['a later one loses']:.3f}; the first step after the first save {first:.3f}"
    )
    print(f"on the disk after {found['saved']:.3f}; write and fsync alone {found['written']:.3f}, ratio {found['saved'] / found['written']:.2f}")
    print("each round: " + "; ".join(f"{name} {' '.join(f'{value:.3f}' for value in values)}" for name, values in rounds.items()))


if __name__ == "__main__":
    main()
