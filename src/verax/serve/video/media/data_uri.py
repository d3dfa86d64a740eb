"""Data URIs, the only form in which a JSON body may bring a file."""

from __future__ import annotations

import base64
import binascii
import re

from verax.errors import InvalidParameterError

__all__ = ["read_data_uri"]

_HEADER = re.compile(r"data:[\w.+-]{1,40}/[\w.+-]{1,60}(;[\w.+-]{1,40}=[\w.+-]{1,60})*;base64", re.ASCII)
_LONGEST_HEADER = 200
"""Characters among which the comma behind the header must be."""


def read_data_uri(uri: str, *, name: str) -> bytes:
    """Contents of a base64 data URI such as `data:image/png;base64,iVBO...`.

    The media type is not read further: the first bytes of the contents decide how they are decoded.

    Args:
        uri: text of the client.
        name: name of the field in errors.

    Raises:
        InvalidParameterError: for anything else, a URL among it: the server fetches nothing.
    """
    header = uri[:_LONGEST_HEADER].partition(",")[0]
    if not uri.startswith(f"{header},") or not _HEADER.fullmatch(header):
        raise InvalidParameterError(
            f"{name}: expected a data URI with base64 (data:image/png;base64,...); URLs and paths are not read"
        )
    try:
        return base64.b64decode(uri[len(header) + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(f"{name}: the data URI has no valid base64 behind its comma: {error}") from error
