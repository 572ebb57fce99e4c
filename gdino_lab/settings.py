"""The typed schema of the project's own settings, and every check of one setting against another.

Defaults have one home, the YAML files in conf/; a field here says the type, the unit and what is allowed. Nodes with
a `_target_` (task, data, model, tuning, optimizer, tracker) are checked against the target's real signature instead.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from gdino_lab.errors import ConfigurationError, nearest

# What a `_target_` may name: a configuration file is data, not a way to run just any function.
ALLOWED_TARGETS = ("gdino_lab.", "torch.optim.", "accelerate.tracking.")
DTYPES = ("fp32", "bf16", "fp16")
# Arguments the trainer itself adds to a node, so that the YAML need not hold them.
SUPPLIED = {
    "task": {"seed"},
    "optimizer": {"params"},
    "tracker": {"run_name", "logging_dir", "experiment_name"},
}


@dataclass
class Hardware:
    device: str = MISSING
    """"cpu" or "cuda"."""
    devices: int = MISSING
    """Ranks a machine, one a device."""
    memory_gib: float | None = MISSING
    """Memory of one device, GiB; null where unknown."""
    memory_limit_gib: float | None = MISSING
    """What each rank's CUDA allocator may take, GiB; null: no cap."""


@dataclass
class Zero:
    stage: int = MISSING
    """DeepSpeed's ZeRO stage, 0 to 3."""


@dataclass
class Offload:
    optimizer: bool = MISSING
    """Optimizer states and fp32 masters in host memory."""
    parameters: bool = MISSING
    """Parameters in host memory; ZeRO-3 only."""
    pin_memory: bool = MISSING
    """Page-locked host buffers: faster copies, memory the system cannot reclaim."""


@dataclass
class Bucket:
    megabytes: float = MISSING
    """Largest message of a gradient reduction, 10^6 bytes of the communication dtype."""


@dataclass
class Precision:
    weights: str = MISSING
    """fp32, bf16 or fp16: dtype of the model's weights and gradients."""
    autocast: str | None = MISSING
    """bf16, fp16 or null: dtype of the operations under torch autocast."""
    tf32: bool = MISSING
    """TF32 tensor cores for fp32 matrix products and convolutions."""


@dataclass
class Activations:
    recompute: bool = MISSING
    """Compute layers again in backward instead of keeping their activations."""


@dataclass
class Schedule:
    name: str = MISSING
    """A scheduler of transformers.get_scheduler that needs nothing but the two step counts."""
    warmup_fraction: float = MISSING
    """Share of the optimizer steps that warm up, 0 to 1."""


@dataclass
class Train:
    epochs: int = MISSING
    max_steps: int | None = MISSING
    """Optimizer steps, if fewer than the epochs have."""
    micro_batch: int = MISSING
    """Images a rank and forward pass."""
    effective_batch: int = MISSING
    """Images an optimizer step, over all ranks."""
    seed: int = MISSING
    resume: str = MISSING
    """auto, none, a run folder or a checkpoint folder."""
    resume_check: str = MISSING
    """strict, warn or off: whether a resumed run first proves that it scores and answers as the checkpoint says."""
    resume_allow: list[str] = MISSING
    """Keys that may differ from the checkpoint's although they change what is trained."""
    resume_schedule: str = MISSING
    """Of a run that is to take more steps than planned: stretch (as if asked for from the start) or as_written."""
    resume_weights: str | None = MISSING
    """A run or checkpoint folder whose weights, and nothing else, a fresh run starts from."""
    save_every: int | None = MISSING
    """Optimizer steps between two checkpoints, besides the one at each epoch's end."""
    keep: int = MISSING
    """Checkpoints that stay: the newest so many, and `best`."""
    workers: int = MISSING
    """Data processes a rank."""
    log_every: int = MISSING
    """Optimizer steps between two lines of metrics.jsonl."""
    hang_minutes: float = MISSING
    """Minutes without progress of a rank after which the run is ended; 0: never."""
    clip_norm: float = MISSING
    """Largest gradient norm; 0 turns clipping off."""
    probe: str = MISSING
    """auto, true or false: whether the largest batch the data holds goes first, on a copy that is thrown away; auto: on
    a GPU, whose memory it is about."""
    ema_decay: float = MISSING
    """Decay a step of the moving average of the weights that is evaluated and kept; 0 turns it off."""


@dataclass
class PlanOutput:
    format: str = MISSING
    """How `plan` prints: table or json."""


@dataclass
class Rung:
    name: str = MISSING
    """Of its row and its folder."""
    overrides: list[str] = field(default_factory=list)
    """What it changes, as on the command line."""


@dataclass
class Ladder:
    rungs: list[Rung] = field(default_factory=list)
    """In the order in which they are tried."""


@dataclass
class Settings:
    task: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    activations: Activations = field(default_factory=Activations)
    zero: Zero = field(default_factory=Zero)
    offload: Offload = field(default_factory=Offload)
    bucket: Bucket = field(default_factory=Bucket)
    hardware: Hardware = field(default_factory=Hardware)
    train: Train = field(default_factory=Train)
    ladder: Ladder = field(default_factory=Ladder)
    run_dir: str | None = None
    out: str | None = None
    plan: PlanOutput = field(default_factory=PlanOutput)
    run: str | None = None
    """A finished run's folder, for `eval`, `export`, `predict` and `blend`."""
    checkpoint: str | None = None
    """Which of the run's checkpoints `export` reads: best, last, the name of one, or a folder; null: best."""
    average: bool = True
    """Whether `export` takes the moving average of the weights where the checkpoint has one."""
    adapter: bool = False
    """Whether `export` writes the low-rank adapters alone, for peft, instead of merging them."""
    split: str | None = None
    images: str | None = None
    """One image, a folder or a glob."""
    threshold: float = MISSING
    """Score from which a box is drawn."""
    alpha: list[float] = MISSING
    """Shares of the tuned weights in a blend with the start's."""


ConfigStore.instance().store(name="settings", node=Settings)

# What a run's config.yaml says to Hydra itself.
RUN_HEADER = {
    "defaults": ["settings", "_self_", {"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}],
    "hydra": {"run": {"dir": "."}, "output_subdir": None, "job": {"name": "gdino-lab", "chdir": False}},
}

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
TARGET_NODES = ("task", "data", "model", "tuning", "optimizer", "tracker")


def load(config: DictConfig) -> Settings:
    """The composed configuration as checked Settings.

    Raises:
        ConfigurationError: with every complaint there is, each naming its key and what is allowed.
    """
    if added := added_keys(config):
        raise ConfigurationError([no_such_key(key) for key in added])
    settings = OmegaConf.to_object(config)
    complaints = [complaint for node in TARGET_NODES for complaint in check_target(node, getattr(settings, node))]
    complaints += _check_ranges(settings) + _check_combinations(settings)
    if complaints:
        raise ConfigurationError(complaints)
    return settings


def as_dict(settings: Settings) -> dict[str, Any]:
    """Plain nested dicts, as written to config.yaml and handed to the ranks."""
    return OmegaConf.to_container(OmegaConf.structured(settings), resolve=True)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts by dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def instantiate(node: dict[str, Any], **supplied: Any) -> Any:
    """The object a `_target_` node describes; nested values reach it as plain dicts and lists."""
    return hydra_instantiate(node, _convert_="all", **supplied)


def choices_of(settings: Settings) -> dict[str, str]:
    """Short names of task and data, for the run folder: the last module of each target."""
    return {
        "task": settings.task["_target_"].split(".")[-2],
        "data": settings.data["_target_"].split(".")[-1],
    }


def check_target(node: str, value: dict[str, Any]) -> list[str]:
    """Complaints about a `_target_` node: an existing, allowed target, called with arguments it has."""
    target = value.get("_target_")
    if node == "tracker" and target is None:
        return []
    if not isinstance(target, str):
        return [f"{node}._target_ is missing"]
    if not target.startswith(ALLOWED_TARGETS):
        return [f"{node}._target_={target}: allowed are names below {', '.join(ALLOWED_TARGETS)}"]
    if nested := [key for key in flat(value) if key.split(".")[-1] == "_target_" and key != "_target_"]:
        return [f"{node}.{key}: allowed is {node}._target_ alone" for key in nested]
    try:
        found = get_object(target)
        parameters = inspect.signature(found).parameters
    except (ImportError, AttributeError, ValueError) as error:
        return [f"{node}._target_={target}: cannot be found ({str(error).splitlines()[0]})"]
    if not f"{getattr(found, '__module__', None)}.".startswith(ALLOWED_TARGETS):  # what one of those merely imports
        return [f"{node}._target_={target}: allowed are names below {', '.join(ALLOWED_TARGETS)}, and this is another's"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    given = {key for key in value if not (key.startswith("_") and key.endswith("_"))}
    supplied = SUPPLIED.get(node, set())
    complaints = [
        f"{node}.{key}: {target} has no such argument; it has {', '.join(parameters)}.{nearest(key, parameters)}"
        for key in sorted(given - set(parameters))
    ]
    complaints += [
        f"{node}.{name} is missing: {target} needs it"
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in given | supplied
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    return complaints


def _check_ranges(settings: Settings) -> list[str]:
    train, complaints = settings.train, []

    def at_least(key: str, value: float | None, low: float) -> None:
        if value is not None and value < low:
            complaints.append(f"{key}={value}: allowed is {low} or more")

    def one_of(key: str, value: Any, allowed: tuple) -> None:
        if value not in allowed:
            names = [str(each) for each in allowed]
            complaints.append(f"{key}={value}: allowed are {', '.join(names)}.{nearest(str(value), names)}")

    at_least("train.epochs", train.epochs, 1)
    at_least("train.max_steps", train.max_steps, 1)
    at_least("train.micro_batch", train.micro_batch, 1)
    at_least("train.effective_batch", train.effective_batch, 1)
    at_least("train.workers", train.workers, 0)
    at_least("train.log_every", train.log_every, 1)
    at_least("train.hang_minutes", train.hang_minutes, 0)
    at_least("train.clip_norm", train.clip_norm, 0)
    at_least("train.seed", train.seed, 0)
    at_least("train.keep", train.keep, 1)
    at_least("train.save_every", train.save_every, 1)
    if not 0 <= train.ema_decay < 1:
        complaints.append(f"train.ema_decay={train.ema_decay}: allowed is 0 up to, not including, 1")
    at_least("hardware.devices", settings.hardware.devices, 1)
    for key in ("memory_gib", "memory_limit_gib"):
        if (value := getattr(settings.hardware, key)) is not None and value <= 0:
            complaints.append(f"hardware.{key}={value}: allowed is a number above 0, or null")
    if settings.bucket.megabytes <= 0:
        complaints.append(f"bucket.megabytes={settings.bucket.megabytes}: allowed is a number above 0")
    if not 0 <= settings.schedule.warmup_fraction <= 1:
        complaints.append(f"schedule.warmup_fraction={settings.schedule.warmup_fraction}: allowed is 0 to 1")
    learning_rate = settings.optimizer.get("lr", 0)
    if not isinstance(learning_rate, (int, float)) or learning_rate < 0:
        complaints.append(f"optimizer.lr={learning_rate}: allowed is a number of 0 or more")
    one_of("zero.stage", settings.zero.stage, (0, 1, 2, 3))
    one_of("hardware.device", settings.hardware.device, ("cpu", "cuda"))
    one_of("precision.weights", settings.precision.weights, DTYPES)
    one_of("precision.autocast", settings.precision.autocast, (None, "bf16", "fp16"))
    one_of("train.probe", settings.train.probe.lower(), ("auto", "true", "false"))
    one_of("train.resume_check", train.resume_check, ("strict", "warn", "off"))
    one_of("train.resume_schedule", train.resume_schedule, ("stretch", "as_written"))
    one_of("schedule.name", settings.schedule.name, SCHEDULES)
    one_of("plan.format", settings.plan.format, ("table", "json"))
    return complaints


def _check_combinations(settings: Settings) -> list[str]:
    complaints = []
    precision, zero, offload, device = settings.precision, settings.zero, settings.offload, settings.hardware.device
    if offload.parameters and zero.stage != 3:
        complaints.append(
            f"offload.parameters=true with zero.stage={zero.stage}: only ZeRO-3 can offload parameters; "
            "use zero=stage3, or offload=optimizer"
        )
    if offload.optimizer and zero.stage == 0:
        complaints.append(
            "offload.optimizer=true with zero.stage=0: DeepSpeed accepts this and does nothing; "
            "use zero=stage1 or higher, or offload=none"
        )
    if precision.weights != "fp32" and precision.autocast:
        complaints.append(
            f"precision.weights={precision.weights} with precision.autocast={precision.autocast}: "
            "autocast is for fp32 weights"
        )
    if settings.activations.recompute and zero.stage == 3 and settings.tuning.get("_target_", "").endswith(".Lora"):
        complaints.append(
            "activations=recompute with zero.stage=3 and tuning=lora: DeepSpeed does not gather the frozen parameters "
            "again in backward; use activations=keep, zero=stage2, or tuning=full"
        )
    if device == "cpu" and "fp16" in (precision.weights, precision.autocast):
        complaints.append(
            "precision=fp16 on hardware.device=cpu: DeepSpeed has no fp16 there; use precision=fp32 or bf16_autocast"
        )
    if device == "cpu" and precision.tf32:
        complaints.append("precision=tf32 on hardware.device=cpu: TF32 is a mode of NVIDIA GPUs; use precision=fp32")
    resume, weights = settings.train.resume, settings.train.resume_weights
    if resume not in ("none", "auto") and not Path(resume).is_dir():
        complaints.append(f"train.resume={resume}: no such folder; allowed are none, auto, a run or checkpoint folder")
    if weights is not None and resume == "none" and not Path(weights).is_dir():
        complaints.append(f"train.resume_weights={weights}: no such folder; allowed is a run or checkpoint folder")
    return complaints


def no_such_key(key: str) -> str:
    others = [known for known in known_keys() if not key.startswith(f"{known}.")]
    hint = nearest(key, others) or " `gdino-lab train --cfg job` shows the keys there are."
    return f"{key}: no such key.{hint}"


def added_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Keys that the schema does not have, let in by `+key=value`; nothing would read them."""
    schema = OmegaConf.get_type(config)
    found = []
    for name in config:
        if is_dataclass(schema) and name not in {each.name for each in fields(schema)}:
            found.append(f"{prefix}{name}")
        elif OmegaConf.is_dict(config._get_node(name)):
            found += added_keys(config[name], f"{prefix}{name}.")
    return found


def known_keys() -> list[str]:
    """Every dotted key of the schema, for 'did you mean'."""
    keys = []
    for outer in fields(Settings):
        keys.append(outer.name)
        if hasattr(outer.default_factory, "__dataclass_fields__"):
            keys += [f"{outer.name}.{inner.name}" for inner in fields(outer.default_factory)]
    return keys
