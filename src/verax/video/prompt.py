"""Prompts to token ids, as Wan's and SkyReels-V2's pipelines make them: cleaned, then padded to 512."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import tokenizers
from jaxtyping import Array, Float32, Int

from verax._optional import require_optional
from verax.checkpoint.resolve import read_tokenizer
from verax.errors import CheckpointError
from verax.video.programs import ProgramCall

__all__ = ["PROMPT_TOKENS", "PromptStates", "PromptTokenizer", "clean"]

PROMPT_TOKENS = 512
"""Tokens of every prompt, padding included: the transformer's cross-attention sees them all."""

KEPT_PROMPTS = 16
"""Prompts whose states are kept, so that a prompt that comes again needs no text encoder."""


def clean(prompt: str) -> str:
    """Text with broken encodings mended, HTML entities resolved (twice), and each run of white space as one space.

    Raises:
        MissingDependencyError: if ftfy is not installed.
    """
    return " ".join(html.unescape(html.unescape(require_optional("ftfy").fix_text(prompt))).split())


class PromptTokenizer:
    """A text encoder's tokenizer.json, giving ids of one length."""

    def __init__(self, backend: tokenizers.Tokenizer, *, length: int = PROMPT_TOKENS, pad_token: str = "<pad>"):
        """Take over a tokenizer; its truncation and padding are replaced.

        Raises:
            CheckpointError: if it has no `pad_token`.
        """
        pad = backend.token_to_id(pad_token)
        if pad is None:
            raise CheckpointError(f"the text encoder's tokenizer has no token {pad_token!r} to pad with")
        backend.enable_truncation(length)
        backend.enable_padding(length=length, pad_id=pad, pad_token=pad_token)
        self._backend = backend

    @classmethod
    def from_folder(cls, folder: str | Path, *, length: int = PROMPT_TOKENS) -> PromptTokenizer:
        """Read a folder's tokenizer.json.

        Raises:
            CheckpointError: if it is missing or damaged, or has no token `<pad>`.
        """
        return cls(read_tokenizer(folder), length=length)

    def __call__(self, prompts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
        """Ids of cleaned prompts, int32, padded on the right, and how many of each are not padding.

        A longer prompt loses its end, but not the token that marks the end.
        """
        found = self._backend.encode_batch([clean(prompt) for prompt in prompts])
        tokens = np.array([encoding.ids for encoding in found], np.int32)
        return tokens, np.array([sum(encoding.attention_mask) for encoding in found], np.int32)


class PromptStates:
    """States of prompts by the text encoder, of which the last few are kept."""

    def __init__(self, tokenizer: PromptTokenizer, call: ProgramCall):
        """Take a tokenizer, and the call of the text encoder on its tokens `[1, T]` and lengths `[1]`."""
        self.call = call
        self._tokenizer = tokenizer
        self._states: dict[str, Float32[Array, "1 T D"]] = {}

    def __call__(self, prompt: str) -> Float32[Array, "1 T D"]:
        """States of a prompt."""
        states = self._states.pop(prompt, None)
        if states is None:
            tokens, lengths = self._tokenizer([prompt])
            states = jax.block_until_ready(self.call(tokens, lengths))
        self._states[prompt] = states
        while len(self._states) > KEPT_PROMPTS:
            del self._states[next(iter(self._states))]
        return states
