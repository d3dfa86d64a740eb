"""Adapters of tasks within a checkpoint: jina-embeddings-v3 (arXiv:2409.10173) has a LoRA of each weight for each task.

A layer's weight W lies there as `parametrizations.weight.original`, next to factors of all tasks: `lora_A [K, r, in]`
and `lora_B [K, out, r]`, for embeddings `[K, rows, r]` and `[K, r, D]`. A task's weight is `W + B A alpha / r`. As in
the published code, W alone is used without a task.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from verax.checkpoint import Checkpoint
from verax.checkpoint.checkpoint import DerivedFile
from verax.errors import CheckpointError, InvalidParameterError
from verax.fields import Positive, Size, read_value

_STORED = ".parametrizations.weight."
_EMBEDDINGS = "_embeddings"


def with_task(opened: Checkpoint, task: str | None) -> tuple[Checkpoint, str]:
    """A checkpoint with the weights of a task, and the instruction that goes before its texts.

    `task`: a name of `lora_adaptations` in config.json; None for the weights without adapters and no instruction.

    Raises:
        InvalidParameterError: for a task that the checkpoint does not have, with those that it has.
        CheckpointError: for factors of other shapes than config.json says.
    """
    config = opened.config
    tasks = read_value(config, "lora_adaptations", tuple[str, ...], ())
    if task is not None and task not in tasks:
        known = f"the checkpoint has {', '.join(tasks)}" if tasks else "the checkpoint has no adapters of tasks"
        raise InvalidParameterError(f"task: expected one of its tasks, got {task!r}; {known}")
    names = [name.removesuffix("original") for name in opened.names() if name.endswith(f"{_STORED}original")]
    if not names:
        if task is not None:
            raise CheckpointError(f"{opened.folder}: no weight has adapters, although config.json names {task!r}")
        return opened, ""
    number = None if task is None else tasks.index(task)
    rank = read_value(config, "lora_rank", Size, 4)
    scale = float(read_value(config, "lora_alpha", Positive, 1.0)) / rank
    files = {}
    for name in names:
        key = name.removesuffix(_STORED) + ".weight"
        _check_factors(opened, name, len(tasks), rank)
        source = f"{name}original"
        files[key] = DerivedFile(
            opened.place(source)[0],
            key,
            opened.info(source)._replace(dtype=np.dtype(np.float32)),
            partial(_weight, opened, name, number, scale),
            partial(opened.release, source),
        )
    instructions = read_value(config, "task_instructions", dict[str, str], {})
    return opened.with_files(files), instructions.get(task or "", "")


def _check_factors(opened: Checkpoint, name: str, tasks: int, rank: int) -> None:
    rows, columns = opened.shape(f"{name}original")
    embeds = name.endswith(_EMBEDDINGS + _STORED)
    expected = ((rows, rank), (rank, columns)) if embeds else ((rank, columns), (rows, rank))
    for key, shape in zip((f"{name}0.lora_A", f"{name}0.lora_B"), expected, strict=True):
        if (given := opened.shape(key)) != (tasks, *shape):
            raise CheckpointError(f"{opened.folder}: {key} has shape {list(given)}, expected {[tasks, *shape]}")


def _weight(opened: Checkpoint, name: str, task: int | None, scale: float) -> np.ndarray:
    """Weight of a layer or an embedding for a task, float32."""
    weight = np.asarray(opened.read(f"{name}original"), np.float32)
    if task is None:
        return weight
    a, b = (np.asarray(opened.read_raw(f"{name}0.lora_{factor}")[task], np.float32) for factor in "AB")
    return weight + (a @ b if name.endswith(_EMBEDDINGS + _STORED) else b @ a) * np.float32(scale)
