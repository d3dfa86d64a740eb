"""`AsyncLLM`: engines on threads of their own, for many callers on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections import abc
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verax.errors import InvalidParameterError
from verax.models import CausalLMConfig
from verax.text.engine.engine import NO_TOKENIZER
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.engine_thread import LiveRequest, Observer, RequestStream, dead
from verax.text.engine.llm import LLM
from verax.text.engine.outputs import EngineStats, RequestOutput
from verax.text.engine.replicas import Replicas
from verax.text.engine.request import Message, Prompt, RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.grammar import MAX_COMPILING
from verax.text.features.lora import LoRARequest
from verax.text.tokens.tokenizer import Tokenizer

TOKENIZER_THREADS = 2
"""Threads that render templates and tokenise. The tokenizer is quick, and shares the CPU with the model."""


class AsyncLLM:
    """A language model for many callers at once: each request is an asynchronous generator.

    Each engine runs on a thread of its own: one, or `data_parallel_size` of them, to which requests are routed.
    Requests of one event loop at a time are served.

    Examples:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
        ...         print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ):
        """Load a checkpoint as `LLM` does, and start the engine thread.

        Args:
            model: as in `LLM`, and so are all arguments that are not listed here.
            max_queued_requests: most samples that wait beyond those that find a free slot at once. `n` samples of a
                request count as `n`.
            max_queued_tokens: most prompt tokens of samples that wait; None for no bound. One request may wait whatever
                its length.
            options: arguments of `LLM`, such as `dtype`, and fields of `EngineConfig` by name.

        Raises:
            VeraxError: as `LLM`.
            InvalidParameterError: for a bound that is not a whole number, and as `LLM`.
        """
        _check_bounds(max_queued_requests, max_queued_tokens)
        rank = options.get("node_rank", 0 if config is None else config.node_rank)
        if rank:
            raise InvalidParameterError(f"node_rank: rank 0 takes requests; rank {rank} runs LLM(...).follow()")
        self._start(LLM(model, config=config, **options), max_queued_requests, max_queued_tokens)

    @classmethod
    def from_llm(cls, llm: LLM, *, max_queued_requests: int = 1024, max_queued_tokens: int | None = None) -> AsyncLLM:
        """An AsyncLLM of a loaded LLM, which must not be used by itself until `shutdown`.

        Raises:
            InvalidParameterError: for a bound that is not a whole number, or an LLM with unfinished requests.
        """
        _check_bounds(max_queued_requests, max_queued_tokens)
        if llm.has_unfinished_requests:
            raise InvalidParameterError("llm: it has unfinished requests; run its steps to their end, or abort them")
        self = cls.__new__(cls)
        self._start(llm, max_queued_requests, max_queued_tokens)
        return self

    def _start(self, llm: LLM, max_queued_requests: int, max_queued_tokens: int | None) -> None:
        self.llm = llm
        self.model_config: CausalLMConfig = llm.model_config
        self.max_model_len, self.max_num_seqs = llm.max_model_len, llm.max_num_seqs
        """Longest sequence that is served, in tokens, and most sequences in one step, of all replicas together."""
        self._names = itertools.count()
        self._closing = False
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, "verax-tokenizer")
        # Work that may take seconds has threads of its own, so that no other prompt waits for it.
        self._grammars = ThreadPoolExecutor(MAX_COMPILING, "verax-grammars")
        self._adapters = ThreadPoolExecutor(TOKENIZER_THREADS, "verax-adapters")
        self._long_texts = ThreadPoolExecutor(1, "verax-long-texts")
        self._replicas = Replicas(
            llm.engines, max_queued_requests=max_queued_requests, max_queued_tokens=max_queued_tokens
        )
        # The threads hold no reference to this object, so that dropping it ends them.
        weakref.finalize(self, self._replicas.stop).atexit = False

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer."""
        return self.llm.tokenizer

    @property
    def is_running(self) -> bool:
        """True if requests are taken: every engine serves."""
        return self._replicas.is_running and not self._closing

    @property
    def max_queued_requests(self) -> int:
        """Most samples that wait beyond those that find a free slot at once."""
        return self._replicas.max_queued_requests

    @property
    def error(self) -> BaseException | None:
        """The error that an engine failed with."""
        return self._replicas.error

    def stats(self) -> EngineStats:
        """State of the engines now and their totals, summed over all replicas."""
        return EngineStats.sum(self.replica_stats())

    def replica_stats(self) -> list[EngineStats]:
        """State and totals of each replica. Requests whose prompt is being tokenised wait for the first one."""
        return self._replicas.stats()

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters that the checkpoint recommends, with some of them replaced."""
        return self.llm.default_sampling_params(**overrides)

    @property
    def chat_sampling(self) -> dict[str, float]:
        """Temperature and top_p of conversations, if the checkpoint recommends no sampling; else nothing."""
        return self.llm.chat_sampling

    def add_observer(self, observer: Observer) -> None:
        """Call a function on the event loop with the number of a replica, and what happened there.

        That is `StepStats` once a step, and the `RequestOutput` of each request: the whole one, of a request that has
        ended in any way but an error. An error of the function is logged.
        """
        self._replicas.outbox.observers.append(observer)

    def generate(
        self,
        prompt: Prompt | abc.Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        continues_prompt: bool | None = None,
        continue_from: abc.Sequence[abc.Sequence[int]] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers to a prompt or a conversation, as they grow: each output has what is new since the one before.

        `outputs` has the samples that got something, with their new text, tokens and log-probabilities. A sample's last
        part has the reason of its end, and the request's last output is `finished`. Parts that were not taken in time
        are joined. All parts together equal the output of `LLM.generate`.

        This call takes a place in the queue, and the prompt is tokenised afterwards. Closing the generator, or
        cancelling the task that waits for it, aborts the request at once.

        Args:
            prompt: a text, token ids, a dictionary of either, or the messages of a conversation.
            sampling_params: the checkpoint's recommended ones if None.
            request_id: an id that no unfinished request has; a new one if None.
            add_special_tokens: let the tokenizer add its special tokens to a text.
            continues_prompt: the answer's text follows the prompt's, as after an answer that a chat template left open.
                False if it is a message of its own, which begins without a space that sentencepiece's decoders strip;
                None for `add_special_tokens`.
            continue_from: an answer so far for each sample. The request continues as it would have without a break, if
                seeds are given, and outputs have what is new only.
            lora_request: adapter of the request; the base model if None. It is read in a thread.

        Raises:
            QueueFullError: at once if the queue is full. A text's tokens count once they are known: if they do not fit,
                the generator raises it.
            EngineDeadError: if the engine has failed or was shut down, at once or later.
            InvalidParameterError: for arguments that make no sense, at once or from the generator.
            RequestRefusedError: from the generator, if the request can never be served.
            CheckpointError: from the generator, if the adapter cannot be read or does not fit the model.
        """
        inputs = self._inputs(
            prompt,
            sampling_params,
            request_id=request_id,
            add_special_tokens=add_special_tokens,
            continues_prompt=continues_prompt,
            continue_from=continue_from,
            lora_request=lora_request,
        )
        return self.submit(inputs)

    async def collect(
        self, prompt: Prompt | abc.Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The whole output of a request: all that `generate` gives, joined. It takes the arguments of `generate`.

        Raises:
            VeraxError: as `generate`.
        """
        return await anext(self.submit(self._inputs(prompt, sampling_params, **options), whole=True))

    async def render(
        self,
        messages: abc.Sequence[Message],
        *,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> str:
        """The prompt of a conversation, by the checkpoint's chat template. It is rendered in a thread.

        Raises:
            EngineDeadError: if the engine has failed or was shut down.
        """
        self._check_running()
        call = partial(self.llm.render, messages, tools=tools, **template_options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, tokenised in a thread. Texts that are too long for a prompt hold up no prompt.

        Raises:
            InvalidParameterError: if there is no tokenizer.
            EngineDeadError: if the engine has failed or was shut down.
        """
        if self.tokenizer is None:
            raise InvalidParameterError(f"text: {NO_TOKENIZER}")
        self._check_running()
        pool = self._pool if self.llm.engine.fits(text) else self._long_texts
        call = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def abort(self, request_id: str) -> None:
        """Stop a request: its generator gives what is left, with `finish_reason` "abort". Unknown ids are ignored."""
        if (live := self._replicas.outbox.live.get(request_id)) is not None:
            live.aborted = True
            self._replicas.abort(live)

    async def shutdown(self, timeout: float = 0) -> None:
        """Take no new requests, let the others run for up to `timeout` seconds, abort the rest, end the threads."""
        self._closing = True
        replicas, outbox = self._replicas, self._replicas.outbox
        if outbox.live and replicas.is_running and timeout > 0:
            outbox.all_ended = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(outbox.all_ended.wait(), timeout)
        await asyncio.to_thread(replicas.stop)
        outbox.deliver()
        outbox.fail_all(replicas.error, "the engine was shut down")
        for pool in (self._pool, self._grammars, self._adapters, self._long_texts):
            pool.shutdown(wait=False, cancel_futures=True)

    def _inputs(
        self, prompt: Any, params: SamplingParams | None, *, continue_from: Any = None, **fields: Any
    ) -> RequestInput:
        params = params or self.default_sampling_params()
        return RequestInput(prompt, params, output_token_ids=continue_from, **fields)

    def submit(self, inputs: RequestInput, *, whole: bool = False) -> RequestStream:
        """Answers to a request as `generate` gives them, or with `whole` in one output.

        Raises:
            VeraxError: as `generate`.
        """
        self._check_running()
        if self.tokenizer is None and (inputs.is_text or inputs.is_chat):
            raise InvalidParameterError(f"prompt: {NO_TOKENIZER}; give token ids")
        self._bind_loop()
        streamed = self.tokenizer is not None and (not whole or inputs.output_token_ids is not None)
        inputs = replace(inputs, stream=streamed)
        live = LiveRequest(inputs.request_id or self._free_id(), inputs, asyncio.get_running_loop(), whole)
        self._replicas.join(live)
        if inputs.params.form is not None:
            self._grammars.submit(self._prepare, live)
        elif inputs.lora_request is not None:
            self._adapters.submit(self._prepare, live)
        elif inputs.is_text or inputs.is_chat:
            self._pool.submit(self._prepare, live)
        else:
            self._prepare(live)
        return RequestStream(live, self._replicas.abort)

    def _check_running(self) -> None:
        if not self.is_running:
            raise dead("the engine has failed" if self.error else "the engine was shut down", self.error)

    def _bind_loop(self) -> None:
        """Serve the running event loop from now on."""
        loop, outbox = asyncio.get_running_loop(), self._replicas.outbox
        if outbox.loop is loop:
            return
        if outbox.loop is not None and outbox.loop.is_closed():
            for live in list(outbox.live.values()):
                live.closed = True
                self._replicas.abort(live)
            outbox.live.clear()
        if outbox.live:
            raise InvalidParameterError("AsyncLLM: another event loop has unfinished requests; one at a time is served")
        outbox.loop = loop
        outbox.deliver()  # a wake-up that the loop before was closed without seeing would be the last one

    def _free_id(self) -> str:
        return next(name for i in self._names if (name := f"request-{i}") not in self._replicas.outbox.live)

    def _prepare(self, live: LiveRequest) -> None:
        """Tokenise a request, compile its grammar, load its adapter, and send it to a replica. Any thread may."""
        if live.closed or live.aborted:
            return self._replicas.drop(live)
        try:
            request = self.llm.engine.prepare(live.inputs, live.request_id)
        except BaseException as error:
            self._replicas.drop(live, error)
        else:
            self._replicas.send(live, request)


def _check_bounds(max_queued_requests: int, max_queued_tokens: int | None) -> None:
    for name, bound in {"max_queued_requests": max_queued_requests, "max_queued_tokens": max_queued_tokens}.items():
        whole = isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0
        if not whole and not (bound is None and name == "max_queued_tokens"):
            raise InvalidParameterError(f"{name}: expected a whole number of at least 0, got {bound!r}")
