"""JSON objects read character by character: complete where json.loads takes them, broken where nothing can follow."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verax.text.features.tool_calls import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def scan(text):
    """Number of characters read, and the scanner."""
    scanner = JsonScanner()
    at = 0
    while at < len(text):
        plain = scanner.plain_until(text, at)
        if plain > at:
            at = plain
        elif scanner.push(text[at]):
            at += 1
        else:
            break
    return at, scanner


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_every_object_is_complete_at_its_last_brace_and_not_before(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    read, scanner = scan(text)
    assert (read, scanner.complete, scanner.depth) == (len(text), True, 0)
    for end in range(len(text)):
        assert not scan(text[:end])[1].complete


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_text_is_taken_as_far_as_json_allows(data):
    value = data.draw(st.dictionaries(st.text(max_size=2), VALUES, max_size=2))
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.sampled_from(string.printable)) + text[at:]
    read, scanner = scan(changed)
    try:
        json.loads(changed[:read])
        valid = True
    except ValueError:
        valid = False
    assert scanner.complete == valid
    if read < len(changed.rstrip()):
        with pytest.raises(ValueError, match=r"line|char"):
            json.loads(changed)


BROKEN = [
    "[", "1", '{"a" 1', '{"a": 01', '{"a": 1.}', '{"a": .', '{"a": +', '{"a": tru ', '{"a": N', '{"a": "\n',
    '{"a": "\\x', '{"a": "\\u12g', '{"a": 1,}', "{,", '{"a": [1,]', '{"a": [}', "{a", "{'", '{"a": 1e}', '{"a": 1} ',
    '{"a": --', '{"a": 1 2',
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_the_first_wrong_character_is_refused(text):
    read, scanner = scan(text)
    assert read == len(text) - 1
    assert not scanner.push(text[read])
