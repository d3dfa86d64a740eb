"""Request bodies to msgspec Structs. A wrong field is an error 400 that names it."""

from __future__ import annotations

import codecs
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from verax.serve.http.errors import ApiError, field_error

MAX_DEPTH = 64
"""Levels of lists and objects in a request."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, or the rest of the text where one does not end, so that a search is linear in the text."""

_ONE_KIND = bytes.maketrans(b"{}", b"[]")

_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<where>key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)

_MISSING = re.compile(r"^Object missing required field `(\w+)`$")

_NOTHING = (False, "", "false", [], {})
"""Values that ask for nothing, in JSON or in a form."""

_LONGEST_NAME = 64

_MOST_NAMES = 1000

_type_info = functools.cache(msgspec.inspect.type_info)

_log = logging.getLogger("verax.serve")

_seen: set[str] = set()

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request, kind: type[T]) -> T:
    """Read a request's JSON body as a Struct."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"content-type: expected application/json, got {content_type!r}", param="content-type")
    return decode(kind, await request.body())


def decode(kind: type[T], body: bytes | Mapping[str, Any]) -> T:
    """Check a body against a Struct. Unknown fields are accepted, and logged once a name.

    Args:
        kind: Struct of the body. Its class variable `elsewhere` has the names of fields that are refused, as they have
            a meaning to other endpoints, and `instead` the names of other servers' fields, with the field to use or "".
        body: JSON text in UTF-8, or an object that was read from one.
    """
    values = _parse(body, kind) if isinstance(body, bytes) else body
    if not isinstance(values, Mapping):
        raise ApiError(400, "body: expected a JSON object")
    # A null is an absent field, for required ones too.
    given = {name: value for name, value in values.items() if value is not None}
    for name in sorted(given.keys() - kind.__struct_encode_fields__):
        if name in getattr(kind, "elsewhere", ()):
            raise field_error(name, "this endpoint does not have it")
        instead = getattr(kind, "instead", {}).get(name)
        if instead is not None and given[name] not in _NOTHING:
            raise field_error(name, f"it is not supported here{instead and f'; use {instead}'}")
        _report_unknown(name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from error
    except (OverflowError, RecursionError) as error:
        raise ApiError(400, f"body: {error}") from error


def parse_json(body: bytes) -> Any:
    """Value of a JSON text."""
    return _parse(body, None)


def _parse(body: bytes, kind: type[msgspec.Struct] | None) -> Any:
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body:
        raise ApiError(400, "body: it is empty; expected a JSON object")
    _check_depth(body)
    try:
        body.decode("utf-8")
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: it is not UTF-8: invalid byte at {error.start}") from error
    except msgspec.ValidationError as error:
        raise _out_of_range(body, kind, error) from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        place = re.search(r"\(byte (\d+)\)$", str(error))
        text = body[int(place[1]) :][:20].decode(errors="replace") if place else ""
        raise ApiError(400, f"body: it is not valid JSON: {error}{text and f', at {text!r}'}") from error


def _check_depth(body: bytes) -> None:
    """Check the depth in one pass, without recursion. Brackets that do not match are left to the parser."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(_ONE_KIND, _NO_BRACKETS), np.uint8)
    steps = np.where(brackets == ord("["), np.int8(1), np.int8(-1))
    if steps.cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ApiError(400, f"body: JSON nested deeper than {MAX_DEPTH} levels")


def _out_of_range(body: bytes, kind: type[msgspec.Struct] | None, error: Exception) -> ApiError:
    """Error of a number that no float holds. Only decoding to a Struct gives the field's name."""
    try:
        msgspec.json.decode(body, type=kind or Any)
    except msgspec.ValidationError as named:
        error = named
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    return _wrong_field(str(error).replace("$[...]", "$"))


def _wrong_field(problem: str, kind: type[msgspec.Struct] | None = None) -> ApiError:
    match = _PATH.match(problem)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        what = "it is missing"
    what = what.replace(" | null`", "`").replace("`", "")
    param = path or "body"
    if kind is not None and what.startswith("Invalid") and (choices := _choices(kind, path)):
        what += f", expected {', '.join(choices)}"
    return field_error(param, f"{what[0].lower()}{what[1:]}")


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Values that a field may have, if only some are right, such as the tags of Structs.

    `path`: the field's path in an error, such as `messages[0].role`.
    """
    at: list[Any] = [_type_info(kind)]
    for name, item in re.findall(r"(\w+)|(\[)", re.sub(r"\[[^]]*]", "[", path)):
        below: list[Any] = []
        for declared in _members(at):
            if item and isinstance(declared, msgspec.inspect.ListType):
                below.append(declared.item_type)
            elif name and isinstance(declared, msgspec.inspect.StructType):
                below += [field.type for field in declared.fields if field.encode_name == name]
                below += [msgspec.inspect.LiteralType((declared.tag,))] if declared.tag_field == name else []
        at = below
    values = [declared.values for declared in _members(at) if isinstance(declared, msgspec.inspect.LiteralType)]
    return [str(value) for value in sum(values, ())]


def _members(declared: Iterable[Any]) -> Iterator[Any]:
    """Types without the metadata around them, and each type of a union by itself."""
    for one in declared:
        inner = one.type if isinstance(one, msgspec.inspect.Metadata) else one
        yield from _members(inner.types) if isinstance(inner, msgspec.inspect.UnionType) else (inner,)


def _report_unknown(name: object) -> None:
    shown = ascii(name)[:_LONGEST_NAME]
    if shown not in _seen and len(_seen) < _MOST_NAMES:
        _seen.add(shown)
        _log.warning("unknown field %s in a request: ignored", shown)
