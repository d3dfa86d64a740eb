"""Token by token to text: what was shown stays, stop strings are found on the way."""

from __future__ import annotations

from verax.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_UNDECIDED = "\ufffd"
"""What the decoder gives for bytes that are not a whole character, yet or ever."""


class IncrementalDetokenizer:
    """The text of a growing list of tokens.

    A decoder may need the token before to render one (leading spaces), and the tokens after to complete a character. So
    each new token is decoded together with the last ones that gave text, and what ends in U+FFFD waits: the text is
    that of decoding all tokens at once, at a cost that does not grow with their number.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._recent: list[int] = []
        """Tokens of the last piece of text, and those after it."""
        self._known = 0
        """How many of them are in `text` already."""
        self._count = 0
        self._shown = 0
        self._stopped = False
        self.text = ""
        """Everything decided so far, cut at a stop string once one was found."""

    def append(self, token: int) -> str | None:
        """Add a token; the stop string that the text now contains, if any."""
        if self._stopped:
            raise ValueError("a text that has ended at a stop string does not go on")
        self._count += 1
        self._recent.append(token)
        before = self._decode(self._recent[: self._known])
        now = self._decode(self._recent)
        if len(now) > len(before) and not now.endswith(_UNDECIDED):
            self._recent, self._known = self._recent[self._known :], len(self._recent) - self._known
            return self._extend(now[len(before) :])
        return None

    def delta(self) -> str:
        """Text that was not returned before and cannot be the beginning of a stop string."""
        safe = len(self.text) if self._stopped else len(self.text) - self._held_back()
        piece = self.text[self._shown : safe]
        self._shown = max(self._shown, safe)
        return piece

    def finish(self) -> str:
        """No more tokens: decide what was undecided, and return what `delta` had not."""
        if not self._stopped:
            before = self._decode(self._recent[: self._known])
            self._extend(self._decode(self._recent)[len(before) :])
            self._recent, self._known = [], 0
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""

    def _extend(self, piece: str) -> str | None:
        """Add decided text; the stop string in it that begins first."""
        begin = len(self.text)
        self.text += piece
        if self._count <= self._min_tokens:
            return None
        found: list[tuple[int, str]] = []
        for stop in self._stop:
            at = self.text.find(stop, max(0, begin - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
