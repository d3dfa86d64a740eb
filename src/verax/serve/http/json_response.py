"""Answers as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["JsonResponse"]


class JsonResponse(Response):
    """Answer with a JSON body. Numbers that are not finite, which JSON lacks, become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode an object, a list or a msgspec Struct."""
        return msgspec.json.encode(content)
