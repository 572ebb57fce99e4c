"""Settings -> Plan: every number of a run that follows from others, derived here and nowhere else.

Pure: no files, no processes, no GPU. The ranks obey the plan; the user sees it before step 1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gdino_lab.errors import ConfigurationError
from gdino_lab.settings import Settings

# Bytes of one element in a gradient reduction. Under autocast the weights, and so the gradients, stay fp32.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Plan:
    """What a run will do, in numbers."""

    world_size: int
    micro_batch: int
    accumulation: int
    effective_batch: int
    train_images: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    schedule_steps: int
    """Over which the learning rate follows its schedule; the last one stays for any steps beyond."""
    warmup_steps: int
    zero_stage: int
    deepspeed: dict[str, Any]
    origin: dict[str, str]
    """Where each derived number came from, in words."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: one line a number, with its origin."""
        return [f"{name} = {getattr(self, name)}  ({why})" for name, why in self.origin.items()]


def make_plan(settings: Settings, train_images: int, world_size: int, schedule_steps: int | None = None) -> Plan:
    """Derive the plan.

    Args:
        train_images: images in the training split.
        world_size: ranks over all machines.
        schedule_steps: of an earlier plan whose schedule stays as written.

    Raises:
        ConfigurationError: the batches do not divide, or the training split is smaller than one of them.
    """
    train = settings.train
    per_pass = train.micro_batch * world_size
    if train.effective_batch % per_pass:
        lower, upper = train.effective_batch // per_pass * per_pass, -(-train.effective_batch // per_pass) * per_pass
        near = f"{lower} or {upper}" if lower else str(upper)
        raise ConfigurationError(
            f"train.effective_batch={train.effective_batch} is not a multiple of train.micro_batch={train.micro_batch} "
            f"x {world_size} rank(s) = {per_pass}; the nearest that is: {near}"
        )
    if train_images < train.effective_batch:
        raise ConfigurationError(
            f"train.effective_batch={train.effective_batch} is more than the {train_images} training images there are"
        )
    accumulation = train.effective_batch // per_pass
    steps_per_epoch = train_images // train.effective_batch
    scheduled = train.epochs * steps_per_epoch
    total_steps = min(scheduled, train.max_steps or scheduled)
    schedule_steps = schedule_steps or total_steps
    return Plan(
        world_size=world_size,
        micro_batch=train.micro_batch,
        accumulation=accumulation,
        effective_batch=train.effective_batch,
        train_images=train_images,
        steps_per_epoch=steps_per_epoch,
        epochs=math.ceil(total_steps / steps_per_epoch),
        total_steps=total_steps,
        schedule_steps=schedule_steps,
        warmup_steps=round(schedule_steps * settings.schedule.warmup_fraction),
        zero_stage=zero_stage(settings),
        deepspeed=deepspeed_config(settings, accumulation, world_size),
        origin={
            "accumulation": f"effective batch {train.effective_batch} / (micro-batch {train.micro_batch} x {world_size} rank(s))",
            "steps_per_epoch": f"{train_images} training images / effective batch {train.effective_batch}, rest left out",
            "total_steps": f"{train.epochs} epochs x {steps_per_epoch} steps"
            + (f", cut by train.max_steps={train.max_steps}" if total_steps < scheduled else ""),
            "warmup_steps": f"schedule.warmup_fraction {settings.schedule.warmup_fraction} x {schedule_steps} steps",
            "zero_stage": f"zero.stage {settings.zero.stage}"
            + (", which trains half-precision weights wrongly; ZeRO-1 takes the same steps" if corrected(settings) else ""),
        },
    )


def corrected(settings: Settings) -> bool:
    """Whether DeepSpeed 0.19 would train wrongly at stage 0: with bf16 weights it takes a phantom first step, with fp16
    weights it divides unscaled gradients by the loss scale."""
    return settings.zero.stage == 0 and settings.precision.weights != "fp32"


def zero_stage(settings: Settings) -> int:
    return 1 if corrected(settings) else settings.zero.stage


def bucket_elements(settings: Settings) -> int:
    return max(1, int(settings.bucket.megabytes * 1e6 / BYTES[settings.precision.weights]))


def deepspeed_config(settings: Settings, accumulation: int, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own configuration, as plain types.

    Bucket sizes are elements there and megabytes here, and always set: DeepSpeed's default of 5e8 elements is larger
    than this whole model.
    """
    train, precision, offload, stage = settings.train, settings.precision, settings.offload, zero_stage(settings)
    elements = bucket_elements(settings)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": train.micro_batch * accumulation * world_size,
        "gradient_clipping": float(train.clip_norm),
        "steps_per_print": 10**9,  # the trainer logs
        # torch's fused AdamW steps on CPU as fast as DeepSpeed's own, which takes a minute to compile.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    if stage > 0:
        config["zero_optimization"] |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": elements,
            # At 1e9, the default, every gathered parameter of this model would stay alive.
            "stage3_max_live_parameters": 10 * elements,
            "stage3_max_reuse_distance": 10 * elements,
            # 0: with persistent parameters a resumed bf16-autocast run drifts.
            "stage3_param_persistence_threshold": 0,
        }
    if offload.optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": _pins(settings)}
    if offload.parameters:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": _pins(settings)}
    if precision.weights == "bf16":
        config["bf16"] = {"enabled": True}
    if precision.weights == "fp16":
        # hysteresis 1: each overflow lowers the scale, or the step would be taken again under the same.
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 1}
    if precision.autocast:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision.autocast]
        config["torch_autocast"] = {"enabled": True, "dtype": dtype}
    return config


def _pins(settings: Settings) -> bool:
    return settings.offload.pin_memory and settings.hardware.device == "cuda"
