"""Options of the text engine: sizes, cache and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from verax.errors import InvalidParameterError
from verax.options import check_options, documented, option
from verax.text.features.speculative_config import SpeculativeConfig

__all__ = ["EngineConfig", "EngineOptions"]

KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8", "fp8")

_LORA = "LoRA adapters"
_HOSTS = "Several hosts"


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


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Options of the text engine, by vLLM's names.

    Raises:
        InvalidParameterError: for a value of another type or out of range, with the option's name.
    """

    max_model_len: int | None = option(
        None,
        "Longest text, prompt and answer, in tokens. If None: the model's own, or less where the cache is too small.",
        low=1,
        shown="the model's, or what fits",
    )
    max_num_seqs: int | None = option(
        None,
        "Most sequences in one step. If None: 256, or in a model with recurrent layers as many as half of "
        "the cache's memory has states for.",
        low=1,
        shown="256, or what fits",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of a step. If None: 512 on a CPU and 2048 elsewhere, at least max_num_seqs.",
        low=1,
        shown="512 on a CPU, else 2048",
    )
    block_size: int = option(16, "Tokens in a block of the cache.", low=1)
    kv_cache_memory: int | None = option(
        None,
        "Bytes of the cache on each device, recurrent states included. If None: the need of `max_num_seqs` full "
        "sequences, but at most a quarter of the free memory of a CPU, or what the weights leave of 90% of an "
        "accelerator's.",
        low=1,
        shown="what fits",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Dtype of the key/value cache: auto (the weights'), bfloat16, float32, int8 or fp8. fp8 is float8_e4m3fn. With "
        "int8 and fp8 nearly twice as many tokens as with bfloat16 fit into the same memory. int8 is more exact "
        "in most models, and a CPU has kernels for it.",
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Keep full blocks of earlier requests for prompts that begin alike. If None: yes, but not in a model with "
        "recurrent layers, whose state after a prefix no block holds.",
        shown="where the model can",
    )
    seed: int = option(0, "The same seed gives the same text. It seeds requests that bring no seed of their own.")
    structured_outputs: bool = option(
        False,
        "Take requests for JSON, tool calls and other forms; compiles more programs at the start. Such requests have "
        "`SamplingParams(structured_outputs=...)`, and need llguidance.",
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = option(
        None,
        'Draft tokens and verify several in a step: JSON such as {"method": "ngram", "num_speculative_tokens": 4}. In '
        "Python also a `SpeculativeConfig`, or a dictionary of its fields.",
        shown="no drafts",
    )
    enable_lora: bool = option(
        False,
        "Take requests with a LoRA adapter; adapters that are named do so too. Steps with an adapter have compiled "
        "programs of their own.",
        panel=_LORA,
    )
    max_loras: int = option(
        1, "Adapters that one step can use. Requests with more adapters wait for each other.", low=1, panel=_LORA
    )
    max_lora_rank: int = option(
        16,
        "Largest rank of an adapter. Each slot takes memory and time for this rank, whatever ranks the adapters have.",
        low=1,
        panel=_LORA,
    )
    max_cpu_loras: int | None = option(
        None,
        "Adapters that are kept in memory; others are read when they are used. If None: `max_loras`.",
        low=1,
        panel=_LORA,
        shown="all that are named",
    )
    tensor_parallel_size: int = option(
        1,
        "Devices that share the model: each holds a part of its weights and cache. They are counted over all hosts.",
        low=1,
    )
    data_parallel_size: int = option(
        1, "Replicas of the model, each on --tensor-parallel-size devices of its own. Sizes are for one replica.", low=1
    )
    programs: str | Path | None = option(
        None,
        "Folder of verax compile: load its programs, and take its sizes. `LLM.write_programs` makes such a folder too. "
        "Sizes that no option names are the folder's. If None: compile.",
        path="folder",
    )
    nnodes: int = option(
        1,
        "Hosts that share the model; each runs this command. Each has one process, and as many devices as the others.",
        low=1,
        panel=_HOSTS,
    )
    node_rank: int = option(
        0, "Number of this host; host 0 takes the requests. The others call `LLM.follow`.", low=0, panel=_HOSTS
    )
    master_addr: str = option("127.0.0.1", "Address of host 0, HOST or HOST:PORT, where it listens.", panel=_HOSTS)
    master_port: int = option(29501, "Port of host 0, if the address has none.", low=1, high=65535, panel=_HOSTS)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_model_len == 1:
            raise InvalidParameterError("max_model_len: at least 2, a prompt token and an answer token")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise InvalidParameterError(
                f"max_cpu_loras: {self.max_cpu_loras} is less than max_loras ({self.max_loras})"
            )
        if self.speculative_config is not None:
            parsed = SpeculativeConfig.from_value(self.speculative_config)
            object.__setattr__(self, "speculative_config", parsed)
        self._check_hosts()

    def _check_hosts(self) -> None:
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
        """`speculative_config` as a record."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    def with_options(self, options: EngineOptions) -> EngineConfig:
        """A copy with some fields replaced.

        Raises:
            InvalidParameterError: for an option that is not a field, or a value out of range.
        """
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(options) - set(known)):
            raise InvalidParameterError(
                f"{', '.join(unknown)}: no such option; the engine's options are {', '.join(known)}"
            )
        return replace(self, **options)
