"""Options of the text engine (sizes, cache, devices) and of speculative decoding, by vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verax.errors import InvalidParameterError
from verax.options import check_options, documented, option, options_of

KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8", "fp8")

METHODS = ("ngram", "draft_model", "mtp")

MTP_NAMES = ("qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's older names of `"mtp"`."""

LOOKUP = 5
"""Tokens that `"ngram"` looks up if neither bound is given; vLLM's default."""

MOST_DRAFTS = 32
"""Most drafts of a sequence in a step: longer ones hardly ever hold."""

MOST_PREDICTED, USUALLY_PREDICTED = 8, 3
"""Most drafts of a prediction head, each of which is a part of the compiled step, and the default."""

MOST_STEPS = 32
"""Most tokens of a sequence that a step decodes: what follows the end of an answer is computed in vain."""

_FORM = '{"method": "ngram", "num_speculative_tokens": 4} or {"method": "draft_model", "model": ..., ...}'

_LORA = "LoRA adapters"
_HOSTS = "Several hosts"


@documented
@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding, by vLLM's names."""

    num_speculative_tokens: int = option(
        None, f'Most drafts of a sequence in a step; {USUALLY_PREDICTED} with "mtp".', low=1, high=MOST_DRAFTS
    )
    method: str | None = option(
        None,
        '"ngram" (prompt lookup), "draft_model" or "mtp" (the checkpoint\'s head of multi-token prediction); '
        '"draft_model" if None and `model` is given.',
        choices=METHODS,
    )
    model: str | None = option(None, "The draft model: a folder, a GGUF file, a hub id.")
    prompt_lookup_max: int | None = option(
        None, '"ngram": most tokens at the end of the text that are looked up in it.', low=1
    )
    prompt_lookup_min: int | None = option(
        None, '"ngram": fewest. If one bound is left out it is the other; if both are, they are 5.', low=1
    )
    disable_by_batch_size: int | None = option(
        None, '"mtp": most sequences in a step with drafts; 4 on a CPU and 64 elsewhere if None.', low=1
    )

    def __post_init__(self) -> None:
        if self.method in MTP_NAMES:
            object.__setattr__(self, "method", "mtp")
        if self.method == "mtp" and self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", USUALLY_PREDICTED)
        try:
            check_options(self)
            self._complete()
        except InvalidParameterError as error:
            raise InvalidParameterError(f"speculative_config: {error}") from None

    def _complete(self) -> None:
        """Fill in what was left out, and refuse what does not go together."""
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        method = self.method or ("draft_model" if self.model is not None else None)
        if method is None:
            raise InvalidParameterError(f"method: expected one of {', '.join(METHODS)}, got none")
        object.__setattr__(self, "method", method)
        if method != "mtp" and self.disable_by_batch_size is not None:
            raise InvalidParameterError('disable_by_batch_size belongs to the method "mtp"')
        if method != "ngram" and (lowest is not None or highest is not None):
            raise InvalidParameterError('prompt_lookup_min and prompt_lookup_max belong to the method "ngram"')
        if method == "draft_model":
            if not isinstance(self.model, str):
                raise InvalidParameterError(
                    f'model: the method "draft_model" needs a folder, a GGUF file or a hub id, got {self.model!r}'
                )
            return
        if self.model is not None:
            raise InvalidParameterError(f'model: the method "{method}" has none')
        if method == "mtp":
            if self.num_speculative_tokens > MOST_PREDICTED:
                raise InvalidParameterError(
                    f'num_speculative_tokens: expected at most {MOST_PREDICTED} with the method "mtp", got '
                    f"{self.num_speculative_tokens}"
                )
            return
        low = lowest or highest or LOOKUP
        high = highest or low
        if low > high:
            raise InvalidParameterError(f"prompt_lookup_min: {low} is more than prompt_lookup_max ({high})")
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    @classmethod
    def from_value(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """The record itself, a dictionary of its fields, or JSON text of one."""
        if isinstance(value, cls):
            return value
        try:
            given = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise InvalidParameterError(f"speculative_config: expected JSON such as {_FORM}: {error}") from error
        if not isinstance(given, Mapping):
            raise InvalidParameterError(f"speculative_config: expected {_FORM}, got {value!r}")
        if unknown := sorted(str(name) for name in given if name not in options_of(cls)):
            raise InvalidParameterError(
                f"speculative_config: {', '.join(unknown)}: no such field; the fields are {', '.join(options_of(cls))}"
            )
        model = given.get("model")
        return cls(**{**given, "model": str(model) if isinstance(model, Path) else model})


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Options of the text engine.

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
    num_scheduler_steps: int | None = option(
        None,
        "Tokens of each sequence that a step decodes at most, one after the other on the device, while nothing waits "
        "for a place: the host schedules once for all, and a stream gets them together. Steps with log-probabilities, "
        "grammars or adapters decode one, steps of 256 sequences at most four. If None: up to 8 on a GPU, fewer for "
        "more than 1.2 GB of weights; on a CPU up to 4 of at most four sequences, fewer for more than 250 MB; else 1.",
        low=1,
        high=MOST_STEPS,
        shown="up to 8 on a GPU, 4 on a CPU",
    )
    block_size: int = option(16, "Tokens in a block of the cache.", low=1)
    kv_cache_memory: int | None = option(
        None,
        "Bytes of the cache on each device, recurrent states included. If None: the need of `max_num_seqs` full "
        "sequences, but with the slots at most a quarter of the free memory of a CPU, or what the weights leave of "
        "90% of an accelerator's.",
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
        "Keep full blocks of earlier requests for prompts that begin alike, and in a model with recurrent layers some "
        "of the states that prefixes left. If None: yes, unless the memory has no room for such a state.",
        shown="where there is room",
    )
    seed: int = option(
        0,
        "The same seed gives the same text. It seeds requests that bring no seed of their own.",
        low=0,
        high=2**63 - 1,
    )
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
        if self.speculative_config is not None and (self.num_scheduler_steps or 1) > 1:
            raise InvalidParameterError(
                "num_scheduler_steps: with drafts (speculative_config) a step decodes once; leave one of them out"
            )
        if self.uses_prediction_head and (self.enable_lora or self.nnodes > 1):
            other = "adapters (enable_lora)" if self.enable_lora else "several hosts (nnodes)"
            raise InvalidParameterError(f'speculative_config: the method "mtp" is not implemented with {other}')
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

    @property
    def uses_prediction_head(self) -> bool:
        """True if the model's head of multi-token prediction makes drafts."""
        return self.speculation is not None and self.speculation.method == "mtp"

    def with_options(self, options: Mapping[str, Any]) -> EngineConfig:
        """A copy with some fields replaced.

        Raises:
            InvalidParameterError: for an option that is not a field, or a value out of range.
        """
        if unknown := sorted(set(options) - set(options_of(EngineConfig))):
            raise InvalidParameterError(
                f"{', '.join(unknown)}: no such option; the engine's options are {', '.join(options_of(EngineConfig))}"
            )
        return replace(self, **options)
