"""Who may call the server: API keys, host names and origins."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from verax.serve.http.errors import ApiError, error_response

if TYPE_CHECKING:
    from verax.serve.http.server import Server

__all__ = ["Security", "is_loopback"]

_STATIC = "/static/"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Security:
    """Checks the host, the origin and the API key of each request before anything else sees it.

    A page of another site can make a browser send requests to this server. Its origin gives it away. A name that the
    site's owner points at 127.0.0.1 (DNS rebinding) gives itself away as the host.
    """

    def __init__(self, app: ASGIApp, server: Server):
        settings = server.settings
        self._app = app
        self._keys = [_digest(key) for key in settings.api_keys]
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        own = {settings.host.lower(), *_LOOPBACK_NAMES} if is_loopback(settings.host) else set()
        self._hosts = frozenset({*own, *(host.lower() for host in settings.allowed_hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that passes, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            self._check_origin(headers)
            if not _is_public(scope):
                self._check_key(headers)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        # A server on all addresses is known by names that it does not know itself: those are checked only if given.
        if self._hosts and _hostname(host) not in self._hosts:
            raise ApiError(
                403, f"host: {host[:100]!r} is not served here; --allowed-hosts adds names", param="host", code="host"
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins:
            return
        if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise ApiError(
                403,
                f"origin: {origin[:100]!r} may not call this server; --allowed-origins adds origins",
                param="origin",
                code="origin",
            )

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # All keys are compared, so that the time says nothing about which of them was near.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            raise ApiError(
                401,
                "authorization: a valid API key is needed, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
                param="authorization",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server at this address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_public(scope: Scope) -> bool:
    """True for paths that need no key: the health, and the page's own files, which hold nothing of anyone."""
    path = scope["path"]
    files = scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith(_STATIC))
    return path == "/health" or files


def _hostname(host: str) -> str:
    """Host of a Host header, without its port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
