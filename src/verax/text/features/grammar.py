"""Grammars of structured output: compiled once, a matcher for each sequence, a bit mask of tokens for each step.

llguidance (https://github.com/guidance-ai/llguidance) parses the answer so far and finds the tokens that may follow.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from verax._optional import require_optional
from verax.errors import InvalidParameterError, QueueFullError, StructuredOutputError
from verax.text.engine.sampling_params import StructuredOutputs
from verax.text.features.gbnf import is_gbnf, lark_of_gbnf
from verax.text.features.json_schema import JSON_OPTIONS, schema_rule
from verax.text.tokens.tokenizer import Tokenizer

COMPILE_SECONDS = 2.0
"""Longest compilation: nearly every form takes milliseconds."""

COMPILE_STACK = 128 << 20
"""Bytes of stack of a compiling thread: the library recurses into rules, and an overflow would end the process."""

MAX_COMPILING = 2
"""Compilations at a time: one that was given up continues until it ends."""

MAX_COMPILED = 64
"""Compiled grammars that are kept: clients send the same schema again and again."""

_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Work that llguidance may spend on a grammar, and on the lexer and the parser in a step: amounts and never a time, so
that a slow machine gives the answers of a fast one. A state takes 1 to 2 KB. JSON schemas have some hundred items in a
step, and grammars of characters some thousand for tokens of a hundred spaces. An ambiguous grammar has more in each
step, and ends after some hundred tokens."""


_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?!/)(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>')
"""Texts, regular expressions and comments of a grammar in Lark's notation, and names of tokens."""


def mask_width(vocab_size: int) -> int:
    """Number of 32-bit words that have a bit for each token."""
    return -(-vocab_size // 32)


class GrammarMatcher:
    """Place of one sequence in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocabulary: Any, after: str | None):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._after = None if after is None else after.encode()
        """Text that must be generated first; None once it was."""
        self._text = b""
        """End of the text so far, long enough to find `_after` in."""

    def append(self, tokens: Iterable[int]) -> None:
        """Advance by tokens of the answer.

        Raises:
            StructuredOutputError: if the grammar does not allow them, or that takes more work than a step may.
        """
        for token in tokens:
            if self._after is None:
                self._matcher.consume_token(token)
                self._check()
                continue
            self._text = self._text[-len(self._after) :] + self._vocabulary.decode_bytes([token])
            if self._after in self._text:
                self._after = None

    def fill(self, masks: Int[np.ndarray, "B w"], drafts: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next, and clear the others.

        `masks`: a mask for the token after the answer so far, then one for the token after each draft. `drafts`:
        guesses of the next tokens, which the grammar allows. The matcher stays where it is.
        """
        text, after, consumed = self._text, self._after, 0
        for mask, draft in zip(masks, (*drafts, None), strict=True):
            if self._after is None:
                _fill(self._matcher, mask)
                self._check()
            if draft is not None:
                consumed += self._after is None
                self.append([draft])
        self._text, self._after = text, after
        if consumed:
            self._matcher.rollback(consumed)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Number of tokens, from the first on, that the grammar allows next."""
        text, after, free = self._text, self._after, 0
        while self._after is not None and free < len(tokens):
            self.append([tokens[free]])
            free += 1
        begun = self._after is None
        self._text, self._after = text, after
        if not begun:
            return free
        try:
            return free + self._matcher.validate_tokens(list(tokens[free:]))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library: `fill` meets it too, and ends the request
            return free

    def _check(self) -> None:
        """Raise the error of the matcher, if it has one."""
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            if "Too many items" in reason:
                reason = "the grammar is too ambiguous; give a simpler one"
            raise StructuredOutputError(f"structured_outputs: the answer cannot continue: {reason}")


@dataclass(frozen=True)
class Grammar:
    """Compiled grammar. Requests share it, and each sequence has a matcher of its own."""

    prototype: Any
    vocabulary: Any
    lock: threading.Lock
    after: str | None

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of an answer."""
        with self.lock:
            return GrammarMatcher(self.prototype.deep_copy(), self.vocabulary, self.after)


class _Vocabulary:
    """Tokens of a tokenizer for llguidance's `TokenizerWrapper`.

    The library takes each added token in angle brackets, such as `<think>`, for a special one, whose name is not the
    text of anything. Those that a tokenizer does not declare special are text here, as they are in answers.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        # Slices make masks quicker, and none is made of this one.
        self._library: Any = require_optional("llguidance").LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=eos_token_ids, slices=[]
        )
        special = {token for token in range(vocab_size) if self._library.is_special_token(token)}
        named = {token: tokenizer.token(token) or "" for token in special - tokenizer.special_token_ids}
        self.text_tokens = {
            name: token for token, name in named.items() if name[:1] == "<" and token not in eos_token_ids
        }
        """Tokens in angle brackets that are text, by their names."""
        in_brackets = {token: tokenizer.token(token) or "" for token in special & tokenizer.special_token_ids}
        self.named_tokens = self.text_tokens | {
            f"<{name}>": token for token, name in in_brackets.items() if name[:1] == "["
        }
        """Tokens by names that the library does not know; `<[X]>` is a special `[X]`."""
        self._special = special.difference(self.text_tokens.values())
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(self._special)
        self.tokens = [self._library.decode_bytes([token]) for token in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, in which the name of a special token is spelled out."""
        tokens = self._library.tokenize_bytes(text)
        return tokens if self._special.isdisjoint(tokens) else self._library.greedy_tokenize(text.decode())


class GrammarCompiler:
    """Compiler of the grammars of one engine; any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._named_tokens: Mapping[str, int] = {}
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of a form, compiled now or before."""
        key = replace(wanted, after=None)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            prototype = self._compiled.get(key)
        if prototype is None:
            prototype = self._within_time(key)
        with self._lock:
            self._compiled[key] = prototype
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Grammar(prototype, self._vocabulary, self._lock, wanted.after)

    def _read_vocabulary(self) -> Any:
        if not self._eos_token_ids:
            raise InvalidParameterError("structured_outputs: this model has no end of text, with which an answer ends")
        library = require_optional("llguidance")
        try:
            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            self._named_tokens = vocabulary.named_tokens
            return library.LLTokenizer(library.TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)
        except ValueError as error:
            raise InvalidParameterError(
                f"structured_outputs: llguidance does not support this tokenizer: {error}"
            ) from error

    def _within_time(self, wanted: StructuredOutputs) -> Any:
        """Compile in a thread of its own. The library lets go of Python's lock, but cannot be interrupted."""
        if not self._compiling.acquire(timeout=COMPILE_SECONDS):
            raise QueueFullError("structured_outputs: other forms are being compiled; try again later")
        compiled: Future[Any] = Future()

        def run() -> None:
            try:
                compiled.set_result(_compile(wanted, self._vocabulary, self._vocab_size, self._named_tokens))
            except BaseException as error:  # a panic of the library is not an Exception
                compiled.set_exception(error)
            finally:
                self._compiling.release()

        with self._lock:
            usual = threading.stack_size(COMPILE_STACK)
            try:
                threading.Thread(target=run, name="compile-grammar").start()
            except RuntimeError as error:  # the system has no room for another thread
                self._compiling.release()
                raise _refused(wanted, f"{error}; try again later") from error
            finally:
                threading.stack_size(usual)
        try:
            return compiled.result(COMPILE_SECONDS)
        except TimeoutError:
            raise _refused(wanted, f"it takes more than {COMPILE_SECONDS:g} s to compile; give a simpler one") from None


def _compile(wanted: StructuredOutputs, vocabulary: Any, vocab_size: int, named_tokens: Mapping[str, int]) -> Any:
    library = require_optional("llguidance")
    try:
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(vocabulary, _source(wanted, named_tokens), log_level=0, limits=limits)
    except BaseException as error:  # GBNF that is not valid, or a panic of the library
        raise _refused(wanted, str(error)) from error
    # The first mask is the slowest by far: the automaton of the tokens is built with it.
    mask = np.zeros(mask_width(vocab_size), np.int32)
    if not matcher.is_error():
        _fill(matcher, mask)
    if matcher.is_error():
        raise _refused(wanted, _reason(matcher.get_error()))
    if not mask.any():
        raise _refused(wanted, "no answer matches it")
    return matcher


def _fill(matcher: Any, mask: Int[np.ndarray, "w"]) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _source(wanted: StructuredOutputs, named_tokens: Mapping[str, int]) -> str:
    """The form in llguidance's own notation.

    `named_tokens`: tokens by the names that a grammar can have for them, where the library has none.
    """
    matcher = require_optional("llguidance").LLMatcher
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    if wanted.grammar is not None:
        text = wanted.grammar.removeprefix("\ufeff")
        return matcher.grammar_from_lark(lark_of_gbnf(text) if is_gbnf(text) else _numbered(text, named_tokens))
    schema = {"type": "object"} if wanted.json is None else json.loads(str(wanted.json))
    rules: dict[str, str] = {}
    body = schema_rule(schema, JSON_OPTIONS, rules)
    if body.startswith("%json "):
        return matcher.grammar_from_json_schema(body.removeprefix("%json "))
    return matcher.grammar_from_lark("\n".join(f"{name}: {text}" for name, text in {"start": body, **rules}.items()))


def _numbered(lark: str, tokens: Mapping[str, int]) -> str:
    """A grammar with the numbers of tokens in the place of their names."""
    return _LARK.sub(lambda found: f"<[{tokens[found[0]]}]>" if found[0] in tokens else found[0], lark)


def _refused(wanted: StructuredOutputs, reason: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs: {wanted.form}: {reason}")


def _reason(error: str) -> str:
    """One line of an error of llguidance: the parser's of regular expressions is further down."""
    lines = error.strip().splitlines() or ["no reason given"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])[:300]
    return reason if " " in reason else f"no answer matches it ({reason})"
