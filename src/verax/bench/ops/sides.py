"""Sides of `verax bench ops`: implementations of an operation, random arrays, torch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from verax import machine, ops
from verax._compat import compiler_options
from verax.bench.case import Case, Side
from verax.errors import MissingDependencyError

__all__ = ["implementations", "import_torch", "operation_case", "random", "torch_tensor"]


def operation_case(
    operation: str,
    name: str,
    dtype: str,
    bytes_moved: int,
    flops: int,
    chosen: str,
    calls: Mapping[str, Callable[[], object]],
) -> Case:
    """Case of an operation, of which every side does the same products in the same dtype."""
    sides = {side: Side(call, flops, (dtype,)) for side, call in calls.items()}
    return Case(operation, name, bytes_moved, chosen, sides)


def random(shape: tuple[int, ...], dtype: DTypeLike, seed: int) -> jax.Array:
    """Normally distributed numbers of this shape and dtype."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def implementations(operation: ops.Operation[Any, Any], *args: Any, **kwargs: Any) -> dict[str, Callable[[], object]]:
    """Every implementation of the operation that takes this call here, by name."""
    sides: dict[str, Callable[[], object]] = {}
    for name, impl in operation.implementations.items():
        if impl.supports(*args, **kwargs):
            run: Any = jax.jit(
                lambda *a, function=impl.function: function(*a, **kwargs),
                compiler_options=compiler_options(ops.target().platform),
            )
            sides[name] = lambda run=run: jax.block_until_ready(run(*args))
    return sides


def import_torch() -> Any:
    """torch, set to all cores.

    Raises:
        MissingDependencyError: without torch.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("comparing with torch needs it: pip install 'verax[parity]'") from error
    torch.set_num_threads(machine.num_cores())
    return torch


def torch_tensor(torch: Any, array: jax.Array, dtype: str) -> Any:
    """Tensor with the array's numbers in a dtype of torch, by its name."""
    return torch.from_numpy(np.array(array.astype(jnp.float32))).to(getattr(torch, dtype))
