"""The project's criterion beside transformers' built-in loss: the same data, model, seed, batches and steps.

    python benchmarks/criterion.py --out DIR [--epochs N]

Trains the nano model on the drawn screw bags twice in a plain loop (torch AdamW, warm-up and cosine, no DeepSpeed) in
two processes at once, one thread each, and writes DIR/curves.json and, with matplotlib installed, DIR/curves.svg.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import get_scheduler

from gdino_lab.commands.main import composed
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.scoring import records_of
from gdino_lab.settings import instantiate

CRITERIA = ("gdino_lab", "transformers")


def transformers_loss(module, batch, processor) -> torch.Tensor:
    """The loss that `labels=...` gives, class ids as transformers counts them: the phrases of the prompt in order."""
    prompt_classes = [classes for _, classes, _ in batch["identity"]]
    labels = []
    for row, count in enumerate(batch["counts"]):
        rows = [
            next(i for i, tokens in enumerate(batch["class_tokens"][row]) if torch.equal(tokens, wanted))
            for wanted in batch["tokens"][row, :count]
        ]
        assert len(prompt_classes[row]) >= len(set(rows))
        labels.append({"class_labels": torch.tensor(rows, dtype=torch.long), "boxes": batch["boxes"][row, :count]})
    return module.detector(**batch["inputs"], labels=labels).loss


def train(criterion: str, epochs: int) -> dict:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    settings = composed("task=detection", f"train.epochs={epochs}")
    torch.manual_seed(settings.train.seed)
    detector, processor = instantiate(settings.model)
    data = instantiate(settings.data)
    data.prepare()
    task = instantiate(settings.task, seed=settings.train.seed)
    task.bind(data, processor)
    module = task.attach(detector)
    dataset, size = task.train_set(), settings.train.effective_batch
    steps = epochs * (len(dataset) // size)
    optimizer = instantiate(settings.optimizer, params=iter(list(module.parameters())))
    schedule = get_scheduler("cosine", optimizer, round(settings.schedule.warmup_fraction * steps), steps)
    sampler = EpochSampler(dataset, 0, 1, settings.train.seed, shuffle=True)
    batches = loader(dataset, sampler, size, 0, task.collate, False)
    watched = task.evaluation_set()
    evaluation = loader(watched, EpochSampler(watched, 0, 1, 0, shuffle=False), 2 * size, 0, task.collate, False)

    def score() -> dict:
        module.eval()
        found = task.evaluate(records_of(module, task, evaluation, torch.device("cpu"), torch.float32)).metrics
        module.train()
        return {"ap": found["ap"], "ap50": found["ap50"]}

    rows, start = [{"epoch": 0, **score()}], time.perf_counter()
    for epoch in range(epochs):
        sampler.set_position(epoch)
        for number, batch in enumerate(batches):
            if number == len(dataset) // size:
                break
            if criterion == "transformers":
                loss = transformers_loss(module, batch, processor)
            else:
                terms = task.losses(module(**batch["inputs"]), batch, max(1, task.count(batch)))
                loss = sum(terms.values())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), settings.train.clip_norm)
            optimizer.step()
            schedule.step()
        rows.append({"epoch": epoch + 1, "loss": loss.item(), "seconds": time.perf_counter() - start, **score()})
        print(criterion, json.dumps(rows[-1]), flush=True)
    return {"criterion": criterion, "rows": rows}


def plot(curves: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for curve in curves:
        axes.plot([row["epoch"] for row in curve["rows"]], [100 * row["ap50"] for row in curve["rows"]], marker="o", label=curve["criterion"])
    axes.set(xlabel="epoch", ylabel="AP50 on val, %", ylim=(0, 100), title="Same data, model, seed and steps; another loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        curves = list(pool.map(train, CRITERIA, [arguments.epochs] * 2))
    (arguments.out / "curves.json").write_text(json.dumps(curves, indent=1))
    plot(curves, arguments.out / "curves.svg")


if __name__ == "__main__":
    main()
