"""The only file that talks to DeepSpeed about training: build the engine, take a step, read what it knows.

It also holds the corrections of what DeepSpeed 0.19 gets wrong, each beside the reason for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from gdino_lab.plan import Plan

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def start_distributed(device: str) -> None:
    """Join the process group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # It would serve inference only, leaves 69 MB a rank in /dev/shm, and every rank compiles it at once.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=BACKENDS[device], auto_mpi_discovery=False, verbose=False)


def build_engine(module: nn.Module, optimizer: torch.optim.Optimizer, schedule_name: str, plan: Plan) -> Any:
    """The DeepSpeed engine around `module`, as the plan says. Collective: every rank calls it."""
    import deepspeed

    scheduler = get_scheduler(
        schedule_name, optimizer, num_warmup_steps=plan.warmup_steps, num_training_steps=plan.schedule_steps
    )
    # Beyond its end a cosine would rise again.
    scheduler.lr_lambdas = [
        lambda step, rate=rate: rate(min(step, plan.schedule_steps)) for rate in scheduler.lr_lambdas
    ]
    scalars = give_scalars_a_dimension(module)
    forget_other_engines()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=plan.deepspeed,
        dist_init_required=False,
    )
    engine.scalars = scalars
    scaler = _partitioned_autocast_scaler(engine)
    if scaler is not None and engine.zero_use_cpu_optimizer():
        # With gradients on the CPU torch would copy a GPU's scale there without waiting for it, and unscale by what it finds.
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return engine


def forget_other_engines() -> None:
    """What DeepSpeed keeps in the process for good would change the next engine's steps: after fp16 autocast it would get that
    loss scaler too, in any precision, and after ZeRO-3 compute its linear layers in two roundings."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    nn.functional.linear = getattr(Patched, "linear_bk", nn.functional.linear)


def give_scalars_a_dimension(module: nn.Module) -> set[str]:
    """DeepSpeed can neither broadcast nor clip parameters without a dimension (MM Grounding DINO's class biases), so
    they get one for the run; returns their names, for `whole_weights` to take it away again."""
    names = {name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.dim() == 0}
    for parameter in module.parameters():
        if parameter.dim() == 0:
            parameter.data = parameter.data.view(1)
    return names


def discard(engine: Any) -> None:
    """End an engine so that the next one finds its memory: DeepSpeed keeps a ZeRO-3 engine alive for ever, so what is
    large is taken from it."""
    from deepspeed.runtime.zero import parameter_offload

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    engine.basic_optimizer.state.clear()
    engine.basic_optimizer.param_groups.clear()
    if engine.zero_optimization_stage() == 3:
        for parameter in engine.module.parameters():
            parameter.__dict__.clear()  # its partition, among others
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        engine.optimizer.parameter_offload.__dict__.clear()
        engine.optimizer.__dict__.clear()


def backward_and_step(engine: Any, loss: Tensor, before_step: Callable[[], None] = lambda: None) -> bool:
    """Backward of one micro-batch and, at the end of an accumulation, the optimizer's step.

    Args:
        before_step: called between the two, when all has been asked of a GPU that is not done yet.

    Returns:
        Whether the step was not taken, for a gradient that is not finite; the loss scale, where there is one, is lower then.
    """
    engine.backward(loss)
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return False
    before_step()
    if engine.device.type == "cuda" and engine.zero_use_cpu_optimizer():
        torch.cuda.synchronize(engine.device)  # gradients are copied to the host without waiting, and read there next
    before, scaler = engine.skipped_steps, autocast_scaler(engine)
    if scaler is None:
        engine.step()
    elif _partitioned_autocast_scaler(engine) is not None:
        # DeepSpeed clips the *scaled* gradients of fp16 autocast and never lowers the scale after an overflow.
        engine.optimizer.clip_grad = engine.gradient_clipping() * scaler.get_scale()
        engine.step()
        if engine.optimizer.overflow:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
    else:
        # At stage 0 it neither counts a skipped step nor keeps the schedule from going on.
        scale, schedule, engine.lr_scheduler = scaler.get_scale(), engine.lr_scheduler, None
        engine.step()
        engine.lr_scheduler = schedule
        if scaler.get_scale() < scale:
            engine.skipped_steps += 1
        else:
            schedule.step()
    return engine.skipped_steps > before


def _partitioned_autocast_scaler(engine: Any) -> Any:
    """The loss scaler of fp16 autocast under ZeRO, or None."""
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def autocast_scaler(engine: Any) -> Any:
    """The loss scaler of fp16 autocast at any stage, which DeepSpeed's own checkpoints leave out; None where there is none."""
    return _partitioned_autocast_scaler(engine) or getattr(engine, "torch_autocast_z0_gradscaler", None)


def set_autocast_scale(engine: Any, scale: float) -> None:
    """Start fp16 autocast from this loss scale, where there is one."""
    scaler = autocast_scaler(engine)
    if scaler is not None:
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(engine.device)  # update() wants a scale to be there
        scaler.update(scale)


def loss_scale(engine: Any) -> float | None:
    """What gradients are multiplied by to fit into fp16; None in other precisions."""
    if (scaler := autocast_scaler(engine)) is not None:
        return scaler.get_scale()
    return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None


def step_report(engine: Any) -> dict[str, float]:
    """lr, skipped_steps and, where known, grad_norm and loss_scale after the last step."""
    report = {"lr": float(engine.get_lr()[0]), "skipped_steps": int(engine.skipped_steps)}
    norm, scale = engine.get_global_grad_norm(), loss_scale(engine)
    if norm is not None:
        report["grad_norm"] = float(norm) / (scale if _partitioned_autocast_scaler(engine) else 1.0)
    if scale is not None:
        report["loss_scale"] = scale
    return report


def whole_weights(engine: Any) -> dict[str, Tensor] | None:
    """All weights of the module on the CPU, gathered over the ranks; None on ranks other than 0. Collective."""
    if engine.zero_optimization_stage() == 3:
        weights = engine._zero3_consolidated_16bit_state_dict()
    else:
        weights = engine.module.state_dict()
    if engine.global_rank != 0:
        return None
    return {
        name: weight.detach().to("cpu", copy=True).view(() if name in engine.scalars else weight.shape)
        for name, weight in weights.items()
    }
