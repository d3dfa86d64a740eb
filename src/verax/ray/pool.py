"""`actor_pool`: arguments of `Dataset.map_batches` for a callable of this package."""

from __future__ import annotations

from typing import Any

from verax._optional import require_optional
from verax.ray.application import check_replicas
from verax.ray.cluster import actor_environment, check_cpus, check_gpus

__all__ = ["actor_pool"]

BATCH_SIZE = 16
"""Rows of a batch."""

TASKS = 4
"""Blocks that are with an actor at once: one begins while the last rows of another are on their way."""


def actor_pool(
    size: int | tuple[int, int],
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    **arguments: Any,
) -> dict[str, Any]:
    """Arguments of `Dataset.map_batches` beside the callable, such as `Generate`.

    Args:
        size: number of actors, or the least and the most of them.
        num_cpus: CPUs of each, and threads of its JAX.
        num_gpus: GPUs of each.
        batch_size: rows of a batch. Several batches are with an actor at once.
        arguments: of the callable.

    Raises:
        InvalidParameterError: for sizes that make no sense, or a pool that leaves no CPU to those who read files and
            filter checkpoints. A checkpoint has to be configured before.
        MissingDependencyError: if Ray is not installed.

    Examples:
        >>> prompts.map_batches(verax.ray.Generate, **verax.ray.actor_pool(2, num_gpus=1, model="Qwen/Qwen3-0.6B"))
    """
    data = require_optional("ray.data")
    least, most = check_replicas(size)
    check_gpus(num_gpus)
    # The filter of a checkpoint is an actor with a CPU of its own; those who read and write take turns with another.
    checkpoint = data.DataContext.get_current().checkpoint_config
    check_cpus(least, num_cpus, name="size", left=1 if checkpoint is None else 2)
    return {
        "compute": data.ActorPoolStrategy(
            min_size=least,
            max_size=most,
            max_tasks_in_flight_per_actor=2 * TASKS,
            max_concurrent_calls_per_actor=TASKS,
            enable_true_multi_threading=True,
        ),
        "batch_size": batch_size,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "fn_constructor_kwargs": arguments,
        "runtime_env": actor_environment(),
    }
