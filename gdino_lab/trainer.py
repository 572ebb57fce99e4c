"""The loop of one rank: instantiate, step, log, evaluate, save. The plan says how often; nothing is derived here."""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hydra.utils import get_object
from torch import Tensor, nn

from gdino_lab import checkpoint, checkpoint_folder
from gdino_lab.checkpoint import Writer
from gdino_lab.data.loading import EpochSampler, loader
from gdino_lab.engine import backward_and_step, build_engine, loss_scale, step_report, whole_weights
from gdino_lab.errors import Unproved
from gdino_lab.meters import GradientWatch, Meter
from gdino_lab.models.average import WeightAverage
from gdino_lab.models.dtypes import telling_clashes
from gdino_lab.models.export import save_model
from gdino_lab.models.not_finite import NotFinite, find_not_finite
from gdino_lab.models.recompute import recompute_activations
from gdino_lab.plan import Plan
from gdino_lab.progress import Progress, format_table
from gdino_lab.proof import SCORE_ELSEWHERE, SCORE_SAME, Digest, differing_answers, differing_score, digest_of, tolerance_of
from gdino_lab.run_folder import RunFolder, read_json, write_json
from gdino_lab.scoring import DTYPES, images_at_once, records_of, to_device
from gdino_lab.settings import Settings, as_dict, instantiate
from gdino_lab.tasks.protocol import Batch, Evaluation, Task
from gdino_lab.usage import Phases, host_peak_bytes, peak_bytes_by_rank

log = logging.getLogger(__name__)

# A gradient that is not finite under this loss scale is not for any.
SMALLEST_SCALE = 2.0**-8
FIXED_SIDE = 512  # of the image whose answers a checkpoint keeps: every weight takes part in them, whatever the size
# Under which a checkpoint keeps the losses since the last line of metrics.jsonl.
METER = "meter"


class Interrupted(Exception):
    """Somebody asked the run to stop; everything is saved."""


@dataclass
class Run:
    """What a rank works with."""

    settings: Settings
    plan: Plan
    folder: RunFolder
    device: torch.device
    task: Task
    evaluation_batches: Any
    engine: Any
    average: WeightAverage | None
    processor: Any
    tuning: Any
    tracker: Any
    stop_asked: Callable[[], bool]
    phases: Phases
    writer: Writer
    meter: Meter
    beat: Callable[..., None] = lambda doing, step=0: None
    """Called with what is being done, and the step, wherever the run goes on."""

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.precision.weights]

    @cached_property
    def fixed_batch(self) -> Batch:
        """The upper left FIXED_SIDE x FIXED_SIDE pixels of the first image that is evaluated, on the CPU: what a checkpoint keeps
        the answers to."""
        batch = self.task.collate([self.task.evaluation_set()[0, 0]])
        cut = {name: batch["inputs"][name][..., :FIXED_SIDE, :FIXED_SIDE] for name in ("pixel_values", "pixel_mask")}
        return batch | {"inputs": batch["inputs"] | cut}

    @cached_property
    def configured(self) -> dict[str, Any]:
        """Plan and settings as a checkpoint holds them."""
        return {"plan": self.plan.as_dict(), "settings": as_dict(self.settings)}

    def averaged(self) -> Any:
        """Inside the block the weights are those to evaluate and keep: the averages, where there are any."""
        return self.average.in_place() if self.average is not None else nullcontext()


@dataclass
class Progressed:
    """How far a run is: what a checkpoint restores besides the engine."""

    step: int = 0
    best_selection: float | None = None
    best_epoch: int | None = None
    best: Evaluation | None = None
    untuned: Evaluation | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    untrained: dict[str, int] = field(default_factory=dict)
    """Modules whose parameters got no gradient in the first step, with the number of tensors."""


def train(
    settings: Settings,
    plan: Plan,
    folder: RunFolder,
    resume: str | None,
    stop_asked: Callable[[], bool],
    beat: Callable[..., None],
    phases: Phases,
) -> None:
    """Train as planned, from the checkpoint folder `resume` if there is one. Every rank calls it, in a process group that is
    up.

    Args:
        beat: see Run.
        phases: seconds of what came before.

    Raises:
        Interrupted: `stop_asked` said so on any rank; `checkpoints/last` holds the state.
        Unproved: the checkpoint's weights do not answer or score as it says.
        NotSaved: a checkpoint could not be written.
    """
    with phases("build"):
        run = build(settings, plan, folder, stop_asked, phases, resumed=resume is not None)
        run.beat = beat
        state = Progressed() if resume is None else go_on(run, Path(resume))
    first_step = state.step
    try:
        if state.untuned is None:
            with phases("evaluate"):
                state.untuned = evaluate(run)
            report_evaluation(run, "untuned", 0, 0, state.untuned)
        if stop_anywhere(run) and state.step < plan.total_steps:
            save(run, state, evaluation=None)
            raise Interrupted
        fit(run, state)
        with phases("save"):
            run.writer.wait()
    except Interrupted:
        run.writer.wait()
        raise
    finally:
        run.writer.linger()
    finish(run, state, images=(state.step - first_step) * plan.effective_batch)


def go_on(run: Run, resume: Path) -> Progressed:
    """Restore what a checkpoint holds, prove it, and forget what came after it."""
    stored = checkpoint.load(run.engine, run.average, resume)
    state = restored(stored)
    best = [checkpoint_folder.best_until(state.step, run.folder.checkpoints)]
    dist.broadcast_object_list(best, src=0)  # a file system may tell each rank another thing
    if best[0] is None and state.step < run.plan.total_steps:
        # It was of a later step, or is not there; what is evaluated from here on counts.
        state.best_selection = state.best_epoch = state.best = None
    with checkpoint_folder.Stored(resume) as tensors:
        run.meter.resume(tensors.own(METER, dist.get_rank()), stored["epoch_losses"], run.device)
    log.info("resumed %s at step %d of %d", resume, state.step, run.plan.total_steps)
    drawn = checkpoint.random_state()
    with run.phases("prove"):
        prove(run, stored)
    checkpoint.restore_random_state(drawn)
    if run.is_main:
        run.folder.rewind(state.step)
    return state


# --- building -------------------------------------------------------------------------------------------------------


def build(
    settings: Settings, plan: Plan, folder: RunFolder, stop_asked: Callable[[], bool], phases: Phases, resumed: bool = False
) -> Run:
    """Instantiate data, model, task, optimizer and engine from the configuration.

    Args:
        resumed: the weights come from a checkpoint, and so not from train.resume_weights.
    """
    device = prepare_device(settings)
    seed_everything(settings.train.seed)
    detector, processor = instantiate(settings.model)
    tuning = instantiate(settings.tuning)
    task = instantiate(settings.task, seed=settings.train.seed)
    task.bind(instantiate(settings.data), processor)

    detector = tuning.prepare(detector)
    if settings.activations.recompute:
        recompute_activations(detector)
    module = task.attach(detector).to(device=device, dtype=DTYPES[settings.precision.weights])
    if settings.train.resume_weights is not None and not resumed:
        checkpoint.load_weights(module, Path(settings.train.resume_weights))
    groups = tuning.groups(module, settings.optimizer["lr"])
    moving = sum(parameter.numel() for group in groups for parameter in group["params"])
    engine = build_engine(module, instantiate(settings.optimizer, params=iter(groups)), settings.schedule.name, plan)
    average = WeightAverage(module, settings.train.ema_decay) if settings.train.ema_decay else None
    writer = Writer(folder.checkpoints, settings.train.keep)
    log.info(
        "parameters: %s trainable of %s",
        f"{moving:,}",
        f"{sum(size(parameter) for parameter in module.parameters()):,}",
    )
    seed_everything(settings.train.seed + 1 + dist.get_rank())  # dropout differs by rank, weights did not
    tracker = start_tracker(settings, folder) if dist.get_rank() == 0 else None
    batches = evaluation_loader(settings, plan, task, device)
    meter = Meter(plan.effective_batch)
    return Run(
        settings, plan, folder, device, task, batches, engine, average, processor, tuning, tracker, stop_asked, phases,
        writer, meter,
    )  # fmt: skip


def prepare_device(settings: Settings) -> torch.device:
    """TF32 and the allocator's cap of this rank's device."""
    hardware = settings.hardware
    if hardware.device == "cpu":
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision.tf32
    device = torch.device("cuda", torch.cuda.current_device())
    if hardware.memory_limit_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, hardware.memory_limit_gib * 2**30 / total), device)
    return device


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def size(parameter: nn.Parameter) -> int:
    """Elements, also of a parameter that ZeRO-3 has partitioned away."""
    return getattr(parameter, "ds_numel", parameter.numel())


def start_tracker(settings: Settings, folder: RunFolder) -> Any:
    if settings.tracker.get("_target_") is None:
        return None
    from accelerate import PartialState

    PartialState(cpu=settings.hardware.device == "cpu")  # accelerate's trackers ask it who is the main process
    named = inspect.signature(get_object(settings.tracker["_target_"])).parameters
    supplied = {"run_name": folder.path.name, "logging_dir": str(folder.path / "tracker")}
    wanted = {name: value for name, value in supplied.items() if name in named and name not in settings.tracker}
    tracker = instantiate(settings.tracker, **wanted)
    tracker.start()
    return tracker


# --- the loop -------------------------------------------------------------------------------------------------------


def fit(run: Run, state: Progressed) -> None:
    """Epochs from wherever `state` is to the last step."""
    plan, train = run.plan, run.settings.train
    dataset = run.task.train_set()
    sampler = EpochSampler(dataset, dist.get_rank(), plan.world_size, train.seed, shuffle=True)
    batches = loader(
        dataset, sampler, plan.micro_batch, train.workers, run.task.collate, run.device.type == "cuda", plan.accumulation
    )
    watch = GradientWatch(run.engine.module) if state.step == 0 else None
    progress = Progress(plan.total_steps, state.step, shown=run.is_main)
    meter = run.meter
    with progress:
        while state.step < plan.total_steps:
            epoch, done = divmod(state.step, plan.steps_per_epoch)
            sampler.set_position(epoch, start=done * plan.accumulation * plan.micro_batch)
            meter.restart(keep=done > 0)
            stopping = False
            with run.phases("train"):
                for terms in steps(run, batches, min(plan.steps_per_epoch - done, plan.total_steps - state.step)):
                    state.step += 1
                    meter.add(terms)
                    if watch is not None:
                        state.untrained = watch.silent_modules()
                        watch = None
                    epoch_ends = state.step % plan.steps_per_epoch == 0 or state.step == plan.total_steps
                    if state.step % train.log_every == 0 or epoch_ends:
                        log_step(run, state, epoch, meter, progress)
                    else:
                        progress.advance(epoch)
                    stopping = stop_anywhere(run)
                    if stopping:
                        break
                    if train.save_every and state.step % train.save_every == 0 and not epoch_ends:
                        save(run, state, evaluation=None)
            if epoch_ends:
                end_epoch(run, state, epoch)
            elif stopping:
                save(run, state, evaluation=None)
            if stopping and state.step < plan.total_steps:
                raise Interrupted


def steps(run: Run, batches: Any, count: int) -> Iterator[dict[str, Tensor]]:
    """`count` optimizer steps; yields each one's loss terms, averaged over its micro-batches."""
    run.engine.train()
    batches = iter(batches)
    for _ in range(count):
        run.beat("read data", this_step(run))
        passes = [next(batches) for _ in range(run.plan.accumulation)]
        run.beat("train", this_step(run))
        per_pass = mean_count(run, passes)
        # With a gradient that overflowed it is taken again under a lower loss scale: every precision sees the same images.
        while (terms := try_step(run, passes, per_pass)) is None:
            pass
        del passes
        if run.average is not None:
            run.average.update()
        yield terms


def this_step(run: Run) -> int:
    """Number of the step being taken; the engine counts those that overflowed too."""
    return run.engine.global_steps - run.engine.skipped_steps + 1


def try_step(run: Run, passes: list[Batch], per_pass: float) -> dict[str, Tensor] | None:
    """One optimizer step's loss terms; None where a gradient overflowed, so that it was not taken and the loss scale is lower.

    Raises:
        NotFinite: a gradient is not, and it is not for the loss scale.
    """
    scale, sums = loss_scale(run.engine), Counter()
    for batch in passes:
        batch = to_device(batch, run.device, run.dtype)
        run.beat("train", this_step(run))
        terms = finite_losses(run, batch, per_pass)
        not_taken = backward_and_step(run.engine, sum(terms.values()), run.writer.before_step)
        for name, term in terms.items():
            sums[name] += term.detach() / run.plan.accumulation
    if not not_taken:
        return dict(sums)
    if scale is None or not SMALLEST_SCALE <= loss_scale(run.engine) < scale:
        identity = str([each for batch in passes for each in batch["identity"]])
        raise NotFinite({"what": "gradient", "step": this_step(run), "terms": [], "inputs": [], "identity": identity})
    return None


def finite_losses(run: Run, batch: Batch, per_pass: float) -> dict[str, Tensor]:
    """The loss terms of one micro-batch, looked at before they can do harm to the weights.

    Raises:
        NotFinite: with the module where it began.
    """
    try:
        with telling_clashes(run.engine.module, lambda: run.engine(**batch["inputs"])):
            outputs = run.engine(**batch["inputs"])
        terms = run.task.losses(outputs, batch, per_pass)
        del outputs
        finite = torch.isfinite(sum(terms.values()).detach())
    except ValueError as error:  # scipy's assignment refuses costs that are no numbers
        if "invalid numeric entries" not in str(error):
            raise
        terms, finite = {}, torch.tensor(False, device=run.device)
    mine = everywhere = bool(finite)
    if run.plan.zero_stage == 3 and run.plan.world_size > 1:  # a forward there needs every rank, so all look together
        vote = finite.float()
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        everywhere = bool(vote)
    if everywhere:
        return terms
    bad = [name for name, term in terms.items() if not math.isfinite(term)]
    terms.clear()  # and with them the activations: a second forward needs their room
    found = where_not_finite(run, batch)
    raise NotFinite({} if mine else {"what": "loss", "step": this_step(run), "terms": bad} | found)


def where_not_finite(run: Run, batch: Batch) -> dict[str, Any]:
    """One more forward of the batch, watched. Collective under ZeRO-3."""
    inputs = [name for name, value in batch["inputs"].items() if not torch.isfinite(value).all()]
    found = find_not_finite(run.engine.module, lambda: run.engine(**batch["inputs"]))
    return {"inputs": inputs, "identity": str(batch["identity"])} | found


def mean_count(run: Run, passes: list[Batch]) -> float:
    """What the loss is a mean of, averaged over all passes of the step, on all ranks; at least one in the whole step."""
    count = sum(run.task.count(batch) for batch in passes)
    if run.plan.world_size > 1:
        total = torch.tensor(float(count), device=run.device)
        dist.all_reduce(total)
        count = total.item()
    return max(count, 1) / (len(passes) * run.plan.world_size)


def stop_anywhere(run: Run) -> bool:
    """Whether any rank was asked to stop. All ranks must agree, or one would wait for the others for ever."""
    asked = run.stop_asked()
    if run.plan.world_size == 1:
        return asked
    vote = torch.tensor([float(asked)], device=run.device)
    dist.all_reduce(vote)
    return bool(vote.item())


def end_epoch(run: Run, state: Progressed, epoch: int) -> None:
    """Evaluate, keep the best, save, and say it in a line."""
    export = None
    with run.averaged():
        with run.phases("evaluate"):
            evaluation = evaluate(run)
        better = evaluation.selection is not None and (
            state.best_selection is None or evaluation.selection > state.best_selection
        )
        if better or state.best is None:
            state.best_selection, state.best_epoch, state.best = evaluation.selection, epoch + 1, evaluation
            better = True
            with run.phases("save"):
                weights = whole_weights(run.engine)
            if run.is_main:
                export = partial(
                    save_model, run.folder.model, run.engine.module, weights, run.tuning, run.processor, run.task.knowledge()
                )
    save(run, state, evaluation, best=better, also=export)
    report_evaluation(run, "epoch", epoch + 1, state.step, evaluation, best=better)
    log.info(
        "Epoch %d/%d | loss %.4f | %s%s",
        epoch + 1, run.plan.epochs, run.meter.epoch_loss(), run.task.epoch_line(evaluation), " | ★ best" if better else "",
    )  # fmt: skip


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(
    run: Run, state: Progressed, evaluation: Evaluation | None, best: bool = False, also: Callable[[], None] | None = None
) -> None:
    """Begin to write a checkpoint.

    Args:
        evaluation: of the weights as they are; None between evaluations.
    """
    run.beat("save", state.step)
    with run.phases("save"):
        trainer_state = {
            "progressed": asdict(state),
            "epoch_losses": run.meter.epoch,
            "score": evaluation and evaluation.selection,
            **run.configured,
        }
        own = {METER: run.meter.pending()}
        run.writer.save(run.engine, run.average, state.step, trainer_state, lambda: digest(run), own, best, also)


def digest(run: Run) -> Digest:
    """What the model answers to the fixed image. Collective under ZeRO-3."""
    batch = to_device(run.fixed_batch, run.device, run.dtype)
    training = run.engine.module.training
    run.engine.eval()
    with torch.no_grad():
        outputs = run.engine(**batch["inputs"])
    run.engine.train(training)
    return digest_of(outputs)


def prove(run: Run, stored: dict[str, Any]) -> None:
    """Before the first step: the answers to a fixed image, and the validation score where there is one, are those the
    checkpoint says.

    Raises:
        Unproved: they differ by more than rounding explains, and train.resume_check is strict.
    """
    check, answers, then = run.settings.train.resume_check, stored["answers"], stored["score"]
    if check == "off":
        return
    now, complaints = as_dict(run.settings), []
    if answers is not None:
        complaints += differing_answers(answers, digest(run), tolerance_of(stored["settings"]["precision"], now["precision"]))
    if then is not None:
        with run.averaged():
            score = evaluate(run).selection
        elsewhere = any(stored["settings"][node] != now[node] for node in ("hardware", "zero", "offload", "precision"))
        complaints += differing_score(then, score, SCORE_ELSEWHERE if elsewhere else SCORE_SAME)
    if complaints and check == "strict":
        advice = "train.resume_check=warn goes on all the same, train.resume_weights=DIR takes the weights only"
        raise Unproved([f"train.resume: {complaint}; {advice}" for complaint in complaints])
    for complaint in complaints:
        log.warning("train.resume: %s", complaint)
    if answers is None:
        log.warning("train.resume: the run died in the step after this checkpoint, which so has no outputs to compare with")
    elif not complaints:
        log.info("proved: outputs%s as in the checkpoint", "" if then is None else f" and score {then:.4g}")


def restored(stored: dict[str, Any]) -> Progressed:
    """The inverse of `asdict` in `save`."""
    state = Progressed(**stored["progressed"])
    for name in ("best", "untuned"):
        if (found := getattr(state, name)) is not None:
            setattr(state, name, Evaluation(**found))
    return state


def finish(run: Run, state: Progressed, images: int) -> None:
    """The summary, for programs and for people."""
    peaks = peak_bytes_by_rank(run.device)
    host = host_peak_bytes()
    run.beat("finish", state.step)
    if not run.is_main:
        return
    with run.phases("baselines"):
        rows = {"tuned": state.best, "untuned": state.untuned} | run.task.baselines()
    tables = run.task.tables(rows)
    trained = run.phases.seconds["train"]
    write_json(
        run.folder.summary,
        {
            "steps": state.step,
            "best_epoch": state.best_epoch,
            "selection": {"name": run.task.selection_name, "value": state.best_selection},
            "headlines": run.task.headlines(state.best),
            "metrics": state.best.metrics,
            "untuned": state.untuned.metrics,
            "baselines": {name: rows[name].metrics for name in rows if name not in ("tuned", "untuned")},
            "tables": [asdict(table) for table in tables],
            "images_per_s": round(images / trained, 3) if trained else None,
            "loss": {"first": state.first_loss, "last": state.last_loss},
            "untrained": state.untrained,
            "peak_bytes": peaks,
            "predicted_peak_bytes": (read_json(run.folder.plan)["predicted"] or {}).get("peak"),
            "host_peak_bytes": host,
            "skipped_steps": int(run.engine.skipped_steps),
            "seconds": {name: round(seconds, 3) for name, seconds in run.phases.seconds.items()},
        },
    )
    if run.tracker is not None:
        run.tracker.finish()
    log.info("%s", "\n".join(format_table(table) for table in tables))


# --- evaluating -----------------------------------------------------------------------------------------------------


def evaluation_loader(settings: Settings, plan: Plan, task: Task, device: torch.device) -> Any:
    """Batches of this rank's share of the evaluation set, the same in every epoch."""
    dataset = task.evaluation_set()
    sampler = EpochSampler(dataset, dist.get_rank(), plan.world_size, seed=0, shuffle=False)
    return loader(dataset, sampler, images_at_once(settings), settings.train.workers, task.collate, device.type == "cuda")


def evaluate(run: Run) -> Evaluation:
    """Every sample of the evaluation set once, shared among the ranks, scored by the task on each rank alike."""
    run.engine.eval()
    records = records_of(run.engine, run.task, beating(run, run.evaluation_batches), run.device, run.dtype)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # training cuts memory into other pieces: under a tight limit those of before are in its way
    shares: list[list] = [records]
    if run.plan.world_size > 1:  # alone, gloo's copy of a large message would leave OpenMP at half speed for good
        shares = [[] for _ in range(run.plan.world_size)]
        dist.all_gather_object(shares, records)
    # The sampler repeats samples until the ranks have equally many; each counts once.
    once = {record["index"]: record for share in shares for record in share}
    try:
        return run.task.evaluate([once[index] for index in sorted(once)])
    except ValueError as error:  # scikit-learn refuses what is no number
        if "contains NaN" not in str(error) and "contains infinity" not in str(error):
            raise
        found = where_not_finite(run, to_device(next(iter(run.evaluation_batches)), run.device, run.dtype))
        raise NotFinite({"what": "evaluation", "step": this_step(run) - 1, "terms": []} | found) from None


def beating(run: Run, batches: Any) -> Iterator[Batch]:
    for batch in batches:
        run.beat("evaluate", this_step(run) - 1)
        yield batch


# --- saying what happened -------------------------------------------------------------------------------------------


def log_step(run: Run, state: Progressed, epoch: int, meter: Meter, progress: Progress) -> None:
    row = meter.read() | step_report(run.engine)
    state.first_loss = row["loss"] if state.first_loss is None else state.first_loss
    state.last_loss = row["loss"]
    memory = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else host_peak_bytes()
    row["memory_gib"] = memory / 2**30
    progress.advance(epoch, row)
    if run.is_main:
        run.folder.append_metrics({"kind": "step", "step": state.step, "epoch": epoch + 1, **row})
        if run.tracker is not None:
            run.tracker.log(row, step=state.step)


def report_evaluation(
    run: Run, kind: str, epoch: int, step: int, evaluation: Evaluation, best: bool = False
) -> None:
    if not run.is_main:
        return
    run.folder.append_metrics({"kind": kind, "step": step, "epoch": epoch, "best": best, **evaluation.metrics})
    if run.tracker is not None:
        known = {name: value for name, value in evaluation.metrics.items() if value is not None}
        run.tracker.log(known, step=step)
