"""Log of the server: one line an event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

__all__ = ["ACCESS", "JsonFormatter", "TextFormatter", "configure_logs"]

ACCESS = "verax.serve.access"
"""Logger of the requests. Its records have the attribute `fields`."""

_PLAIN = re.compile(r"[!-~]+")


class TextFormatter(logging.Formatter):
    """Time, level and message; of a request, `name=value` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as text. What a client sent is quoted: it cannot begin a line of its own."""
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        if fields is not None:
            return f"{moment} {' '.join(f'{name}={_shown(value)}' for name, value in fields.items())}"
        text = f"{moment} {record.levelname}: {record.getMessage()}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(format: str) -> None:
    """Send the logs of the server and its engines to standard error.

    Args:
        format: `"text"` or `"json"`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name, level in {"verax": logging.INFO, "uvicorn": logging.WARNING}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
