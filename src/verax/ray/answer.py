"""`AnswerSoFar`: what replicas have sent of a request's answers, joined whichever of them it came from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from verax.text.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from verax.ray.replica import Part

__all__ = ["AnswerSoFar"]


@dataclass
class _Sample:
    """One of the answers."""

    given: int
    """Number of the tokens that the caller began with, and gets nothing of."""
    token_ids: list[int]
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float | None = None
    before: float = 0.0
    """Log-probability of the tokens that earlier replicas have sent, in nats."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class AnswerSoFar:
    """Answers to one request as they grow.

    Args:
        n: number of the answers.
        given: tokens of each that the caller began with; None for none.
    """

    def __init__(self, n: int, given: Sequence[Sequence[int]] | None = None):
        self._id = f"request-{uuid.uuid4().hex}"
        self._samples = [_Sample(len(tokens), list(tokens)) for tokens in given or [()] * n]
        self._arrival = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._prompt_token_ids: tuple[int, ...] = ()
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached = 0
        self._metrics: RequestMetrics | None = None

    @property
    def token_ids(self) -> list[list[int]] | None:
        """Tokens of each answer, for the next replica; None before the first of them."""
        found = [list(sample.token_ids) for sample in self._samples]
        return found if any(found) else None

    def begin(self) -> None:
        """Note that the next parts are those of another replica."""
        for sample in self._samples:
            sample.before = sample.cumulative_logprob or 0.0

    def add(self, part: Part) -> RequestOutput | None:
        """Output of what is new in a part; None if nothing is.

        A replica that goes on behind an answer that is complete sends its end again, which is left out.
        """
        now = time.perf_counter()
        if part.prompt_token_ids is not None:
            if not self._prompt_token_ids:
                self._prompt_token_ids, self._num_cached = part.prompt_token_ids, part.num_cached_tokens
            self._prompt_logprobs = None if part.prompt_logprobs is None else list(part.prompt_logprobs)
        if self._scheduled is None and part.metrics is not None and part.metrics.first_scheduled_time is not None:
            # The clocks of two machines have nothing in common but their pace.
            self._scheduled = self._arrival + part.metrics.first_scheduled_time - part.metrics.arrival_time
        fresh = [self._add(new) for new in part.outputs if self._samples[new.index].finish_reason is None]
        if self._first_token is None and any(new.token_ids for new in fresh):
            self._first_token = now
        if not fresh and not part.finished:
            return None
        self._metrics = RequestMetrics(
            self._arrival,
            self._first_token,
            now if part.finished else None,
            first_scheduled_time=self._scheduled,
            num_draft_tokens=0 if part.metrics is None else part.metrics.num_draft_tokens,
            num_accepted_tokens=0 if part.metrics is None else part.metrics.num_accepted_tokens,
        )
        return self._output(fresh, part.finished)

    def whole(self) -> RequestOutput:
        """The whole output, behind the last part."""
        outputs = [
            CompletionOutput(
                index,
                "".join(sample.text),
                tuple(sample.token_ids[sample.given :]),
                sample.cumulative_logprob,
                sample.logprobs or None,
                sample.finish_reason,
                sample.stop_reason,
            )
            for index, sample in enumerate(self._samples)
        ]
        return self._output(outputs, True)

    def _add(self, new: CompletionOutput) -> CompletionOutput:
        sample = self._samples[new.index]
        sample.token_ids += new.token_ids
        sample.text.append(new.text)
        sample.logprobs += new.logprobs or []
        sample.finish_reason, sample.stop_reason = new.finish_reason, new.stop_reason
        if new.cumulative_logprob is not None:
            sample.cumulative_logprob = sample.before + new.cumulative_logprob
            new = replace(new, cumulative_logprob=sample.cumulative_logprob)
        return new

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            self._id,
            None,
            self._prompt_token_ids,
            self._prompt_logprobs,
            outputs,
            finished,
            self._num_cached,
            self._metrics,
        )
