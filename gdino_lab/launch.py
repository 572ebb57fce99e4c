"""From a prepared run to a finished one: start or join the ranks, say how it ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import OmegaConf
from transformers.utils.logging import disable_progress_bar

from gdino_lab import checkpoint_folder, postmortem
from gdino_lab.data.loading import STOP_SIGNALS
from gdino_lab.errors import ConfigurationError
from gdino_lab.machine.host import read_oom_kills
from gdino_lab.machine.readings import Readings, read_all
from gdino_lab.plan import Plan
from gdino_lab.preparation import device_complaints, prepare
from gdino_lab.run_folder import LOST_PEER, RunFolder, write_json, write_text
from gdino_lab.settings import Settings
from gdino_lab.watch import Heart, Watch

log = logging.getLogger(__name__)

DONE, FAILED, REFUSED, OUT_OF_MEMORY, INTERRUPTED = 0, 1, 2, 3, 130
STATE_OF_EXIT = {
    DONE: "completed",
    FAILED: "failed",
    REFUSED: "failed",
    OUT_OF_MEMORY: "out_of_memory",
    INTERRUPTED: "interrupted",
}
# A rank that hangs after another one failed is ended after this many seconds (torch elastic's own default is 30).
SHUTDOWN_SECONDS = 15


@dataclass(frozen=True)
class Ranks:
    """The ranks of a launcher that has already started them."""

    rank: int
    local_rank: int
    local_size: int
    world_size: int


def train(settings: Settings, run_dir: str | None = None) -> int:
    """Run the training that `settings` describe; returns the exit code.

    Args:
        run_dir: the run folder, where the settings name none (a sweep's job).

    Raises:
        ConfigurationError: refused; nothing was started, nothing written.
    """
    os.environ["DS_ACCELERATOR"] = settings.hardware.device
    if (ranks := ranks_of_launcher()) is not None:
        return join(settings, ranks)
    job = prepare(settings, settings.hardware.devices, run_dir)
    return spawn(job, settings.hardware.devices)


# --- ranks ----------------------------------------------------------------------------------------------------------


def ranks_of_launcher() -> Ranks | None:
    """What torchrun, accelerate launch, deepspeed or srun say about this process; None where none of them started it.

    srun's variables are translated to torch's; an allocation without srun (one process) counts as none.
    """
    env = os.environ
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        env.setdefault("LOCAL_WORLD_SIZE", env.get("SLURM_STEP_TASKS_PER_NODE", env["WORLD_SIZE"]).split("(")[0])
        env.setdefault("MASTER_ADDR", _first_slurm_host(env))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    world_size = int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or world_size)
    env.setdefault("LOCAL_RANK", str(int(env["RANK"]) % local_size))
    return Ranks(int(env["RANK"]), int(env["LOCAL_RANK"]), local_size, world_size)


def _first_slurm_host(env: Any) -> str:
    import subprocess

    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "localhost")
    if "[" not in nodes and "," not in nodes:
        return nodes
    shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return shown.stdout.split()[0]


def join(settings: Settings, ranks: Ranks) -> int:
    """Be one of a launcher's ranks: rank 0 prepares the job, all do it."""
    import torch.distributed as dist

    from gdino_lab.engine import start_distributed

    complaints = device_complaints(settings)
    if settings.hardware.devices != ranks.local_size:
        complaints.append(
            f"hardware.devices={settings.hardware.devices}, but the launcher started {ranks.local_size} process(es) on "
            "this machine; make the two equal"
        )
    if complaints:
        if ranks.rank > 0:
            time.sleep(5)  # the launcher ends all ranks with the first; rank 0 has something to say
            return REFUSED
        raise ConfigurationError(complaints)
    if settings.hardware.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    with defaults_in_environment(patience_of_ranks(settings.train.hang_minutes)):
        start_distributed(settings.hardware.device)
    message: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            message[0] = prepare(settings, ranks.world_size)
        except ConfigurationError as error:
            message[1] = error.complaints
        except BaseException:
            message[1] = ["rank 0 failed before the start; its own message says why"]
            dist.broadcast_object_list(message, src=0)
            raise
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        if ranks.rank == 0:
            raise ConfigurationError(message[1])
        return REFUSED
    return run_rank(message[0], joined=True)


def spawn(job: dict[str, Any], devices: int) -> int:
    """Start the ranks in processes of their own, wait for them, and say how it ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = RunFolder(Path(job["folder"]))
    for launcher in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(launcher).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=folder.path.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        # The others are ours: elastic would end the ranks before they have saved.
        signals_to_handle="SIGQUIT",
    )
    variables = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // devices)),
    }
    variables |= patience_of_ranks(job["settings"]["train"]["hang_minutes"])
    watch = Watch(folder, job["settings"])
    with defaults_in_environment(variables), passing_signals_on() as asked, watch:
        try:
            codes = elastic_launch(config, run_rank)(job)
        except ChildFailedError as error:
            if asked and only_stopped(folder):
                folder.write_status("interrupted", **_ending(INTERRUPTED, folder))
                return INTERRUPTED
            return post_mortem(folder, error, watch.readings(), job)
    return max(codes.values())


def patience_of_ranks(hang_minutes: float) -> dict[str, str]:
    """A rank that waits for another is to wait until the watch has looked at both."""
    return {"DEEPSPEED_TIMEOUT": str(int(hang_minutes) + 10)} if hang_minutes else {}


@contextmanager
def defaults_in_environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for the processes started meanwhile, where the user has set none; the next job may want others."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def passing_signals_on() -> Iterator[list[int]]:
    """Stop signals go to the ranks, which save and end by themselves; a second one kills them. Yields those received."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        again = len(received) > 1
        # The ranks only: their data processes are needed until they have saved.
        for child in psutil.Process().children(recursive=again):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    kept = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def run_rank(job: dict[str, Any], joined: bool = False) -> int:
    """One rank from start to end; returns its exit code, or ends the process with it after a failure."""
    folder = RunFolder(Path(job["folder"]))
    rank = int(os.environ["RANK"])
    stop = StopRequest()
    start_logging(folder, rank)
    heart, oom_kills = Heart(folder, rank), read_oom_kills()
    report = partial(report_failure, folder, job["before"])
    watch = Watch(folder, job["settings"], report) if joined and rank == 0 else nullcontext()
    code = DONE
    try:
        # Late, so that the process that only starts ranks need not load it.
        from gdino_lab import probe, trainer
        from gdino_lab.engine import start_distributed
        from gdino_lab.usage import Phases

        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), job["settings"]))
        if not joined:
            if settings.hardware.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            start_distributed(settings.hardware.device)
        try:
            with watch:
                plan, phases = Plan(**job["plan"]), Phases()
                if probe.wanted(settings):
                    with phases("worst case"):
                        probe.probe(settings, plan, folder, heart.beat)
                trainer.train(settings, plan, folder, job["resume"], stop, heart.beat, phases)
        except trainer.Interrupted:
            code = INTERRUPTED
        if rank == 0:
            folder.write_status(STATE_OF_EXIT[code], **_ending(code, folder))
            folder.give_room()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        code = record_failure(error, folder, rank, job["settings"], oom_kills)
        if joined:
            report()
        # Not raised: the launcher shows the first failure of all ranks, and this traceback only once.
        sys.stdout.flush()
        os._exit(code)
    finally:
        heart.stop()
        stop.restore()
    return code


class StopRequest:
    """Remembers a stop signal until the loop asks."""

    def __init__(self) -> None:
        self.asked = False
        self.kept = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}

    def __call__(self) -> bool:
        return self.asked

    def _remember(self, number: int, frame: Any) -> None:
        self.asked = True

    def restore(self) -> None:
        for number, handler in self.kept.items():
            signal.signal(number, handler)


class Printing(logging.Handler):
    """Prints to whatever stdout is at the time, so that lines pass above a live progress display, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def start_logging(folder: RunFolder, rank: int) -> None:
    """Everything goes to the rank's file; what rank 0 has to say also to train.log and the terminal."""
    line = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = []

    def add(handler: logging.Handler, formatter: logging.Formatter, ours_only: bool) -> None:
        handler.setFormatter(formatter)
        if ours_only:
            handler.addFilter(lambda record: record.name.startswith("gdino_lab") or record.levelno >= logging.ERROR)
        root.addHandler(handler)

    add(logging.FileHandler(folder.rank_log(rank)), line, ours_only=False)
    if rank == 0:
        add(logging.FileHandler(folder.log), line, ours_only=True)
        add(Printing(), logging.Formatter("%(message)s"), ours_only=True)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a line that the disk has no room for is no reason for a traceback
    warnings.simplefilter("default")
    disable_progress_bar()  # transformers' own, for every file it writes
    for noisy in ("DeepSpeed", "torch.distributed", "accelerate", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


# --- after it ended -------------------------------------------------------------------------------------------------


def record_failure(error: BaseException, folder: RunFolder, rank: int, settings: dict[str, Any], oom_kills: int | None) -> int:
    """Leave what went wrong in ranks/rank_N.failure.json; returns the exit code.

    Args:
        oom_kills: read_oom_kills() as it was when the rank began.
    """
    readings = read_all(oom_kills, on_device=settings["hardware"]["device"] == "cuda")
    found = postmortem.diagnose(error, readings, settings)
    folder.give_room()
    log.error("rank %d failed: %s", rank, found.cause)
    told = found.kind in (postmortem.REFUSED, postmortem.UNPROVED, postmortem.DISK)
    write_failure(folder, rank, found, None if told else "".join(traceback.format_exception(error)))
    if found.kind == LOST_PEER:
        time.sleep(2)  # the rank that was lost is to be noticed first
    return exit_code(found.kind)


def write_failure(folder: RunFolder, rank: int, found: postmortem.Diagnosis, trace: str | None, when: float | None = None) -> None:
    write_json(
        folder.rank_failure(rank),
        {"time": when or time.time(), "rank": rank, **found.as_dict(), "traceback": trace},
    )


def exit_code(kind: str) -> int:
    if kind == postmortem.UNPROVED:
        return REFUSED
    return OUT_OF_MEMORY if kind in postmortem.OUT_OF_MEMORY_KINDS else FAILED


def post_mortem(folder: RunFolder, error: Any, readings: Readings, job: dict[str, Any]) -> int:
    """Status and message after a rank died, from what the ranks left or, where it could not, from how it died."""
    first = min(error.failures.values(), key=lambda failure: failure.timestamp)
    folder.give_room()
    if not folder.rank_failure(first.local_rank).exists():
        found = postmortem.diagnose_exit(first.exitcode, first.local_rank, readings, job["settings"])
        write_failure(folder, first.local_rank, found, None, float(first.timestamp))
    return report_failure(folder, job["before"])


def only_stopped(folder: RunFolder) -> bool:
    """After a stop was asked for: whether the ranks that died had nothing else to say. One that had not begun, or that
    a second Ctrl-C killed, could not save; one that failed while saving has a cause of its own to tell."""
    return all(failure["kind"] == LOST_PEER for failure in folder.failures())


def report_failure(folder: RunFolder, before: dict[str, str]) -> int:
    """Write the status of the first failure of all ranks and show its traceback; returns the exit code.

    Args:
        before: what files of the run held before this try; a try that trained nothing leaves them so.
    """
    first = folder.failures()[0]
    code = exit_code(first["kind"])
    if code == REFUSED and before:
        for name, text in before.items():
            write_text(folder.path / name, text)
        folder.forget_failures()
        print(f"gdino-lab: refused, the run is left as it was\n  - {first['cause']}", file=sys.stderr, flush=True)
        return code
    where = f"rank {first['rank']}; details in {folder.rank_log(first['rank'])}"
    cure = first["to_try"].replace(postmortem.THIS_RUN, str(folder.path)) or f"read {folder.log}"
    folder.write_status(
        STATE_OF_EXIT[code], cause=first["cause"], where=where, kind=first["kind"], to_try=cure, figures=first["figures"]
    )
    if first["traceback"]:
        print(first["traceback"], file=sys.stderr)
    print(f"gdino-lab: {first['cause']}\n  where: {where}\n  try: {cure}", file=sys.stderr, flush=True)
    return code


def _ending(code: int, folder: RunFolder) -> dict[str, str]:
    if code != INTERRUPTED:
        return {}
    last = folder.checkpoints / checkpoint_folder.LAST
    return {
        "cause": "asked to stop by a signal",
        "where": str(last) if last.exists() else "before the first checkpoint",
        "to_try": f"train.resume={folder.path}" if last.exists() else "start again, there is nothing to go on from",
    }
