"""Bodies of requests: every wrong one is a 400 that names what was wrong."""

import logging
import time
from typing import Literal

import msgspec
import pytest

from verax.serve.http import body as body_module
from verax.serve.http.body import MAX_DEPTH, decode, parse_json
from verax.serve.http.errors import ApiError


class Item(msgspec.Struct):
    role: str
    tags: list[str] | None = None


class Sun(msgspec.Struct, tag="sun"):
    hours: int


class Rain(msgspec.Struct, tag="rain"):
    strength: Literal["light", "strong"]


class Body(msgspec.Struct):
    messages: list[Item]
    n: int | None = None
    temperature: float | None = None
    anything: object = None
    sky: str | list[Sun | Rain] | None = None
    unit: Literal["mm", "inch"] | list[Item] | None = None


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b'"text"', b'"' + b"[" * 1000 + b'"'),
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [{"role": "\xff"}]}',
        b'{"messages": [{"role": "\xed\xa0\x80"}]}',
        b"\0" * 100,
        b'{"messages": [{"role": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"anything": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b', "messages": []}',
        b'{"anything": 1e999, "messages": []}',
    ],
)
def test_what_is_not_a_json_object_of_bounded_depth_is_refused(body):
    with pytest.raises(ApiError) as caught:
        decode(Body, body)
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{caught.value.param or 'body'}: ")


def test_depth_is_counted_outside_of_strings_and_only_in_depth():
    assert decode(Body, b'{"messages": [], "anything": "' + b"[{" * 1000 + b'"}')
    assert decode(Body, b'{"messages": [], "anything": "\\"' + b"[" * 1000 + b'"}')
    assert decode(Body, b'{"messages": [], "anything": [' + b"[],{}," * 1000 + b"[]]}")
    assert decode(Body, b'{"messages": [], "anything": [' + (b"[" * 60 + b"]" * 60 + b",") * 1000 + b"[]]}")
    deepest = MAX_DEPTH - 1
    assert decode(Body, b'{"messages": [], "anything": ' + b"[" * deepest + b"]" * deepest + b"}")


def test_reading_hostile_text_takes_time_that_is_linear_in_it():
    begin = time.process_time()
    for text in (b'\\"' * 500_000, b'"\\' * 500_000, b"[" * 1_000_000, b'"' * 999_999):
        with pytest.raises(ApiError):
            parse_json(b"[" * 100 + b'"' + text)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("sky", [{"type": "sun", "hours": 1}, {"type": "snow"}], ("sun", "rain")),
        ("sky", [{"type": "rain", "strength": "strange"}], ("light", "strong")),
        ("unit", "cm", ("mm", "inch")),
    ],
)
def test_the_error_of_a_wrong_choice_names_the_right_ones(field, value, choices):
    with pytest.raises(ApiError) as caught:
        decode(Body, {"messages": [], field: value})
    assert caught.value.param.startswith(field)
    assert all(choice in caught.value.message for choice in choices)


def test_null_is_an_absent_field():
    assert decode(Body, b'{"messages": [], "n": null, "temperature": null}') == Body([])


def test_an_unknown_field_is_accepted_and_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(body_module, "_seen", set())
    with caplog.at_level(logging.WARNING, logger="verax.serve"):
        for _ in range(2):
            decode(Body, b'{"messages": [], "unheard\\nof": 1}')
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]
