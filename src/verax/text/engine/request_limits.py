"""Limits of an engine: requests outside of them are refused before they are queued."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from verax.errors import ContextLengthError, InvalidParameterError, RequestRefusedError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.slots import MAX_BANNED
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["NO_TOKENIZER", "RequestLimits"]

NO_TOKENIZER = "this engine has no tokenizer (skip_tokenizer_init, or a module without one)"


@dataclass(frozen=True)
class RequestLimits:
    """Limits that every request is checked against."""

    max_model_len: int
    """Longest sequence, in tokens."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None

    def fits(self, text: str) -> bool:
        """False for a text that is longer than the context whatever its tokens are."""
        return self.tokenizer is None or len(text) <= self.max_model_len * self.tokenizer.max_token_length

    def check_text(self, text: str) -> None:
        """Refuse a prompt that cannot fit before it is tokenised, which takes seconds a megabyte.

        Raises:
            ContextLengthError: with the least number of tokens that it can have.
        """
        if self.tokenizer is not None and not self.fits(text):
            raise ContextLengthError(
                f"prompt: {len(text)} characters do not fit into a context of {self.max_model_len} tokens "
                "(max_model_len); shorten the prompt or raise max_model_len",
                -(-len(text) // self.tokenizer.max_token_length),
                self.max_model_len,
            )

    def check(
        self, tokens: tuple[int, ...], params: SamplingParams, *, stream: bool, answers: Sequence[tuple[int, ...]]
    ) -> None:
        """Refuse what could never be served.

        Args:
            tokens: the prompt.
            params: its sampling parameters.
            stream: True if the text is to be shown as it grows.
            answers: an answer so far for each sample.

        Raises:
            RequestRefusedError: for the prompt, or a token outside of the vocabulary.
            InvalidParameterError: for what needs a tokenizer where there is none, and answers that are not one each.
        """
        if not tokens:
            raise RequestRefusedError("prompt: it is empty; at least one token is needed")
        if len(tokens) >= self.max_model_len:
            raise ContextLengthError(
                f"prompt: {len(tokens)} tokens leave no room for an answer in a context of {self.max_model_len} "
                "(max_model_len); shorten the prompt or raise max_model_len",
                len(tokens),
                self.max_model_len,
            )
        if len(answers) != params.n:
            raise InvalidParameterError(
                f"output_token_ids: expected an answer for each of {params.n}, got {len(answers)}"
            )
        named = {
            "logit_bias": tuple(params.logit_bias or ()),
            "stop_token_ids": params.stop_tokens,
            "output_token_ids": tuple(itertools.chain.from_iterable(answers)),
        }
        for name, ids in {"prompt": tokens, **named}.items():
            outside = [token for token in ids if not 0 <= token < self.vocab_size]
            if outside:
                raise RequestRefusedError(
                    f"{name}: token {outside[0]} is outside of the vocabulary of {self.vocab_size}"
                )
        if params.min_tokens and len({*params.stop_tokens, *self.eos_token_ids}) > MAX_BANNED:
            raise RequestRefusedError(f"min_tokens: at most {MAX_BANNED} stop tokens can be held back")
        if params.stop and self.tokenizer is None:
            raise InvalidParameterError(f"stop: {NO_TOKENIZER}, so there is no text to find a stop string in")
        if stream and self.tokenizer is None:
            raise InvalidParameterError(f"stream: {NO_TOKENIZER}, so there is no text; use generate with token ids")
