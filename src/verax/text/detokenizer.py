"""Token by token to text: what was shown stays, stop strings are found on the way."""

from __future__ import annotations

from collections.abc import Sequence

from verax.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_UNDECIDED = "\ufffd"
"""What the decoder gives for bytes that are not a whole character, yet or ever."""

_WINDOW = 8
"""Tokens that decide how the next one reads. An unfinished character has at most 3 bytes, hence 3 tokens; as many
before them keep a window that begins inside of a character from changing the end of its text; a decoder that strips the
leading space needs one."""


class IncrementalDetokenizer:
    """The text of a growing list of tokens.

    A decoder may need the tokens before to render one (leading spaces), and the tokens after to complete a character.
    So each new token is decoded in a window of the last few, and what is undecided waits: the text is that of decoding
    all tokens at once, at a cost that does not grow with their number. Undecided are

    - a last U+FFFD: the bytes may be the beginning of a character;
    - a run of byte tokens (`<0x0A>`): one invalid byte makes U+FFFD of each byte of the run, earlier ones included.

    Stop strings are found in such a run as soon as it spells them.
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
        """Text that follows `prompt_token_ids`; without them, a sentencepiece decoder strips the text's first space."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        visible = (token for token in reversed(prompt_token_ids) if self._visible(token))
        self._window = [token for token, _ in zip(visible, range(_WINDOW), strict=False)][::-1]
        """The last visible tokens: at most twice `_WINDOW` before a run of byte tokens, which it holds whole."""
        self._decided = len(_without_undecided(self._decode()))
        """Length of the window's text that is in `text`, or in the prompt."""
        self._run = bytearray()
        """The bytes of the run of byte tokens that the window ends with."""
        self._count = 0
        self._exempt = 0
        """Length of the text of the first `min_tokens` tokens, in which no stop string counts."""
        self._shown = 0
        self._stopped = False
        self.text = ""
        """Everything decided so far, cut at a stop string once one was found."""

    def append(self, token: int) -> str | None:
        """Add a token; the stop string that the text now contains, if any.

        Raises:
            ValueError: if a stop string has ended the text already.
        """
        if self._stopped:
            raise ValueError("a text that has ended at a stop string does not go on")
        self._count += 1
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
        decoded = _without_undecided(self._decode())
        piece = decoded[self._decided :]
        self._decided = len(decoded)
        if len(self._window) > 2 * _WINDOW:
            self._window = self._window[-_WINDOW:]
            self._decided = len(_without_undecided(self._decode()))
        return self._extend(piece)

    def delta(self) -> str:
        """Text that was not returned before and cannot be the beginning of a stop string."""
        safe = len(self.text) if self._stopped else len(self.text) - self._held_back()
        piece = self.text[self._shown : safe]
        self._shown = max(self._shown, safe)
        return piece

    def finish(self) -> str:
        """No more tokens: decide what was undecided, and return what `delta` had not."""
        if not self._stopped:
            decoded = self._decode()
            self.text += decoded[self._decided :]
            self._decided = len(decoded)
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece

    def _visible(self, token: int) -> bool:
        """Whether the decoder gets to see a token."""
        skipped = self._skip and token in self._tokenizer.special_token_ids
        return not skipped and self._tokenizer.token(token) is not None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""

    def _stop_in_run(self) -> str | None:
        """The stop string that the run of byte tokens completes if it ends here. Without one it stays undecided."""
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
        """Add decided text; the stop string in it that begins first. `only_stop`: add nothing if there is none."""
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
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


def _without_undecided(text: str) -> str:
    return text.removesuffix(_UNDECIDED)
