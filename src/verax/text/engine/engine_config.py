"""Options of the text engine: sizes, cache and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

import jax.numpy as jnp
from jax.typing import DTypeLike

from verax.errors import InvalidParameterError
from verax.models import DTYPES
from verax.text.features.speculative_config import SpeculativeConfig

__all__ = ["CACHE_DTYPES", "KV_CACHE_DTYPES", "EngineConfig", "EngineOptions"]

CACHE_DTYPES: dict[str, DTypeLike] = {**DTYPES, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Dtypes of a cache by vLLM's names; `"int8"` and `"fp8"` have a scale for each token and head."""

KV_CACHE_DTYPES = ("auto", *CACHE_DTYPES)
"""`"auto"` is the dtype of the weights."""


_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "tensor_parallel_size",
    "data_parallel_size",
    "nnodes",
    "master_port",
)


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` as keyword arguments."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int
    kv_cache_memory: int | None
    kv_cache_dtype: str
    enable_prefix_caching: bool | None
    seed: int
    structured_outputs: bool
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    tensor_parallel_size: int
    data_parallel_size: int
    programs: str | Path | None
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class EngineConfig:
    """Options of the text engine, by vLLM's names.

    Attributes:
        max_model_len: longest sequence, prompt and answer, in tokens. If None: the model's own, or less where the cache
            cannot hold that.
        max_num_seqs: most sequences in one step. If None: 256, or in a model with recurrent layers as many as half of
            the cache's memory has states for.
        max_num_batched_tokens: token budget of a step. If None: 512 on a CPU and 2048 elsewhere, at least max_num_seqs.
        block_size: tokens in a block of the cache.
        kv_cache_memory: bytes for the cache on each device, recurrent states included. If None: as much as
            `max_num_seqs` full sequences need, but at most a quarter of the free memory of a CPU, or what 90% of an
            accelerator's leave beside the weights.
        kv_cache_dtype: `"auto"` for that of the weights, or `"bfloat16"`, `"float32"`, `"int8"`, `"fp8"`
            (float8_e4m3fn). With the last two nearly twice as many tokens as with bfloat16 fit into the same memory.
            int8 is the more exact one in most models, and the one that a CPU has kernels for.
        enable_prefix_caching: keep full blocks of earlier requests for prompts that begin alike. If None: yes, but not
            in a model with recurrent layers, whose state after a prefix no block holds.
        seed: seeds requests that bring no seed of their own.
        structured_outputs: take requests with `SamplingParams(structured_outputs=...)`. Needs llguidance; sampling then
            has compiled programs of its own too.
        speculative_config: draft tokens and verify several in a step: a `SpeculativeConfig`, a dictionary of its
            fields, or JSON text of one. None: no drafts.
        enable_lora: take requests with a `LoRARequest`. Steps with an adapter have compiled programs of their own.
        max_loras: adapters that one step can use. Requests with more adapters wait for each other.
        max_lora_rank: largest rank of an adapter. Each slot takes memory and time for this rank, whatever the adapters
            have.
        max_cpu_loras: adapters that are kept in host memory; `max_loras` if None.
        tensor_parallel_size: devices that share the model: each holds a part of the weights and of the cache. Those of
            all hosts together.
        data_parallel_size: replicas of the model, each on `tensor_parallel_size` devices of its own. Sizes are those of
            one replica.
        programs: folder that `LLM.write_programs` or `verax compile` made: its programs are loaded instead of compiled,
            and sizes that no option names are its own. None: compile.
        nnodes: hosts that share the model, each with a process of its own and as many devices as the others.
        node_rank: number of this host. Rank 0 takes requests; the others call `LLM.follow`.
        master_addr: address of rank 0, where it listens: `HOST`, or `HOST:PORT` in place of `master_port`.
        master_port: port of rank 0.

    Raises:
        InvalidParameterError: for a size below 1, an unknown dtype or no truth value, with the option's name.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None
    seed: int = 0
    structured_outputs: bool = False
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    programs: str | Path | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameterError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if self.max_model_len == 1:
            raise InvalidParameterError("max_model_len: at least 2, a prompt token and an answer token")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidParameterError(
                f"kv_cache_dtype: expected one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}"
            )
        for name in ("structured_outputs", "enable_lora"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameterError(f"{name}: expected True or False, got {value!r}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise InvalidParameterError(
                f"max_cpu_loras: {self.max_cpu_loras} is less than max_loras ({self.max_loras})"
            )
        if self.speculative_config is not None:
            parsed = SpeculativeConfig.from_value(self.speculative_config)
            object.__setattr__(self, "speculative_config", parsed)
        self._check_hosts()

    def _check_hosts(self) -> None:
        if isinstance(self.node_rank, bool) or not isinstance(self.node_rank, int) or self.node_rank < 0:
            raise InvalidParameterError(f"node_rank: expected a whole number of at least 0, got {self.node_rank!r}")
        if self.node_rank >= self.nnodes:
            raise InvalidParameterError(
                f"node_rank: {self.nnodes} hosts (nnodes) have the numbers 0 to {self.nnodes - 1}, got {self.node_rank}"
            )
        if self.tensor_parallel_size % self.nnodes:
            raise InvalidParameterError(
                f"tensor_parallel_size: {self.tensor_parallel_size} devices do not divide over {self.nnodes} hosts "
                "(nnodes), which have the same number each"
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise InvalidParameterError(
                "data_parallel_size: several hosts (nnodes) run one replica; put a router in front of several groups"
            )
        try:
            _ = self.coordinator
        except (TypeError, ValueError):
            raise InvalidParameterError(
                f"master_addr: expected HOST, HOST:PORT or [IPV6]:PORT, got {self.master_addr!r}"
            ) from None

    @property
    def coordinator(self) -> str:
        """Address of rank 0 as `HOST:PORT`."""
        address = urlsplit(f"//{self.master_addr}")
        if not address.hostname or address.netloc != self.master_addr:
            raise ValueError(self.master_addr)
        host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
        return f"{host}:{address.port or self.master_port}"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, as the record that construction made of it."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    def with_options(self, options: EngineOptions) -> EngineConfig:
        """A copy with some fields replaced.

        Raises:
            InvalidParameterError: for an option that is no field, or a value out of range.
        """
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(options) - set(known)):
            raise InvalidParameterError(
                f"{', '.join(unknown)}: no such option; the engine's options are {', '.join(known)}"
            )
        return replace(self, **options)
