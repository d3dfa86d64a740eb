"""Device state of every running sequence, so that a step needs only a few integers from the host.

A sequence holds one slot while it runs. `admit` fills the slot's row from one packed array; steps then read tokens,
page tables and sampling parameters from it and append the tokens that they sample. The last row belongs to no sequence:
padding rows of a step read it, and its parameters are for greedy decoding.
"""

from __future__ import annotations

import math
from collections import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from verax.ops.sampling import SamplingArrays
from verax.sampling_fields import FLOATS, INTS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, OFF
from verax.text.engine.request import Sequence

MAX_BANNED = MAX_STOP_TOKEN_IDS + 16
"""Tokens that `min_tokens` can hold back: the request's stop tokens and the model's own (Llama 3 has three)."""

_OTHERS = ("num_logprobs", "num_prompt_logprobs", "adapter")


class SlotParams(NamedTuple):
    """Parameters of each slot."""

    sampling: SamplingArrays
    others: Int[Array, "S i"]

    def int(self, name: str) -> Int[Array, "S"]:
        """Number of log-probabilities wanted, the same number for the prompt, or the adapter's slot; -1 for none."""
        return self.others[:, _OTHERS.index(name)]


class Slots(NamedTuple):
    """Device state of each slot: S = max_num_seqs + 1 rows, L tokens, W pages in each table."""

    tokens: Int[Array, "S L"]
    page_tables: tuple[Int[Array, "S W"], ...]
    """Page table of each slot, for each cache group."""
    params: SlotParams


_NO_TOKEN = np.iinfo(np.int32).max
"""An id past every vocabulary: scatters drop it."""

_IDLE_FLOATS = np.asarray([OFF[name] for name in FLOATS], np.float32)
_IDLE_INTS = np.asarray([OFF[name] for name in INTS], np.int32)
_IDLE_OTHERS = np.full(len(_OTHERS), -1, np.int32)
"""Parameters of greedy decoding without extras: a step skips what no row needs, and padding rows must need nothing."""


def new_slots(max_num_seqs: int, max_model_len: int, table_width: int, num_tables: int) -> Slots:
    """Empty slots with a page table for each cache group. `RunnerConfig.slot_sizes` has the arguments."""
    S = max_num_seqs + 1

    def rows(idle: Shaped[np.ndarray, "n"]) -> Shaped[Array, "S n"]:
        return jnp.broadcast_to(jnp.asarray(idle), (S, len(idle)))

    sampling = SamplingArrays(
        floats=rows(_IDLE_FLOATS),
        ints=rows(_IDLE_INTS),
        bias_ids=jnp.full((S, MAX_LOGIT_BIAS), _NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.float32),
        banned=jnp.full((S, MAX_BANNED), _NO_TOKEN, jnp.int32),
    )
    tables = tuple(jnp.zeros((S, table_width), jnp.int32) for _ in range(num_tables))
    params = SlotParams(sampling, rows(_IDLE_OTHERS))
    return Slots(jnp.zeros((S, max_model_len), jnp.int32), tables, params)


def admission_size(num_tokens: int, block_size: int, num_tables: int) -> int:
    """Length of the array that admits a sequence of up to `num_tokens`, int32: its slot's number and what it fills."""
    sampling = len(FLOATS) + len(INTS) + 2 * MAX_LOGIT_BIAS + MAX_BANNED + len(_OTHERS)
    return 1 + num_tokens + num_tables * -(-num_tokens // block_size) + sampling


def pack_admission(
    sequence: Sequence,
    num_tokens: int,
    block_size: int,
    eos_token_ids: abc.Sequence[int],
    suppressed_token_ids: abc.Sequence[int],
) -> Int[np.ndarray, "n"]:
    """The row that `admit` writes for a sequence of up to `num_tokens`, as one array for one transfer."""
    params = sequence.request.params
    tokens = np.zeros(num_tokens, np.int32)
    tokens[: len(sequence.tokens)] = sequence.tokens
    tables = np.zeros((len(sequence.tables), -(-num_tokens // block_size)), np.int32)
    tables[:, : len(sequence.tables[0])] = sequence.tables
    bias = {**(params.logit_bias or {}), **dict.fromkeys(suppressed_token_ids, -math.inf)}
    seed_high, seed_low = np.asarray([sequence.seed >> 32, sequence.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    # As many tokens as it may get at most: the parameter alone goes up to the largest int32.
    min_tokens = min(params.min_tokens, sequence.request.max_tokens)
    from_sequence = {
        "num_prompt": sequence.num_prompt,
        "seed_high": seed_high,
        "seed_low": seed_low,
        "min_length": sequence.num_prompt + min_tokens if min_tokens else 0,
        "num_bias": len(bias),
    }
    # A Python float beyond float32's range, such as a temperature of 1e300, means its largest number.
    most = np.finfo(np.float32).max
    floats = np.clip([getattr(params, name) for name in FLOATS], -most, most).astype(np.float32)
    ints = np.asarray(
        [from_sequence[name] if name in from_sequence else getattr(params, name) for name in INTS], np.int32
    )
    others = [
        -1 if number is None else number for number in (params.logprobs, params.prompt_logprobs, sequence.adapter_slot)
    ]
    bias_ids = np.full(MAX_LOGIT_BIAS, _NO_TOKEN, np.int32)
    bias_ids[: len(bias)] = list(bias)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_values[: len(bias)] = list(bias.values())
    banned = np.full(MAX_BANNED, _NO_TOKEN, np.int32)
    held_back = sorted({*params.stop_tokens, *eos_token_ids}) if params.min_tokens else []
    banned[: len(held_back)] = held_back
    slot = np.asarray([sequence.slot], np.int32)
    sampling = [floats.view(np.int32), ints, bias_ids, bias_values.view(np.int32), banned]
    return np.concatenate([slot, tokens, tables.ravel(), *sampling, np.asarray(others, np.int32)])


def admit(slots: Slots, packed: Int[Array, "n"], *, num_tokens: int, block_size: int) -> Slots:
    """Fill one slot from `pack_admission`'s array. Donate `slots`.

    Columns after the given number of tokens, and after their blocks, keep what the sequence before has left there:
    nothing reads them before they are written.
    """
    slot, at = packed[0], 1

    def write(field: Array, width: int) -> Array:
        nonlocal at
        row = packed[at : at + width]
        at += width
        if field.dtype == jnp.float32:
            row = lax.bitcast_convert_type(row, jnp.float32)
        return lax.dynamic_update_slice(field, row[None], (slot, jnp.zeros_like(slot)))

    tokens = write(slots.tokens, num_tokens)
    tables = tuple(write(table, -(-num_tokens // block_size)) for table in slots.page_tables)
    return Slots(tokens, tables, jax.tree.map(lambda field: write(field, field.shape[1]), slots.params))
