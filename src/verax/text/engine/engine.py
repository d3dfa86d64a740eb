"""The loop around the device: requests in, one step at a time, outputs as they come. The host is one step ahead.

While the device computes step n, the host plans and dispatches step n + 1, and only then reads step n. A plan never
needs the tokens themselves, which stay on the device; what the host learns late is that a sequence has stopped, and
then one token of step n + 1 is thrown away. A plan with drafts needs the tokens: where there may be some, step n is
read first.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from verax import ops
from verax.errors import ContextLengthError, InvalidParameterError, RequestRefusedError, VeraxError
from verax.sampling_fields import MAX_LOGIT_BIAS
from verax.text.engine.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from verax.text.engine.request import Request, RequestInput, Sequence, token_ids
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import BY_STEP, Chunk, Scheduler
from verax.text.features.grammar import Grammar, GrammarCompiler
from verax.text.features.lora import AdapterLoader, LoadedAdapter, LoRARequest
from verax.text.features.speculative import Speculator
from verax.text.hosts import Dispatch
from verax.text.step.runner import ModelRunner, PendingStep
from verax.text.step.slots import MAX_BANNED
from verax.text.step.step import NOT_FINITE, Logprobs
from verax.text.tokens.tokenizer import IncrementalDetokenizer, Tokenizer

NO_TOKENIZER = "this engine has no tokenizer (skip_tokenizer_init, or a module without one)"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context in which Ctrl-C waits for its end: within a step, it would lose the arrays that the step takes over."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[Any] = []
    signal.signal(signal.SIGINT, lambda *interrupt: received.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


class Engine:
    """Scheduler, runner and tokenizer as one loop. Not thread-safe: one caller, or one lock around it."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None,
        seed: int | np.random.Generator = 0,
        speculator: Speculator | None = None,
        adapters: AdapterLoader | None = None,
    ):
        """Make an engine without requests.

        `seed`: seeds requests that bring no seed; engines that share a generator give each of them another seed.
        `adapters`: loader of adapters, which engines of equal models can share; None to take none.
        """
        self.runner = runner
        self.scheduler = scheduler
        self.speculator = speculator
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(runner.eos_token_ids)
        self.vocab_size = runner.abstract_model.config.vocab_size
        self.max_model_len = runner.config.max_model_len
        self._compiler = tokenizer and GrammarCompiler(
            tokenizer, vocab_size=self.vocab_size, eos_token_ids=runner.eos_token_ids
        )
        self._adapters = adapters
        self._requests: dict[str, Request] = {}
        self._ended: dict[Request, None] = {}
        """Finished requests whose output was not popped yet."""
        self._in_flight: PendingStep | None = None
        self._seeds = np.random.default_rng(seed)
        self.num_prompt_tokens = 0
        """Prompt tokens of the requests that got a first token."""
        self.num_generated_tokens = 0
        """Answer tokens that were sampled for unfinished sequences."""
        self.num_computed_tokens = 0
        """Tokens of all steps that were dispatched."""

    @property
    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything to do."""
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that are waiting or running."""
        return len(self._requests)

    def prepare(self, inputs: RequestInput, request_id: str) -> Request:
        """Make the request of what a caller gave: rendered, tokenised, checked. Any thread may call it.

        Raises:
            RequestRefusedError: if it could never be served: an empty or too long prompt, a token outside of the
                vocabulary.
            InvalidParameterError: for a text, a stop string or a stream without a tokenizer, or a form of the answer
                that cannot be compiled.
            CheckpointError: if the adapter cannot be read or does not fit the model.
        """
        params, prompt, special = inputs.params, inputs.prompt, inputs.add_special_tokens
        adapter, grammar = self.load_adapter(inputs.lora_request), self.compile_grammar(params)
        if inputs.is_chat:
            prompt, special = self.render(prompt), False
        tokens = self._tokenize(prompt, add_special_tokens=special)
        continues = special if inputs.continues_prompt is None else inputs.continues_prompt
        answers = tuple(token_ids("output_token_ids", answer) for answer in inputs.output_token_ids or ())
        self._check(tokens, params, stream=inputs.stream, answers=answers)
        room = self.max_model_len - len(tokens)
        return Request(
            request_id,
            prompt if isinstance(prompt, str) else None,
            tokens,
            params,
            room if params.max_tokens is None else min(params.max_tokens, room),
            RequestMetrics(inputs.arrival_time),
            inputs.stream,
            grammar,
            adapter,
            answers,
            tokens if continues else (),
        )

    def add(self, request: Request) -> None:
        """Queue a prepared request. If it is refused, what is queued already is not affected.

        Raises:
            InvalidParameterError: for an id that is in use, an answer so far that ends early, or an engine that sleeps.
        """
        self.runner.check_awake()
        if request.request_id in self._requests:
            raise InvalidParameterError(f"request_id: {request.request_id!r} is in use by an unfinished request")
        params, tokens = request.params, request.prompt_token_ids
        # Drawn for every request, so that giving one of them a seed does not change the others'.
        drawn = int(self._seeds.integers(2**63))
        seed = drawn if params.seed is None else params.seed
        for i in range(params.n):
            sequence = Sequence(request, i, _seed_of(seed, i), list(tokens), detokenizer=self._detokenizer(request))
            if request.grammar is not None:
                sequence.matcher = request.grammar.matcher()
            request.sequences.append(sequence)
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        try:
            for sequence, answer in zip(request.sequences, request.output_token_ids, strict=False):
                self._replay(sequence, answer)
        except BaseException:
            self.finish(request)
            self.remove(request)
            raise

    def render(self, messages: Any, **template_options: Any) -> str:
        """The prompt of a conversation, by the checkpoint's chat template. Any thread may call it."""
        if self.tokenizer is None:
            raise InvalidParameterError(f"messages: a chat needs a template; {NO_TOKENIZER}")
        return self.tokenizer.apply_chat_template(messages, **template_options)

    def fits(self, text: str) -> bool:
        """False for a text that is longer than the context whatever its tokens are. Any thread may call it."""
        return self.tokenizer is None or len(text) <= self.max_model_len * self.tokenizer.max_token_length

    def _tokenize(self, prompt: Any, *, add_special_tokens: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return token_ids("prompt", prompt)
        if self.tokenizer is None:
            raise InvalidParameterError(f"prompt: {NO_TOKENIZER}; give token ids")
        if not self.fits(prompt):  # refused before it is tokenised, which takes seconds a megabyte
            raise ContextLengthError(
                f"prompt: {len(prompt)} characters do not fit into a context of {self.max_model_len} tokens "
                "(max_model_len); shorten the prompt or raise max_model_len",
                -(-len(prompt) // self.tokenizer.max_token_length),
                self.max_model_len,
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestRefusedError(
                f"prompt: {prompt[error.start]!r} at {error.start} is half of a character; expected text that UTF-8 has"
            ) from None
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def _check(
        self, tokens: tuple[int, ...], params: SamplingParams, *, stream: bool, answers: abc.Sequence[tuple[int, ...]]
    ) -> None:
        """Refuse a prompt, parameters or answers so far that could never be served."""
        if not tokens:
            raise RequestRefusedError("prompt: it is empty; at least one token is needed")
        if len(tokens) >= self.max_model_len:
            raise ContextLengthError(
                f"prompt: {len(tokens)} tokens leave no room for an answer in a context of {self.max_model_len} "
                "(max_model_len); shorten the prompt or raise max_model_len",
                len(tokens),
                self.max_model_len,
            )
        for name, ids in {
            "prompt": tokens,
            "logit_bias": tuple(params.logit_bias or ()),
            "stop_token_ids": params.stop_tokens,
            "output_token_ids": tuple(itertools.chain.from_iterable(answers)),
        }.items():
            outside = [token for token in ids if not 0 <= token < self.vocab_size]
            if outside:
                raise RequestRefusedError(
                    f"{name}: token {outside[0]} is outside of the vocabulary of {self.vocab_size}"
                )
        if params.min_tokens and len({*params.stop_tokens, *self.eos_token_ids}) > MAX_BANNED:
            raise RequestRefusedError(f"min_tokens: at most {MAX_BANNED} stop tokens can be held back")
        if len({*(params.logit_bias or ()), *self.runner.suppressed_token_ids}) > MAX_LOGIT_BIAS:
            raise RequestRefusedError(
                f"logit_bias: expected at most {MAX_LOGIT_BIAS} entries, with the "
                f"{len(self.runner.suppressed_token_ids)} tokens that the model suppresses"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidParameterError(f"stop: {NO_TOKENIZER}, so there is no text to find a stop string in")
        if stream and self.tokenizer is None:
            raise InvalidParameterError(f"stream: {NO_TOKENIZER}, so there is no text; use generate with token ids")

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once; its output so far, or None if there is no such unfinished request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.finish(request)
        return self.pop_output(request)

    def finish(self, request: Request) -> None:
        """Stop what is unfinished of a request, which stays until `pop_output` or `remove`."""
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "abort", None)

    def step(self) -> list[RequestOutput]:
        """Dispatch one step and read the one before it: an output for each request that got a token, or ended."""
        moved = dict.fromkeys([*self.advance(), *self._ended])
        return [self.pop_output(request) if request.finished else self.output(request) for request in moved]

    @uninterrupted()
    @ops.use_earlier_programs()  # the programs of the start, whatever the caller has chosen since
    def advance(self) -> list[Request]:
        """`step` without building outputs: the requests that got tokens. Finished ones stay until `pop_output`."""
        progressed: list[Request] = []
        in_flight, speculator = self._in_flight, self.speculator
        if (
            speculator is not None
            and in_flight is not None
            and (in_flight.schedule.verify_tokens or speculator.wants_tokens(self.scheduler.running))
        ):
            progressed, in_flight = self._collect(in_flight), None
        schedule = self.scheduler.schedule()
        if speculator is not None and in_flight is None:
            speculator.add_drafts(schedule, self.scheduler)
        self.num_computed_tokens += schedule.num_tokens
        pending = self.runner.run(schedule) if schedule.chunks else None
        if in_flight is not None:
            progressed = self._collect(in_flight)
        if pending is not None and pending.deferred is not None:
            progressed = list(dict.fromkeys([*progressed, *self._sample_constrained(pending)]))
        # Once nobody waits for it, what is still on its way belongs to sequences that have stopped.
        self._in_flight = pending if self.scheduler.has_work else None
        return progressed

    @ops.use_earlier_programs()
    def repeat(self, dispatch: Dispatch) -> None:
        """Make the dispatch of another host's engine, in whose order all of them are made."""
        if dispatch.program in ("extend", "draft"):
            # The ranks have compared their options.
            assert self.speculator is not None
            assert self.speculator.draft_model is not None
            self.speculator.draft_model.repeat(dispatch)
        else:
            self.runner.repeat(dispatch)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request with structured output; None for others. Any thread may call it."""
        if params.form is None:
            return None
        if self._compiler is None:
            raise InvalidParameterError(f"structured_outputs: {NO_TOKENIZER}")
        if not self.runner.config.structured_outputs:
            raise InvalidParameterError(
                "structured_outputs: this engine was started without them; pass LLM(..., structured_outputs=True)"
            )
        return self._compiler.compile(params.form)

    def load_adapter(self, lora_request: LoRARequest | None) -> LoadedAdapter | None:
        """The adapter of a request, read from its folder if it is not loaded; None for None. Any thread may call it."""
        if lora_request is None:
            return None
        if self._adapters is None:
            raise InvalidParameterError(
                "lora_request: this engine was started without adapters; pass LLM(..., enable_lora=True)"
            )
        return self._adapters.load(lora_request)

    def _replay(self, sequence: Sequence, answer: tuple[int, ...]) -> None:
        """Append an answer so far as if it had been sampled and shown."""
        for token in answer:
            if sequence.finished:
                raise InvalidParameterError(
                    f"output_token_ids: the answer of sample {sequence.index} ends before its last token "
                    f"({sequence.finish_reason})"
                )
            self._append(sequence, token)
        if sequence.detokenizer is not None:
            _ = sequence.detokenizer.finish() if sequence.finished else sequence.detokenizer.delta()

    def _collect(self, pending: PendingStep) -> list[Request]:
        tokens = self.runner.read(pending.output.tokens)
        now = time.perf_counter()
        progressed: dict[Request, None] = {}
        kept = [1] * len(pending.schedule.chunks)
        for row, chunk in enumerate(pending.schedule.chunks):
            sequence = chunk.sequence
            if chunk.sequence.request.params.prompt_logprobs is not None and not sequence.finished:
                self._add_prompt_logprobs(pending, row)
            if not chunk.num_sampled:
                continue
            sequence.num_pending -= chunk.num_sampled
            if sequence.finished:
                continue
            request = sequence.request
            if request.metrics.first_token_time is None:
                request.note(first_token_time=now)
                self.num_prompt_tokens += len(request.prompt_token_ids)
            first = row if pending.output.prompt_logprobs is not None else pending.token_offsets[row]
            progressed[request] = None
            if chunk.num_sampled > 1:
                for at in range(first, first + chunk.num_sampled):
                    if not sequence.finished:
                        self._take(sequence, pending, at, int(tokens[at]))
                continue
            accepted = 0
            for at, draft in enumerate((*chunk.drafts, None), start=first):
                token = int(tokens[at])
                self._take(sequence, pending, at, token)
                holds = tokens[at + 1] >= 0 if draft == BY_STEP else token == draft
                accepted += bool(holds)
                if sequence.finished or not holds:
                    break
                sequence.num_computed += 1
                kept[row] += 1
            if chunk.drafts and self.speculator is not None:
                self.speculator.record(sequence, len(chunk.drafts), accepted)
        if pending.schedule.verify_tokens:
            self.runner.replay(pending.schedule, kept)
        return list(progressed)

    def _take(self, sequence: Sequence, pending: PendingStep, row: int, token: int) -> None:
        """Add a token that a step has sampled, with its log-probabilities."""
        if token == NOT_FINITE:
            error = "the model gave numbers that are not finite; check its weights, and its adapter's if it has one"
            return self.fail(sequence.request, VeraxError(error))
        self.num_generated_tokens += 1
        num_logprobs, logprobs = sequence.request.params.logprobs, pending.output.logprobs
        if num_logprobs is not None and logprobs is not None:
            entry = self._logprobs(logprobs, row, num_logprobs)
            sequence.logprobs.append(entry)
            sequence.cumulative_logprob += entry[token].logprob
        self._append(sequence, token)

    def _sample_constrained(self, pending: PendingStep) -> list[Request]:
        """Fill the masks of a step while the device computes it, and dispatch its sampling; requests that failed."""
        masks = self.runner.new_masks(pending)
        failed: dict[Request, None] = {}
        for row, chunk in enumerate(pending.schedule.chunks):
            sequence = chunk.sequence
            if not chunk.num_sampled or sequence.matcher is None or sequence.finished:
                continue
            first = pending.token_offsets[row] if pending.schedule.verify_tokens else row
            try:
                sequence.matcher.fill(masks[first : first + 1 + len(chunk.drafts)], chunk.drafts)
            except BaseException as error:
                self.fail(sequence.request, error)
                failed[sequence.request] = None
        self.runner.sample(pending, masks)
        return list(failed)

    def _append(self, sequence: Sequence, token: int) -> None:
        """Add a token, and finish the sequence if it ends here."""
        params, detokenizer = sequence.request.params, sequence.detokenizer
        sequence.tokens.append(token)
        # Before `min_tokens` no stop token arrives here: the device does not sample them.
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        is_end = is_eos or token in params.stop_tokens
        stop_string = None
        try:
            if sequence.matcher is not None:
                sequence.matcher.append([token])
            if detokenizer is not None and (not is_end or params.include_stop_str_in_output):
                stop_string = detokenizer.append(token)
        except BaseException as error:
            return self.fail(sequence.request, error)
        if is_end:
            self._finish(sequence, "stop", None if is_eos else token)
        elif stop_string is not None:
            self._finish(sequence, "stop", stop_string)
        elif len(sequence.tokens) - sequence.num_prompt >= sequence.request.max_tokens:
            self._finish(sequence, "length", None)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request by an error of its own host work, which no other request is to notice.

        A panic of the grammar's library is not an `Exception`.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        request.error = error if isinstance(error, VeraxError) else VeraxError(f"the answer cannot continue: {error!r}")
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "error", None)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: int | str | None) -> None:
        self.scheduler.finish(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop
        if sequence.request.finished:
            sequence.request.note(finished_time=time.perf_counter())
            self._ended[sequence.request] = None

    def text(self, sequence: Sequence) -> str:
        """Text of a sequence, empty without a tokenizer. Its terminating token is left out, unless asked for."""
        if self.tokenizer is None:
            return ""
        params, before = sequence.request.params, sequence.request.text_before
        if sequence.detokenizer is not None and (params.stop or sequence.finished):
            if sequence.finished:
                sequence.detokenizer.end()
            return sequence.detokenizer.text
        tokens = sequence.output_tokens
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, after=before, skip_special_tokens=params.skip_special_tokens)

    def output(self, request: Request) -> RequestOutput:
        """Output of a request so far."""
        scored = request.params.logprobs is not None
        outputs = [
            CompletionOutput(
                index=sequence.index,
                text=self.text(sequence),
                token_ids=tuple(sequence.output_tokens),
                cumulative_logprob=sequence.cumulative_logprob if scored else None,
                logprobs=list(sequence.logprobs) if scored else None,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
            )
            for sequence in request.sequences
        ]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=request.prompt_logprobs,
            outputs=outputs,
            finished=request.finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            metrics=request.metrics,
            error=None if request.error is None else str(request.error),
        )

    def _logprobs(self, logprobs: Logprobs, row: int, num_top: int) -> dict[int, Logprob]:
        """Log-probabilities of one row as vLLM orders them: the chosen token, then the `num_top` best others."""
        values, ids = np.asarray(logprobs.values)[row], np.asarray(logprobs.ids)[row]
        ranks = [int(np.asarray(logprobs.ranks)[row]), *range(1, min(num_top, len(ids) - 1) + 1)]
        entry: dict[int, Logprob] = {}
        for token, value, rank in zip(ids.tolist(), values.tolist(), ranks, strict=False):
            if token not in entry:
                text = None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)
                entry[token] = Logprob(value, rank, text)
        return entry

    def _add_prompt_logprobs(self, pending: PendingStep, row: int) -> None:
        """Add to a request what a step has computed of its prompt's log-probabilities."""
        chunk: Chunk = pending.schedule.chunks[row]
        request, scores = chunk.sequence.request, pending.output.prompt_logprobs
        if chunk.sequence.index != 0 or scores is None:
            return
        entries: list[dict[int, Logprob] | None] = request.prompt_logprobs or [None] * len(request.prompt_token_ids)
        request.prompt_logprobs = entries
        offset, num_top = pending.token_offsets[row], request.params.prompt_logprobs or 0
        for i in range(chunk.count):
            follower = chunk.start + i + 1
            if follower < len(entries):
                entries[follower] = self._logprobs(scores, offset + i, num_top)

    def pop_output(self, request: Request) -> RequestOutput:
        """Remove a finished request from the engine; its output."""
        output = self.output(request)
        self.remove(request)
        return output

    def remove(self, request: Request) -> None:
        """Forget a finished request."""
        del self._requests[request.request_id]
        self._ended.pop(request, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def prefix_block_size(self) -> int | None:
        """Tokens of the blocks in which prefixes are cached; None if they are not."""
        blocks = self.scheduler.blocks
        return blocks.block_size if blocks.enable_prefix_caching else None

    @property
    def load(self) -> int:
        """Work of the unfinished requests, in tokens."""
        return self.scheduler.load

    def stats(self) -> EngineStats:
        """State and totals. Any thread may read them."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            kv_cache_usage=blocks.usage,
            prefix_cache_queries=blocks.num_queries,
            prefix_cache_hits=blocks.num_hits,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_generated_tokens,
            spec_decode=None if self.speculator is None else self.speculator.totals,
        )

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        """Running text of a sequence whose request is streamed or has stop strings; None for others."""
        params = request.params
        if self.tokenizer is None or not (request.stream or params.stop):
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            after=request.text_before,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_texts,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def _seed_of(seed: int, index: int) -> int:
    """The seed of a request's sample: the first has the request's own, the others have independent ones."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
