"""How long does a checkpoint keep training waiting, and how long does it take to be written?

    python benchmarks/checkpoint.py [--device cuda] [--model grounding_dino_tiny] [--rounds 7] [--words WORD ...]

In each round, side by side: `save` until training may go on, the same bytes copied to host memory and nothing else, `save`
until all is on the disk, and the same bytes written by one `write` with fsync. Medians over the rounds. Before them one more
`save`, told by itself: host memory for the copy is allocated in it, and the fixed image is read.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path


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
    from hydra import compose, initialize_config_dir

    from gdino_lab import checkpoint, engine, settings as settings_module, trainer
    from gdino_lab.commands.main import conf_folder
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
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        settings = settings_module.load(compose("config", words))
    instantiate(settings.data).prepare()
    run = trainer.build(settings, make_plan(settings, 8, 1), RunFolder(scratch), lambda: False, Phases())
    dataset = run.task.train_set()
    for _ in trainer.steps(run, iter([run.task.collate([dataset[0, index]]) for index in range(2)]), 2):
        pass

    def waited() -> None:
        if arguments.device == "cuda":
            torch.cuda.synchronize()

    held = [piece.values for piece in pieces(run.engine, run.average) if piece.mine]
    size = sum(values.nbytes for values in held)
    begin = time.perf_counter()
    trainer.save(run, trainer.Progressed(), evaluation=None)
    first = time.perf_counter() - begin
    run.writer.wait()
    rounds: dict[str, list[float]] = {"blocked": [], "digest": [], "copied": [], "saved": [], "written": []}
    data = memoryview(bytearray(os.urandom(2**20) * (size // 2**20 + 1)))[:size]
    for number in range(arguments.rounds + 1):
        waited()
        start = time.perf_counter()
        trainer.digest(run)
        waited()
        digested = time.perf_counter()
        with checkpoint.copied_to_host(pieces(run.engine, run.average), run.device) as copies:
            pass
        copied = time.perf_counter()
        del copies
        gc.collect()
        begin = time.perf_counter()
        trainer.save(run, trainer.Progressed(step=number), evaluation=None)
        blocked = time.perf_counter()
        run.writer.wait()
        saved = time.perf_counter()
        with (scratch / "plain").open("wb", buffering=0) as file:
            left = data
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        written = time.perf_counter()
        if number:  # the first warms up
            for name, seconds in (
                ("digest", digested - start), ("copied", copied - digested), ("blocked", blocked - begin),
                ("saved", saved - begin), ("written", written - saved),
            ):  # fmt: skip
                rounds[name].append(seconds)
    found = {name: statistics.median(values) for name, values in rounds.items()}
    print(f"{size / 1e9:.3f} GB on {arguments.device}, {arguments.model}, medians of {arguments.rounds} rounds")
    print(f"training waits  {found['blocked']:.3f} s: copy alone {found['copied']:.3f} s, answers of the fixed image {found['digest']:.3f} s")
    print(f"the first time  {first:.3f} s")
    print(f"on the disk     {found['saved']:.3f} s: write and fsync alone {found['written']:.3f} s, ratio {found['saved'] / found['written']:.2f}")


if __name__ == "__main__":
    main()
