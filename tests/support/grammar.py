"""Texts that a grammar of llguidance takes, byte by byte."""

import pytest

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")


def matcher_of(lark):
    """A matcher at the beginning of a grammar.

    Raises:
        ValueError: if llguidance refuses the grammar.
    """
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def accepts(grammar, text):
    """True if the grammar, as a text in Lark's notation or a matcher at its beginning, takes the whole text."""
    matcher = matcher_of(grammar) if isinstance(grammar, str) else grammar.deep_copy()
    tokens = BYTES.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
