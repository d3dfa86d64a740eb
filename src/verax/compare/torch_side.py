"""Traces and gradients of PyTorch modules. Needs torch: `pip install 'verax[parity]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from verax._optional import require_optional
from verax.compare.case import Side
from verax.compare.trace import OUTPUT, Recorder, Trace, recording

__all__ = ["gradients_torch", "round_like", "torch", "trace_torch"]


def torch() -> Any:
    """The package torch.

    Raises:
        MissingDependencyError: where it is not installed.
    """
    return require_optional("torch")


def trace_torch(side: Side, *, folder: str | Path | None = None) -> Trace:
    """Run a side's PyTorch model and keep the result of each of its modules, by forward hooks. No gradients are kept.

    Args:
        side: an `nn.Module`, or a function with taps, and its call.
        folder: folder to stream the arrays to; None keeps them in memory.

    Raises:
        MissingDependencyError: where torch is not installed.
    """
    lib = torch()
    trace = Trace(folder)

    def record(name: str, x: Any, axes: Sequence[int] | None) -> Any:
        tensor = _first(x)
        if tensor is not None:
            trace.add(name, to_numpy(tensor if axes is None else tensor.permute(*axes)))
        return x

    recorder, model = Recorder(trace, record, side.inputs), side.model
    running = [""]

    def before(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(path)
        recorder.path = path
        if recorder.wants_input():
            recorder.value("input", [*args, *kwargs.values()])

    def after(path: str, module: Any, args: tuple[Any, ...], result: Any) -> None:
        recorder.value("", result)
        running.pop()
        recorder.path = running[-1]

    with ExitStack() as stack:
        if isinstance(model, lib.nn.Module):
            for path, module in model.named_modules():
                if path:
                    stack.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(partial(after, path)).remove)
        with recording(recorder, side.watch), lib.no_grad():
            result = side.run(model, to_torch(side.args), to_torch(side.kwargs))
        recorder.path = ""
        record(OUTPUT, result, None)
    trace.save()
    return trace


def gradients_torch(side: Side, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of `sum(output * cotangent)` by each parameter that the output depends on, under its name.

    Args:
        side: an `nn.Module` and its call.
        cotangent: as many numbers as the output's first tensor has, in its order.
    """
    lib, model = torch(), side.model
    for parameter in model.parameters():
        parameter.grad = None
        parameter.requires_grad_(True)
    output = _first(side.run(model, to_torch(side.args), to_torch(side.kwargs)))
    assert output is not None
    (output.float() * lib.from_numpy(np.asarray(cotangent, np.float32)).reshape(output.shape)).sum().backward()
    gradients = {n: to_numpy(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def round_like(model: Any, rounded: Any) -> None:
    """Give a model the parameters of another of lower precision, so that it is the truth about what that one rounds."""
    lib = torch()
    with lib.no_grad():
        for (_, parameter), (_, other) in zip(model.named_parameters(), rounded.named_parameters(), strict=True):
            parameter.copy_(other)


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor on the host; bfloat16 stays what it is."""
    lib = torch()
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == lib.bfloat16:
        return tensor.view(lib.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(x: Any) -> Any:
    """NumPy arrays of a structure as tensors."""
    if isinstance(x, np.ndarray):
        return torch().from_numpy(np.array(x))
    if isinstance(x, Mapping):
        return {name: to_torch(value) for name, value in x.items()}
    return tuple(map(to_torch, x)) if isinstance(x, tuple) else x


def _first(x: Any) -> Any | None:
    """The first tensor of floats in what a module gave or took."""
    lib = torch()
    if isinstance(x, lib.Tensor):
        return x if x.is_floating_point() else None
    members = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else ()
    return next((tensor for member in members if (tensor := _first(member)) is not None), None)
