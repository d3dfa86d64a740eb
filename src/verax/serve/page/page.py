"""The page at `/`: its files, its security headers, and the few routes that only the page uses.

Files are served below `/static/HASH/`, with the hash of all of them. So relative imports between modules work, and
browsers may keep them for ever.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError
from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.page import markdown
from verax.serve.page.reports import CONTENT_TYPES, Reports

if TYPE_CHECKING:
    from verax.serve.http.server import Server

__all__ = ["CONTENT_SECURITY_POLICY", "HEADERS", "REPORT_POLICY", "routes"]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Own scripts and styles only, nothing inline, no request to anybody else."""

REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""A report is a page by itself. It may style itself and show what it contains, without scripts or an origin."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every file of the page."""

TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class MarkdownRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /page/markdown`."""

    text: str


@functools.cache
def static_files() -> tuple[str, dict[str, bytes]]:
    """Hash of all files of the page, 16 hexadecimal digits, and the files by name."""
    folder = files("verax.serve.page") / "static"
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{len(contents[name])}\0".encode())
        digest.update(contents[name])
    return digest.hexdigest()[:16], contents


def routes(server: Server) -> list[Route]:
    """Routes of the page."""
    reports = Reports(server.settings.reports) if server.settings.reports is not None else None
    version, contents = static_files()
    index = contents["index.html"].replace(b"{static}", f"static/{version}".encode())

    async def page(request: Request) -> Response:
        return Response(index, media_type="text/html", headers={**HEADERS, "Cache-Control": "no-cache"})

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        suffix = name[name.rfind(".") :]
        if request.path_params["version"] != version or name not in contents or suffix not in TYPES:
            raise ApiError(404, "There is no such file")
        headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(contents[name], media_type=TYPES[suffix], headers=headers)

    async def info(request: Request) -> Response:
        about = {
            "models": list(server.text_names) if server.llm is not None else [],
            "embeddings": server.encoder and server.encoder.name,
            "videos": server.videos and server.videos.name,
            "reports": reports is not None,
        }
        return JsonResponse(about, headers={"Cache-Control": "no-store"})

    async def render(request: Request) -> Response:
        body = await read_body(request, MarkdownRequest)
        html = await asyncio.to_thread(markdown.render, body.text)
        return JsonResponse({"html": html}, headers={"X-Content-Type-Options": "nosniff"})

    async def list_reports(request: Request) -> Response:
        listing = await asyncio.to_thread(reports.listing) if reports is not None else {}
        found = [{"name": report.name, "size": report.size, "modified": report.modified} for report in listing.values()]
        prefix = f"static/reports/{reports.token}/" if reports is not None else None
        return JsonResponse({"prefix": prefix, "reports": found}, headers={"Cache-Control": "no-store"})

    async def read_report(request: Request) -> Response:
        token, name = request.path_params["token"], request.path_params["name"]
        report = await asyncio.to_thread(reports.find, token, name) if reports is not None else None
        if report is None:
            raise ApiError(404, "There is no such report")
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
        return FileResponse(report.path, media_type=CONTENT_TYPES[report.path.suffix], headers=headers)

    async def follow_stream(request: Request) -> Response:
        offset = request.query_params.get("from", "0")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 16):
            raise InvalidParameterError(f"from: expected a number of bytes, got {offset[:100]!r}")
        try:
            events = server.streams.follow(request.query_params.get("conv_id", ""), int(offset))
        except KeyError:
            raise ApiError(404, "conv_id: there is no such stream, or no longer", param="conv_id") from None
        return server.stream(events)

    async def stop_stream(request: Request) -> Response:
        return JsonResponse({"stopped": server.streams.stop(request.query_params.get("conv_id", ""))})

    return [
        Route("/", page),
        Route("/static/{version}/{name}", static),
        Route("/page/info", info),
        Route("/page/markdown", render, methods=["POST"]),
        Route("/page/reports", list_reports),
        # Below /static/, which needs no API key: a browser opens a report as a page of its own. The token is secret.
        Route("/static/reports/{token}/{name:path}", read_report),
        Route("/v1/stream", follow_stream),
        Route("/v1/stream", stop_stream, methods=["DELETE"]),
    ]
