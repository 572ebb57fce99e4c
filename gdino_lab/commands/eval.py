"""gdino-lab eval run=DIR: score a finished run again."""

from __future__ import annotations

from omegaconf import DictConfig


def run(config: DictConfig) -> int:
    from gdino_lab import finished, settings
    from gdino_lab.progress import format_table
    from gdino_lab.run_folder import write_json

    finished_run = finished.load(settings.load(config))
    finished.bind(finished_run)
    split = config.split or finished_run.task.splits[0]
    evaluation = finished.evaluate(finished_run, split)
    for table in finished_run.task.tables({"tuned": evaluation}, split):
        print(format_table(table))
    write_json(finished_run.folder.path / f"eval_{split}.json", {"split": split, "metrics": evaluation.metrics})
    return 0
