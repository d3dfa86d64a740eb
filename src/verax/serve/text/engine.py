"""`TextEngine`: the members of `AsyncLLM` that the server uses, which remote replicas have too."""

from __future__ import annotations

from collections import abc
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from verax.models import CausalLMConfig
from verax.text.engine.engine_thread import Observer
from verax.text.engine.outputs import EngineStats, RequestOutput
from verax.text.engine.request import Message, Prompt
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import LoRARequest
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["TextEngine"]


class TextEngine(Protocol):
    """A text model for many callers on one event loop. Members mean what they mean in `AsyncLLM`."""

    @property
    def max_queued_requests(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_config(self) -> CausalLMConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def stats(self) -> EngineStats: ...

    def replica_stats(self) -> list[EngineStats]: ...

    def add_observer(self, observer: Observer) -> None: ...

    def default_sampling_params(self, **overrides: Any) -> SamplingParams: ...

    def generate(
        self,
        prompt: Prompt | abc.Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        continue_from: abc.Sequence[abc.Sequence[int]] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def render(
        self,
        messages: abc.Sequence[Message],
        *,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> str: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def shutdown(self, timeout: float = 0) -> None: ...
