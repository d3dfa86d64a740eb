"""Outputs of requests: the engine's tokens and scores as users get them."""

from __future__ import annotations

import numpy as np

from verax.text.engine.outputs import CompletionOutput, Logprob, RequestOutput
from verax.text.engine.scheduler import Chunk
from verax.text.engine.sequence import Request, Sequence
from verax.text.step.runner import PendingStep
from verax.text.step.step import Logprobs
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["OutputBuilder"]


class OutputBuilder:
    """Builder of outputs, with the tokenizer that they are decoded by.

    Args:
        tokenizer: of the model; None leaves texts empty.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    def text(self, sequence: Sequence) -> str:
        """The sequence's text; its terminating token is not part of it, unless asked for."""
        if self.tokenizer is None:
            return ""
        params = sequence.request.params
        if sequence.detokenizer is not None and (params.stop or sequence.finished):
            if sequence.finished:
                sequence.detokenizer.finish()
            return sequence.detokenizer.text
        tokens = sequence.output_tokens
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)

    def of(self, request: Request) -> RequestOutput:
        """Output of a request so far."""
        params = request.params
        outputs = [
            CompletionOutput(
                index=sequence.index,
                text=self.text(sequence),
                token_ids=tuple(sequence.output_tokens),
                cumulative_logprob=None if params.logprobs is None else sequence.cumulative_logprob,
                logprobs=None if params.logprobs is None else list(sequence.logprobs),
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

    def logprobs(self, logprobs: Logprobs, row: int, num_top: int) -> dict[int, Logprob]:
        """Log-probabilities of one row as vLLM orders them: the chosen token, then the `num_top` best others."""
        values, ids = np.asarray(logprobs.values)[row], np.asarray(logprobs.ids)[row]
        entry = {int(ids[0]): self._logprob(ids[0], values[0], int(np.asarray(logprobs.ranks)[row]))}
        for rank in range(1, min(num_top, len(ids) - 1) + 1):
            entry.setdefault(int(ids[rank]), self._logprob(ids[rank], values[rank], rank))
        return entry

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = None if self.tokenizer is None else self.tokenizer.decode([int(token)], skip_special_tokens=False)
        return Logprob(float(value), rank, text)

    def add_prompt_logprobs(self, pending: PendingStep, row: int) -> None:
        """Add to a request what a step has computed of its prompt's log-probabilities."""
        chunk: Chunk = pending.schedule.chunks[row]
        request, scores = chunk.sequence.request, pending.output.prompt_logprobs
        if chunk.sequence.index != 0 or scores is None:
            return
        found: list[dict[int, Logprob] | None] = request.prompt_logprobs or [None] * len(request.prompt_token_ids)
        request.prompt_logprobs = found
        offset, wanted = pending.token_offsets[row], request.params.prompt_logprobs or 0
        for i in range(chunk.count):
            follower = chunk.start + i + 1
            if follower < len(request.prompt_token_ids):
                found[follower] = self.logprobs(scores, offset + i, wanted)
