"""An engine's state, parameter by parameter: which run of whose elements this rank holds, at any ZeRO stage.

DeepSpeed keeps fp32 weights and optimizer states in flat tensors whose layout follows from stage, rank count and precision.
Told by parameter name and position they can be put back under any other layout, and need no pickle to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gdino_lab.engine import autocast_scaler
from gdino_lab.models.average import WeightAverage, stored

# What a piece is of: the weight itself (fp32 wherever there is such a copy), its moving average, or one of the optimizer's
# states, elementwise (Adam's moments) or one number for the whole parameter (its step).
WEIGHT, AVERAGE, STATE, SCALAR = "weight", "average", "state/", "scalar/"


class Piece(NamedTuple):
    """Elements `start` to `start + values.numel()` of a flattened parameter.

    values: 1-D, a view into the engine's own memory.
    mine: whether this rank is the one that stores it; all hold what is not partitioned, one stores it.
    """

    kind: str
    name: str
    start: int
    values: Tensor
    mine: bool


class Source(Protocol):
    """Whole parameters by kind and name, wherever they come from."""

    def kinds(self, name: str) -> set[str]: ...

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor: ...


def pieces(engine: Any, average: WeightAverage | None) -> list[Piece]:
    """All that this rank holds: parameters, buffers, fp32 copies, optimizer states and moving averages."""
    rank, ranks, stage = engine.global_rank, engine.world_size, engine.zero_optimization_stage()
    averages = {} if average is None else dict(zip(map(id, average.parameters), average.averages, strict=True))
    found = [Piece(WEIGHT, name, 0, flat(buffer), mine=rank == 0) for name, buffer in buffers_of(engine.module).items()]
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        my_turn = number % ranks == rank  # in storing what all ranks hold
        moves = parameter.requires_grad
        if not moves or stage > 0:  # of those that move the fp32 copy is stored, below
            start, values = held(engine, parameter, stored(parameter))
            found.append(Piece(WEIGHT, name, start, values, mine=not moves and (my_turn or stage == 3)))
        if id(parameter) in averages:
            start, values = held(engine, parameter, averages[id(parameter)])
            found.append(Piece(AVERAGE, name, start, values, mine=my_turn or stage == 3))
        if not moves:
            continue
        optimized, start, offset, length = place_of(engine, parameter)
        mine = my_turn or stage > 0
        found.append(Piece(WEIGHT, name, start, part_of(flat(optimized), offset, length), mine))
        for kind, values in states_of(engine, optimized):
            if kind.startswith(STATE):
                found.append(Piece(kind, name, start, part_of(values, offset, length), mine))
            else:
                found.append(Piece(kind, name, 0, values, mine and start == 0))
    return [piece for piece in found if piece.values.numel()]


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Those that belong to the module's state."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def part_of(values: Tensor, offset: int, length: int) -> Tensor:
    """`values[offset : offset + length]`; thousands of them are made while a GPU waits, and most are the whole."""
    return values if length == values.numel() else values.narrow(0, offset, length)


def held(engine: Any, parameter: nn.Parameter, values: Tensor) -> tuple[int, Tensor]:
    """(first element, elements) of `values`, which are the parameter's own between two steps, or are kept as those are."""
    if engine.zero_optimization_stage() < 3:
        return 0, flat(values)
    start, length = shard_of(engine, parameter)
    return start, part_of(flat(values), 0, length)


def shard_of(engine: Any, parameter: nn.Parameter) -> tuple[int, int]:
    """(first element, number) of this rank's share under ZeRO-3: equally many on every rank, the last filled up."""
    start = engine.global_rank * parameter.ds_tensor.ds_numel
    return start, max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))


def place_of(engine: Any, parameter: nn.Parameter) -> tuple[Tensor, int, int, int]:
    """(tensor that the optimizer steps, first element of the parameter in it, where that lies, how many): of a parameter that
    moves, on this rank."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 0:
        return parameter, 0, 0, parameter.numel()
    if stage == 3:
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, length = shard_of(engine, parameter)
        return optimizer.fp32_partitioned_groups_flat[group], start, offset, length
    mapping = parameter._hp_mapping
    if mapping is None:
        return optimizer.single_partition_of_fp32_groups[0], 0, 0, 0
    whole = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    inside, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return whole, inside.start, there.start, there.numel


def states_of(engine: Any, optimized: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Kind and values, 1-D, of the optimizer's states of one tensor that it steps.

    Raises:
        NotImplementedError: a state is neither elementwise nor one number.
    """
    for key, value in engine.basic_optimizer.state.get(optimized, {}).items():
        if torch.is_tensor(value) and value.shape == optimized.shape:
            yield STATE + key, value.view(-1)
        elif torch.is_tensor(value) and value.numel() == 1:
            yield SCALAR + key, value.view(-1)
        else:
            raise NotImplementedError(
                f"{type(engine.basic_optimizer).__name__}: its state {key} is neither one value an element nor one tensor of "
                "one number, so it cannot be stored; use optimizer=adamw"
            )


@torch.no_grad()
def put_back(engine: Any, average: WeightAverage | None, source: Source) -> None:
    """Give a fresh engine the state that `source` holds, whatever layout that was written under.

    Raises:
        KeyError: a parameter, or elements of one, are not in `source`.
    """
    make_states(engine, source)
    for piece in pieces(engine, average):
        if piece.kind.startswith((STATE, SCALAR)) and piece.kind not in source.kinds(piece.name):
            continue  # no gradient ever reached this parameter, but its neighbours in the flat tensor
        if piece.kind == AVERAGE and AVERAGE not in source.kinds(piece.name):
            continue  # averaging is new
        piece.values.copy_(source.read(piece.kind, piece.name, piece.start, piece.values.numel()))


def make_states(engine: Any, source: Source) -> None:
    """The optimizer makes its states in its first step; they are needed before it."""
    optimizer = engine.basic_optimizer
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        optimized, _, _, length = place_of(engine, parameter)
        state = optimizer.state[optimized]
        for kind in source.kinds(name) if length else ():
            if kind.startswith(STATE) and (key := kind.removeprefix(STATE)) not in state:
                state[key] = torch.zeros_like(optimized)
            elif kind.startswith(SCALAR) and (key := kind.removeprefix(SCALAR)) not in state:
                state[key] = torch.zeros((), device=optimized.device if on_device else "cpu")


# --- counters ---------------------------------------------------------------------------------------------------------

COUNTED = ("global_steps", "global_samples", "skipped_steps")
SCALED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def counters(engine: Any) -> dict[str, Any]:
    """Steps, loss scales and the schedule's position: plain numbers."""
    scaler, dynamic = autocast_scaler(engine), getattr(engine.optimizer, "loss_scaler", None)
    return {
        **{name: int(getattr(engine, name)) for name in COUNTED},
        "schedule_step": engine.lr_scheduler.last_epoch,
        "loss_scaler": {name: getattr(dynamic, name) for name in SCALED if hasattr(dynamic, name)},
        "autocast_scaler": None if scaler is None else scaler.state_dict(),
    }


def restore_counters(engine: Any, stored_counters: Mapping[str, Any]) -> None:
    """The inverse of `counters`; a loss scale that this engine has no use for is left out."""
    for name in COUNTED:
        setattr(engine, name, stored_counters[name])
    # A checkpoint lies between two steps, and this engine may take another number of passes for each.
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if (dynamic := getattr(engine.optimizer, "loss_scaler", None)) is not None:
        for name, value in stored_counters["loss_scaler"].items():
            if hasattr(dynamic, name):
                setattr(dynamic, name, value)
    if (scaler := autocast_scaler(engine)) is not None and stored_counters["autocast_scaler"]:
        scaler.load_state_dict(stored_counters["autocast_scaler"])
    schedule = engine.lr_scheduler
    schedule.last_epoch = stored_counters["schedule_step"]
    schedule._last_lr = [
        base * factor(schedule.last_epoch) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate
