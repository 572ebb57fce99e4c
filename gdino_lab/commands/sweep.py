"""Jobs of a sweep: each in processes of its own, each recorded in results.csv, none ending the others."""

from __future__ import annotations

import csv
import io
import re
import traceback
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from gdino_lab.errors import ConfigurationError
from gdino_lab.run_folder import read_json, write_json, write_text

RESULTS = "results.csv"
JOB = "job.json"


def run_job(config: DictConfig) -> int:
    """One job; returns its exit code. Only an interrupt ends the sweep.

    Raises:
        KeyboardInterrupt: somebody stopped this job, and so the sweep.
    """
    from gdino_lab import launch, settings  # late: the callback below is imported for every command

    hydra = HydraConfig.get()
    folder = Path(hydra.sweep.dir) / f"{hydra.sweep.subdir}_{folder_name(hydra.job.override_dirname)}"
    overrides = {key: value for key, _, value in (word.partition("=") for word in hydra.overrides.task)}
    if launch.ranks_of_launcher() is not None:
        raise ConfigurationError("-m under another launcher: a sweep starts its own ranks; call gdino-lab train -m")
    if config.run_dir is not None:
        raise ConfigurationError("run_dir with -m: each job has a folder of its own; hydra.sweep.dir moves them all")
    print(f"\n== job {hydra.job.num}: {hydra.job.override_dirname or 'no override'} ==", flush=True)
    try:
        code = launch.train(settings.load(config), run_dir=str(folder))
    except ConfigurationError as error:
        code = launch.REFUSED
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "status.json", {"state": "failed", "kind": "refused", "cause": "; ".join(error.complaints)})
        print("\n".join(f"  - {complaint}" for complaint in error.complaints))
    except Exception as error:
        code = launch.FAILED
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "status.json", {"state": "failed", "kind": type(error).__name__, "cause": str(error)})
        traceback.print_exc()
    write_json(folder / JOB, {"number": int(hydra.job.num), "overrides": overrides})
    write_results(folder.parent)
    if code == launch.INTERRUPTED:
        raise KeyboardInterrupt
    return code


def folder_name(overrides: str) -> str:
    """Overrides as one folder's name: no separators, nothing a shell would want quoted, not too long."""
    return re.sub(r"[^\w.,=+-]+", "_", overrides)[:120]


def write_results(sweep: Path) -> list[dict[str, Any]]:
    """results.csv from the job folders: one row a job, in their order."""
    jobs = sorted((read_json(path) | {"folder": path.parent} for path in sweep.glob(f"*/{JOB}")), key=lambda job: job["number"])
    swept = [
        key
        for key in dict.fromkeys(key for job in jobs for key in job["overrides"])
        if len(jobs) == 1 or len({job["overrides"].get(key) for job in jobs}) > 1
    ]
    rows = [row_of(job, swept) for job in jobs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(sweep / RESULTS, text.getvalue())
    return rows


def row_of(job: dict[str, Any], swept: list[str]) -> dict[str, Any]:
    """number, each swept override, state, error kind, metrics, final loss, images/s, peak and host GiB, seconds."""
    folder: Path = job["folder"]
    status = read_json(folder / "status.json")
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
    peaks = [peak["allocated"] for peak in summary.get("peak_bytes") or []]
    metrics = {name: summary["metrics"].get(name) for name in summary.get("headlines", [])}
    untuned = summary.get("untuned", {})
    return {
        "number": job["number"],
        **{key: job["overrides"].get(key, "") for key in swept},
        "state": status["state"],
        "error": status.get("kind", ""),
        **metrics,
        **{f"untuned {name}": untuned.get(name) for name in metrics},
        "loss": summary.get("loss", {}).get("last", ""),
        "samples_per_s": summary.get("images_per_s", ""),
        "peak_gib": round(max(peaks) / 2**30, 3) if peaks else "",
        "peak_gib_predicted": round(predicted / 2**30, 3) if (predicted := summary.get("predicted_peak_bytes")) else "",
        "host_gib": round(summary["host_peak_bytes"] / 2**30, 3) if summary else "",
        "seconds": round(sum(summary.get("seconds", {}).values()), 1) if summary else "",
    }


class Results(Callback):
    """Prints the table when a sweep is over."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sweep = Path(config.hydra.sweep.dir)
        rows = write_results(sweep)
        if rows:
            table = table_of(rows, title=str(sweep / RESULTS))
            Console(width=max(Console().width, 16 * len(table.columns))).print(table)


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """The columns that tell the jobs apart and how they ended; results.csv has the rest."""
    told = [name for name in rows[0] if any(row.get(name) != rows[0].get(name) for row in rows)]
    kept = [name for name in rows[0] if name in ("number", "state", "auroc/mean", "ap", "loss") or name in told]
    table = Table(title=title, title_justify="left")
    for name in kept:
        table.add_column(name, no_wrap=True)
    for row in rows:
        values = (row.get(name, "") for name in kept)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    return table
