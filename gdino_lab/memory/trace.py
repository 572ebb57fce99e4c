"""What a training step or an evaluation allocates, traced from the real model code on tensors that have shapes but no memory.

It runs on PyTorch's meta device. Where a GPU takes another path (autocast's choice of dtypes, the fused attention and dropout
kernels), the call is turned into the GPU's, so that what autograd keeps is what it keeps there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# PyTorch's CUDA allocator hands out multiples of this.
ROUNDING = 512


@dataclass(frozen=True)
class Trace:
    """Bytes on the device beyond weights, gradients' final home and optimizer states.

    after_forward: what autograd keeps, live when the loss is known; of an evaluation the outputs.
    peak: the most that is live at any time of forward and backward, gradients that stay included.
    gradients: those that stay when backward is over.
    peak_at: the operation during which the peak was reached.
    """

    after_forward: int
    peak: int
    gradients: int
    peak_at: str


def trace_step(
    build: Callable[[], nn.Module],
    batch: Callable[[], dict[str, Any]],
    weights: torch.dtype,
    autocast: torch.dtype | None,
    loss: Callable[[Any, dict[str, Any]], Tensor],
    keep_gradients: bool,
) -> Trace:
    """Trace forward, loss and backward of one micro-batch.

    Args:
        build: makes the module; called on the meta device.
        batch: makes the batch, on the meta device.
        weights: dtype of the weights.
        autocast: the dtype of CUDA autocast, or None.
        loss: the scalar to differentiate, from the module's outputs and the batch.
        keep_gradients: False where each gradient leaves the device as soon as it is there (offload).
    """
    with _metered(build, batch, weights, training=True) as (module, values, meter):
        _watch_gradients(module, keep_gradients)
        with _AsOnCuda(autocast) as cuda:
            outputs = module(**values["inputs"])
            cuda.forget_casts()  # autocast ends with forward
            cuda.low = None
            value = loss(outputs, values)
            del outputs
            after_forward = meter.live
            cuda.low = autocast  # a layer that is computed again is computed under autocast again
            # Not value.backward(): the mode would catch that call and be off inside it, where layers are computed again.
            _engine_run_backward((value,), (torch.ones_like(value),), False, False, (), True, True)
        gradients = sum(
            _rounded(parameter.grad.untyped_storage().nbytes())
            for parameter in module.parameters()
            if parameter.grad is not None
        )
    return Trace(after_forward, meter.peak, gradients, meter.peak_at)


def trace_evaluation(
    build: Callable[[], nn.Module], batch: Callable[[], dict[str, Any]], weights: torch.dtype, autocast: torch.dtype | None
) -> Trace:
    """Trace forward of one evaluation batch; arguments as of `trace_step`."""
    with _metered(build, batch, weights, training=False) as (module, values, meter), torch.no_grad(), _AsOnCuda(autocast):
        outputs = module(**values["inputs"])
        after_forward = meter.live
        del outputs
    return Trace(after_forward, meter.peak, 0, meter.peak_at)


@contextmanager
def _metered(
    build: Callable[[], nn.Module], batch: Callable[[], dict[str, Any]], weights: torch.dtype, training: bool
) -> Iterator[tuple[nn.Module, dict[str, Any], _Meter]]:
    """Module and batch, and what counts all that is made inside the block."""
    with torch.device("meta"):
        module = build().train(training)
        module.to(device="meta", dtype=weights)  # nn.Parameter(torch.Tensor(...)) heeds no default device
        values = batch()
    with _Meter({tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())}) as meter:
        yield module, values, meter


def _watch_gradients(module: nn.Module, keep: bool) -> None:
    if keep:
        return

    def leave(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(leave)


class _Meter(TorchDispatchMode):
    """Counts bytes of storages from their making to their end."""

    def __init__(self, known: set[Any]):
        super().__init__()
        self.live = self.peak = 0
        self.peak_at = ""
        self.seen = weakref.WeakKeyDictionary()
        for storage in known:
            self.seen[storage] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1  # the model's own checks ask whether all is well
        result = _result(func, args, kwargs or {})
        extra = _workspace(func, args)
        for tensor in _tensors(result):
            self._count(tensor)
        if self.live + extra > self.peak:
            self.peak, self.peak_at = self.live + extra, str(func)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.seen or tensor.device.type != "meta":
            return
        size = _rounded(storage.nbytes())
        self.seen[storage] = size
        self.live += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


# What operations have made of arguments of the same shapes; None where they hand on their arguments' memory.
RESULTS: dict[Any, Any] = {}


def _result(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func(*args, **kwargs)`. Of the tens of thousands of calls most come again, and many meta kernels are Python, which takes ten
    times as long as to make an equal result."""
    call = func, _shapes(args), _shapes(kwargs)
    if (known := RESULTS.get(call)) is not None:
        return _equal(known)
    result = func(*args, **kwargs)
    if call not in RESULTS:
        RESULTS[call] = None if _hands_on_memory(func, args, result) else _equal(result)
    return result


def _shapes(value: Any) -> Any:
    """All of the arguments that the shapes of a result depend on, to look it up by."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((name, _shapes(each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are equal, and promote to other dtypes


def _equal(result: Any) -> Any:
    """The same in memory of its own."""
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return type(result)(map(_equal, result)) if isinstance(result, (tuple, list)) else result


def _hands_on_memory(func: Any, args: tuple, result: Any) -> bool:
    """Views and changes in place, which most say in their schema; what is on no meta device has values besides."""
    if any(each.alias_info is not None for each in (*func._schema.arguments, *func._schema.returns)):
        return True
    given = {each.untyped_storage() for each in _tensors(args)}
    return any(each.device.type != "meta" or each.untyped_storage() in given for each in _tensors(result))


def _tensors(result: Any):
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors(each)


def _rounded(size: int) -> int:
    return _up(size, ROUNDING)


def _workspace(func: Any, args: tuple) -> int:
    """Bytes that an operation uses inside itself on a GPU, beyond what it returns; rules read off an H200, operation by
    operation. What takes less than a few MiB there is left out."""
    if func is torch.ops.aten.sum.dim_IntList and args[0].ndim > 1 and 0 in args[1]:
        # Columns are summed in two passes; the first leaves fp32 partial sums.
        return min(2 * 4 * args[0].numel(), 132 * 2**20)
    if func is torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
        # fp32 accumulators for the gradients of key and value, and the products' row sums, in blocks of 64 rows.
        batch, heads, rows, width = args[2].shape
        return 4 * batch * heads * _up(rows, 64) * (2 * _up(width, 32) + 1)
    return 0


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


# What CUDA autocast does to each function (the lists in PyTorch's documentation of "CUDA Op-Specific Behavior").
LOWERED = {
    F.linear, torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul,
    torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.mm, F.conv2d, torch.conv2d, F.scaled_dot_product_attention,
}  # fmt: skip
PROMOTED = {F.grid_sample}  # to the widest dtype among its inputs
RAISED = {
    F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.Tensor.log_softmax, F.layer_norm,
    torch.layer_norm, F.group_norm, torch.group_norm, F.normalize, torch.exp, torch.log, torch.Tensor.exp,
    torch.Tensor.log, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.sum, torch.Tensor.sum, torch.cumsum,
    torch.Tensor.cumsum, torch.norm, torch.Tensor.norm, torch.cdist, torch.prod, torch.Tensor.prod,
    F.binary_cross_entropy_with_logits, torch.rsqrt, torch.Tensor.rsqrt, torch.reciprocal,
}  # fmt: skip


class _AsOnCuda(TorchFunctionMode):
    """Calls become what they are on a GPU."""

    def __init__(self, low: torch.dtype | None):
        super().__init__()
        self.low = low
        self.casts: dict[int, Tensor] = {}

    def forget_casts(self) -> None:
        self.casts.clear()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.low is not None and func in LOWERED:
            args, kwargs = self._cast(args, self.low), self._cast(kwargs, self.low)
        elif self.low is not None and func in RAISED:
            args, kwargs = self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        elif self.low is not None and func in PROMOTED and len({each.dtype for each in _tensors(args)}) > 1:
            args = self._cast(args, torch.float32)
        if func is F.scaled_dot_product_attention:
            return _efficient_attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            if not (value.is_leaf and value.requires_grad and dtype == self.low):
                return value.to(dtype)
            # Autocast casts a weight once a forward.
            if id(value) not in self.casts:
                self.casts[id(value)] = value.to(dtype)
            return self.casts[id(value)]
        if isinstance(value, (tuple, list)):
            return type(value)(self._cast(each, dtype) for each in value)
        if isinstance(value, dict):
            return {name: self._cast(each, dtype) for name, each in value.items()}
        return value


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The memory-efficient kernel, which a GPU takes wherever there is a mask."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad or key.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input
