"""Traces and gradients of PyTorch modules. Needs torch: `pip install 'verax[parity]'`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from verax._optional import require_optional
from verax.compare.case import Side
from verax.compare.trace import OUTPUT, Recorder, Trace, leaves, recording
from verax.errors import InvalidParameterError


def torch() -> Any:
    """The package torch."""
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
        for path, leaf in recorder.leaves(name, x):
            if isinstance(leaf, lib.Tensor):
                leaf = to_numpy(leaf if axes is None else leaf.permute(*axes))
            trace.add(path, leaf)
        return x

    recorder, model = Recorder(trace, record, inputs=side.inputs, without=side.without), side.model
    running = [""]

    def before(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(path)
        recorder.path = path
        if recorder.wants_input():
            recorder.value("input", next(iter(_floats([*args, kwargs]).values()), None))

    def after(path: str, module: Any, args: tuple[Any, ...], result: Any) -> None:
        recorder.value("", result)
        running.pop()
        recorder.path = running[-1]

    with ExitStack() as stack:
        hook_modules(model, stack, before, after)
        with recording(recorder, side.watch), lib.no_grad():
            result = side.run(model, to_torch(side.args), to_torch(side.kwargs))
        recorder.path = ""
        record(OUTPUT, result, None)
    return trace


def hook_modules(model: Any, stack: ExitStack, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call `before(path, module, args, kwargs)` and `after(path, module, args, result)` around each module's call.

    The stack removes the hooks, and gives the model the buffers from before. A model that is not an `nn.Module` has
    none, and modules of TorchScript take none.
    """
    lib = torch()
    _keep_buffers(model, stack)
    for path, module in model.named_modules() if isinstance(model, lib.nn.Module) else ():
        if path and not isinstance(module, lib.jit.ScriptModule):
            stack.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(after, path)).remove)


def _keep_buffers(model: Any, stack: ExitStack) -> None:
    """Let the stack give a model the buffers that it has now, which a run may change, as batch norms do in training."""
    lib = torch()

    def restore(module: Any, name: str, buffer: Any, before: Any) -> None:
        if getattr(module, name) is not buffer or not lib.equal(buffer, before):
            setattr(module, name, buffer.copy_(before))

    for module in model.modules() if isinstance(model, lib.nn.Module) else ():
        if not isinstance(module, lib.jit.ScriptModule):
            for name, buffer in module.named_buffers(recurse=False):
                stack.callback(restore, module, name, buffer, buffer.clone())


def gradients_torch(side: Side, cotangents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of the sum of `output * cotangent` by each parameter that it depends on, under its name.

    A parameter of several names (tied weights) has one array under each of them.

    Args:
        side: an `nn.Module` and its call.
        cotangents: weights of each output of floats, by its name in the trace.

    Raises:
        InvalidParameterError: if the outputs depend on no parameter, as under `torch.no_grad`.
    """
    lib, model = torch(), side.model
    parameters = {name: x for name, x in model.named_parameters() if x.is_floating_point()}
    trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
    stack = ExitStack()
    _keep_buffers(model, stack)
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        outputs = _floats(side.run(model, to_torch(side.args), to_torch(side.kwargs)))
        weights = {name: lib.from_numpy(np.asarray(x, np.float32)) for name, x in cotangents.items()}
        total: Any = sum((outputs[name].float() * weight).sum() for name, weight in weights.items())
        if not getattr(total, "requires_grad", False):
            raise InvalidParameterError(
                "backward: no output of the reference depends on a parameter; a call under torch.no_grad has no "
                "gradients"
            )
        gradients = lib.autograd.grad(total, list(parameters.values()), allow_unused=True)
    finally:
        stack.close()
        for name, parameter in parameters.items():
            parameter.requires_grad_(trained[name])
    given = zip(parameters.values(), gradients, strict=True)
    arrays = {id(parameter): to_numpy(x) for parameter, x in given if x is not None}
    return {name: arrays[id(x)] for name, x in model.named_parameters(remove_duplicate=False) if id(x) in arrays}


def round_like(model: Any, rounded: Any) -> None:
    """Give a model the parameters of another of lower precision, so that it is the truth about what that one rounds."""
    lib = torch()
    with lib.no_grad():
        for (_, parameter), (_, other) in zip(model.named_parameters(), rounded.named_parameters(), strict=True):
            parameter.copy_(other)


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor on the host, in its dtype."""
    lib = torch()
    tensor = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        return tensor.view(lib.int16 if name == "bfloat16" else lib.uint8).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def to_torch(x: Any) -> Any:
    """Arrays of NumPy and JAX in a structure of tuples, lists and mappings as tensors of their own memory."""
    if isinstance(x, np.ndarray | jax.Array):
        lib, array = torch(), np.array(x)
        if array.dtype.name.startswith(("bfloat16", "float8")):  # dtypes of ml_dtypes
            plain = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
            return lib.from_numpy(plain).view(getattr(lib, array.dtype.name))
        return lib.from_numpy(array)
    if isinstance(x, Mapping):
        return {name: to_torch(value) for name, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(to_torch, x))
    return type(x)(map(to_torch, x)) if isinstance(x, tuple | list) else x


def _floats(x: Any) -> dict[str, Any]:
    """Tensors of floats of a structure, by their names as outputs."""
    lib = torch()
    return {p: leaf for p, leaf in leaves(x, OUTPUT) if isinstance(leaf, lib.Tensor) and leaf.is_floating_point()}
