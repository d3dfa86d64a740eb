"""Incremental detokenization: text that was returned never changes, and stop strings are found as tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_UNDECIDED = "\ufffd"
"""Character that the decoder gives for bytes that are not a whole character: an incomplete one, or invalid bytes."""

_WINDOW = 8
"""Number of tokens before a token that can change its text.

An incomplete character has at most 3 bytes, hence 3 tokens. As many tokens before them keep the end of the text right
if the window begins inside a character. A decoder that strips the leading space needs one token."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens.

    The text of a token may depend on the tokens before it (leading spaces), and on those after it (a character of
    several tokens). Each new token is therefore decoded in a window of the last few, and undecided text is held back.
    Decoding all tokens at once gives the same text. The cost of a token does not grow with their number. A
    byte-level decoder needs no window after whole characters: each of its tokens is decoded once only. Undecided are

    - a last U+FFFD: the bytes may be the beginning of a character;
    - a run of byte tokens (`<0x0A>`): with one invalid byte, every byte of the run becomes U+FFFD, earlier ones too.

    A stop string in such a run is found when its last byte is added.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        """Begin a text after `prompt_token_ids`. Without them, a sentencepiece decoder strips its first space."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        visible = (token for token in reversed(prompt_token_ids) if self._visible(token))
        self._window = [token for token, _ in zip(visible, range(_WINDOW), strict=False)][::-1]
        """Last visible tokens: at most twice `_WINDOW`, and a whole run of byte tokens after them."""
        self._decided = len(_without_undecided(self._decode()))
        """Number of the window's characters that are in `text` or in the prompt."""
        self._run = bytearray()
        """Bytes of the run of byte tokens at the end of the window."""
        self._count = 0
        self._exempt = 0
        """Number of characters of the first `min_tokens` tokens, in which no stop string counts."""
        self._shown = 0
        self._stopped = False
        self.text = ""
        """Decided text so far, cut at a stop string if one was found."""

    def append(self, token: int) -> str | None:
        """Add a token; return the stop string that the text now contains, if any.

        Raises:
            ValueError: if a stop string has ended the text already.
        """
        if self._stopped:
            raise ValueError("a text that has ended at a stop string takes no more tokens")
        self._count += 1
        text = None if self._window else self._tokenizer.whole_text(token)
        if text is not None:
            found = None if self._skip and token in self._tokenizer.special_token_ids else self._extend(text)
        else:
            found = self._append(token) if self._visible(token) else None
        if self._count == self._min_tokens:
            self._exempt = len(self.text) + len(self._run.decode(errors="ignore"))
        return found

    def _append(self, token: int) -> str | None:
        self._window.append(token)
        byte = self._tokenizer.byte_tokens.get(token)
        if byte is not None:
            self._run.append(byte)
            return self._stop_in_run()
        self._run.clear()
        text = self._decode()
        decoded = _without_undecided(text)
        piece = decoded[self._decided :]
        self._decided = len(decoded)
        if self._tokenizer.is_byte_level and len(decoded) == len(text):
            self._window, self._decided = [], 0
        elif len(self._window) > 2 * _WINDOW:
            self._window = self._window[-_WINDOW:]
            self._decided = len(_without_undecided(self._decode()))
        return self._extend(piece)

    def delta(self) -> str:
        """Text that was not returned before and cannot be the beginning of a stop string."""
        safe = len(self.text) if self._stopped or not self._stop else len(self.text) - self._held_back()
        piece = self.text[self._shown : safe]
        self._shown = max(self._shown, safe)
        return piece

    def finish(self) -> str:
        """End the text; return the rest that `delta` has not returned, undecided text included."""
        if not self._stopped:
            decoded = self._decode()
            self.text += decoded[self._decided :]
            self._decided = len(decoded)
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece

    def _visible(self, token: int) -> bool:
        """True if a token is decoded: it is in the vocabulary, and not a special token that is skipped."""
        skipped = self._skip and token in self._tokenizer.special_token_ids
        return not skipped and self._tokenizer.token(token) is not None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""

    def _stop_in_run(self) -> str | None:
        """Stop string that the run of byte tokens completes, if any. Without one the run stays undecided."""
        if not self._stop or self._count <= self._min_tokens:
            return None
        try:
            spelled = self._run.decode()
        except UnicodeDecodeError:
            return None
        if not any(spelled.endswith(stop[-1]) for stop in self._stop):
            return None
        return self._extend(self._decode()[self._decided :], only_stop=True)

    def _extend(self, piece: str, *, only_stop: bool = False) -> str | None:
        """Add decided text; return the first stop string, if any. With `only_stop`, add nothing without one."""
        if not self._stop:
            self.text += piece
            return None
        text = self.text + piece
        found: list[tuple[int, str]] = []
        if self._count > self._min_tokens:
            searched = max(len(self.text), self._exempt)
            for stop in self._stop:
                at = text.find(stop, max(0, searched - len(stop) + 1))
                if at >= 0:
                    found.append((at, stop))
        if not found:
            self.text = self.text if only_stop else text
            return None
        at, stop = min(found)
        self.text = text[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _held_back(self) -> int:
        """Number of characters of the longest suffix of the text that is a prefix of a stop string."""
        held = 0
        for stop in self._stop:
            at = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
            while 0 <= at < len(self.text) - held:
                if stop.startswith(self.text[at:]):
                    held = len(self.text) - at
                at = self.text.find(stop[0], at + 1)
        return held


def _without_undecided(text: str) -> str:
    return text.removesuffix(_UNDECIDED)
