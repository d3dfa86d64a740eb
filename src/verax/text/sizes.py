"""How large the engine's cache and context may be: from the memory that is there, and what was asked for."""

from __future__ import annotations

import jax
import psutil
from jax.typing import DTypeLike

from verax.errors import InvalidParameterError
from verax.models import Qwen3Config
from verax.text.runner import RunnerConfig, block_bytes, state_bytes

__all__ = ["plan_sizes"]

DEVICE_FRACTION = 0.9
"""Part of an accelerator's memory that weights and cache may fill: the rest is for activations (vLLM's default)."""

HOST_FRACTION = 0.25
"""Part of the free host memory that a cache takes on a CPU, where other programs live too."""

MIN_BATCHED_TOKENS = {"cpu": 512}
"""A prompt chunk on a CPU: long enough for full matmul speed, short enough that decodes beside it hardly wait."""

DEFAULT_BATCHED_TOKENS = 2048

DEFAULT_NUM_SEQS = 256

STATE_FRACTION = 0.5
"""Part of the cache's memory that recurrent states take at most, where the number of sequences is left to us."""


def plan_sizes(
    model: Qwen3Config,
    cache_dtype: DTypeLike,
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    block_size: int,
    kv_cache_memory: int | None,
) -> RunnerConfig:
    """Sizes that fit: the context is cut to what the cache can hold of one sequence, unless it was asked for.

    The cache is blocks and, in models with recurrent layers, a state for each of `max_num_seqs` sequences.

    Raises:
        InvalidParameterError: for sizes below 1, a context longer than the model's, or a cache too small for it.
    """
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("block_size", block_size),
        ("kv_cache_memory", kv_cache_memory),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidParameterError(f"{name}: expected a whole number of at least 1, got {value!r}")
    longest = model.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise InvalidParameterError(f"max_model_len: {max_model_len} is more than the model's {longest} positions")
    if max_model_len is not None and max_model_len < 2:
        raise InvalidParameterError("max_model_len: at least 2, a prompt token and an answer token")
    memory = kv_cache_memory or _free_memory()
    per_block, per_state = block_bytes(model, block_size, cache_dtype), state_bytes(model)
    if max_num_seqs is None:
        fitting = int(memory * STATE_FRACTION) // per_state if per_state else DEFAULT_NUM_SEQS
        max_num_seqs = max(1, min(DEFAULT_NUM_SEQS, fitting, max_num_batched_tokens or DEFAULT_NUM_SEQS))
    batched = max_num_batched_tokens or max(
        max_num_seqs, MIN_BATCHED_TOKENS.get(jax.default_backend(), DEFAULT_BATCHED_TOKENS)
    )
    if batched < max_num_seqs:
        raise InvalidParameterError(
            f"max_num_batched_tokens: {batched} is less than max_num_seqs ({max_num_seqs}), and each running sequence "
            "needs a token a step"
        )
    states = max_num_seqs * per_state
    affordable = (memory - states) // per_block - 1  # block 0 is padding's
    context = max_model_len or min(longest, max(affordable, 1) * block_size)
    needed = -(-context // block_size)
    if affordable < max(needed, 1):
        beside = f" beside the states of {max_num_seqs} sequences ({states / 2**20:.0f} MiB)" if states else ""
        fewer = " or max_num_seqs" if states else ""
        raise InvalidParameterError(
            f"kv_cache_memory: {memory / 2**20:.0f} MiB hold {max(affordable, 0) * block_size} tokens{beside}, but a "
            f"context of {context} needs {(needed + 1) * per_block / 2**20:.0f} MiB; give more, or a smaller "
            f"max_model_len{fewer}"
        )
    blocks = min(affordable, needed * max_num_seqs)
    return RunnerConfig(int(blocks) + 1, block_size, int(context), max_num_seqs, batched, cache_dtype)


def _free_memory() -> int:
    """Bytes that a cache may take on JAX's default device."""
    if jax.default_backend() == "cpu":
        return int(psutil.virtual_memory().available * HOST_FRACTION)
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        raise InvalidParameterError(
            "kv_cache_memory: this device does not tell how much memory it has; give a size in bytes"
        )
    return int(limit * DEVICE_FRACTION) - int(stats.get("bytes_in_use", 0))
