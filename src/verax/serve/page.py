"""The page at `/`: its files, its security headers, and the few routes that only the page uses.

Files are served below `/static/HASH/`, the hash being that of all of them, so that relative imports between modules work
and browsers may keep them for ever.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import verax
from verax.serve import markdown
from verax.serve.errors import ApiError
from verax.serve.fields import decode
from verax.serve.reports import CONTENT_TYPES, Reports

if TYPE_CHECKING:
    from verax.serve.server import Server

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
"""A report is a page by itself: it may style itself and show what it contains, without scripts and without an origin."""

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
    folder = files("verax.serve") / "static"
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
            raise ApiError(404, "There is no such file", type="not_found_error")
        headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(contents[name], media_type=TYPES[suffix], headers=headers)

    async def info(request: Request) -> Response:
        about = {
            "version": verax.__version__,
            "models": list(server.served_names),
            "embeddings": server.encoder is not None,
            "videos": server.videos is not None,
            "reports": reports is not None,
        }
        return JSONResponse(about, headers={"Cache-Control": "no-store"})

    async def render(request: Request) -> Response:
        body = decode(MarkdownRequest, await request.body())
        html = await asyncio.to_thread(markdown.render, body.text)
        return JSONResponse({"html": html}, headers={"X-Content-Type-Options": "nosniff"})

    async def list_reports(request: Request) -> Response:
        listing = await asyncio.to_thread(reports.listing) if reports is not None else {}
        found = [
            {"name": report.name, "size": report.size, "modified": report.modified} for report in listing.values()
        ]
        prefix = f"page/reports/{reports.token}/" if reports is not None else None
        return JSONResponse({"prefix": prefix, "reports": found}, headers={"Cache-Control": "no-store"})

    async def read_report(request: Request) -> Response:
        token, name = request.path_params["token"], request.path_params["name"]
        report = await asyncio.to_thread(reports.find, token, name) if reports is not None else None
        if report is None:
            raise ApiError(404, "There is no such report", type="not_found_error")
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
        return FileResponse(report.path, media_type=CONTENT_TYPES[report.path.suffix], headers=headers)

    return [
        Route("/", page),
        Route("/static/{version}/{name}", static),
        Route("/page/info", info),
        Route("/page/markdown", render, methods=["POST"]),
        Route("/page/reports", list_reports),
        Route("/page/reports/{token}/{name:path}", read_report),
    ]
