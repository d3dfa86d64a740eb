"""Requests: what a caller gives, the record that the engine works with, and each sequence that is sampled for it.

A `RequestInput` is what a caller says, plain data that travels between threads and machines. `Engine.prepare` makes the
`Request` of it, once and complete: tokens, limits, grammar, adapter. Nothing of either changes afterwards but the
progress of a request. The records hold no arrays.
"""

from __future__ import annotations

import enum
import operator
import time
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verax.errors import InvalidParameterError, VeraxError
from verax.text.engine.outputs import FinishReason, Logprob, RequestMetrics
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.grammar import Grammar, GrammarMatcher
from verax.text.features.lora import LoadedAdapter, LoRARequest
from verax.text.tokens.tokenizer import IncrementalDetokenizer

Prompt = str | abc.Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dictionaries: `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": text}`, and what else the chat template reads."""


def batch_of(prompts: Prompt | abc.Sequence[Prompt]) -> list[str | abc.Sequence[int]]:
    """Texts and token ids of a batch. One text, one dictionary or one list of token ids is a batch of one."""
    if isinstance(prompts, (str, Mapping)):
        return [content(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise InvalidParameterError(f"prompts: expected texts or lists of token ids, got {prompts!r}")
    items: list[Any] = list(prompts)
    # A number in an array of JAX or PyTorch has a `__len__`, too, which fails.
    if items and (not hasattr(items[0], "__len__") or getattr(items[0], "ndim", None) == 0):
        return [items]
    return [content(item) for item in items]


def content(prompt: Any) -> str | abc.Sequence[int]:
    """Text or token ids of one prompt; `prompt_token_ids` of a dictionary before its `prompt`."""
    if not isinstance(prompt, Mapping):
        return prompt
    names = ("prompt_token_ids", "prompt")
    if unknown := sorted(str(key) for key, value in prompt.items() if key not in names and value is not None):
        raise InvalidParameterError(
            f"prompts: {', '.join(unknown)}: no such field; a dictionary has prompt or prompt_token_ids"
        )
    for name in names:
        if prompt.get(name) is not None:
            return prompt[name]
    raise InvalidParameterError("prompts: expected prompt or prompt_token_ids in a dictionary, got neither")


def token_ids(name: str, tokens: Any) -> tuple[int, ...]:
    """Token ids as plain whole numbers, of whatever library they are."""
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError:
        ids = None
    if ids is None or bool in set(map(type, tokens)):
        raise InvalidParameterError(f"{name}: expected token ids, which are whole numbers, got {tokens!r}"[:300])
    return ids


@dataclass(frozen=True)
class RequestInput:
    """A request in the words of its caller: plain data, which threads and machines pass on as one value."""

    prompt: Prompt | abc.Sequence[Message]
    """Text, token ids, or the messages of a conversation; a dictionary of text or ids becomes what it holds."""
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    """Id that no unfinished request has; None for a new one."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens to a text. A conversation's template has written them already."""
    continues_prompt: bool | None = None
    """True if the answer's text follows the prompt's, False if it is a message of its own, which begins without the
    space that sentencepiece's decoders strip; None for `add_special_tokens`, as plain prompts have it."""
    stream: bool = False
    """Decode the text token by token, in `Sequence.detokenizer`, so that it can be shown as it grows."""
    output_token_ids: abc.Sequence[abc.Sequence[int]] | None = None
    """Answer so far of each sample. The request continues as if it had sampled these tokens itself: they count for
    `max_tokens`, and have no log-probabilities. `Sequence.detokenizer` shows only what they leave undecided."""
    lora_request: LoRARequest | None = None
    """Adapter of the request; None for the base model."""
    arrival_time: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise InvalidParameterError(f"sampling_params: expected SamplingParams, got {self.params!r}")
        answers = self.output_token_ids
        if answers is not None and len(answers) != self.params.n:
            raise InvalidParameterError(
                f"output_token_ids: expected an answer for each of {self.params.n}, got {len(answers)}"
            )
        if not isinstance(self.request_id, str | None):
            raise InvalidParameterError(f"request_id: expected a text, got {self.request_id!r}")
        prompt: Any = content(self.prompt)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray):
            raise InvalidParameterError(f"prompt: expected a text, token ids or messages, got {prompt!r}")
        object.__setattr__(self, "prompt", prompt if isinstance(prompt, str) else tuple(prompt))

    @property
    def is_text(self) -> bool:
        """True for a text."""
        return isinstance(self.prompt, str)

    @property
    def is_chat(self) -> bool:
        """True for the messages of a conversation."""
        return isinstance(self.prompt, tuple) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


class SequenceState(enum.Enum):
    """State of a sequence: `WAITING` owns no blocks and no slot, `RUNNING` owns both, `FINISHED` gave them back."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One token sequence: a request has `n` of them, alike but for their seeds.

    Invariants: `num_computed <= num_tokens`; a running sequence's tables cover `num_computed` tokens; `num_pending` is
    the number of tokens that the device has sampled, or will, and the host has not read yet: of two steps at most.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int]
    """Prompt and the sampled tokens that the host has seen."""
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    adapter_slot: int | None = None
    """Place of its adapter on the device while it runs; None without an adapter."""
    tables: list[list[int]] = field(default_factory=list)
    """Block table of each cache group, 0 in the places of blocks that were given back. Empty while it waits."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache once every dispatched step has run."""
    num_pending: int = 0
    num_skipped: int = 0
    """Tokens that the model's prediction head has not read, because only decode steps computed them."""
    is_predicted: bool = False
    """True if the head has read the newest token, so that the next step can draft."""
    matched: tuple[tuple[int, int], list[Any], int] | None = None
    """Cached prefixes of its tokens, with the version of the prefix tree and the number of tokens that they are of, and
    the blocks of keys and values that are cached, in models with recurrent layers of a longer prefix."""
    state_borders: list[int] = field(default_factory=list)
    """Numbers of computed tokens, ascending, after which its recurrent state is to be kept."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    detokenizer: IncrementalDetokenizer | None = None
    """Running text, in requests that are streamed or have stop strings."""
    matcher: GrammarMatcher | None = None
    """Place in the grammar of a request with structured output, after the tokens that the host has seen."""

    @property
    def adapter_id(self) -> int | None:
        """Number of the adapter that computes its keys and values; None for the base model."""
        return self.request.adapter_id

    @property
    def uses_cache(self) -> bool:
        """False if all of its prompt is scored, so that all of it must be computed."""
        return self.request.params.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        """Length with the tokens that are still on their way from the device."""
        return len(self.tokens) + self.num_pending

    @property
    def num_to_compute(self) -> int:
        """Tokens that the next step could take: the rest of the prompt, or 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def exhausted(self) -> bool:
        """True if every token that it may get is sampled or on its way, so that nothing is left to schedule."""
        return self.num_tokens - self.num_prompt >= self.request.max_tokens

    @property
    def num_prompt(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_tokens(self) -> list[int]:
        """The sampled tokens that the host has seen."""
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        """True if nothing more will be appended."""
        return self.state is SequenceState.FINISHED

    def __repr__(self) -> str:
        name, progress = f"{self.request.request_id}/{self.index}", f"{self.num_computed}/{self.num_tokens}"
        return f"<sequence {name} {self.state.value} {progress}>"


@dataclass(eq=False)
class Request:
    """A request as the engine works with it, and its progress. `Engine.prepare` makes it, complete and checked."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None for token ids."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    """Tokens that each sequence may get: the parameter, cut to what the context holds."""
    metrics: RequestMetrics
    stream: bool = False
    """True if the text is decoded token by token, to be shown as it grows."""
    grammar: Grammar | None = None
    adapter: LoadedAdapter | None = None
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    """Answer so far of each sample, with which it begins; empty for none."""
    text_before: tuple[int, ...] = ()
    """Tokens whose text the answer's continues: the prompt's, or none where it is a message of its own."""
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: VeraxError | None = None

    @property
    def adapter_id(self) -> int | None:
        """Number of the adapter; None for the base model."""
        return None if self.adapter is None else self.adapter.id

    @property
    def finished(self) -> bool:
        """True if every sequence has finished."""
        for sequence in self.sequences:  # noqa: SIM110  (it is read several times a step, and `all` takes twice as long)
            if sequence.state is not SequenceState.FINISHED:
                return False
        return True

    def note(self, **metrics: Any) -> None:
        """Replace some of its metrics. What an output has of them does not change."""
        self.metrics = replace(self.metrics, **metrics)
