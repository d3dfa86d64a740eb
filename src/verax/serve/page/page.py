"""The page at `/`: its files and their headers, answers as HTML, and reports."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import html
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.options import options_of
from verax.sampling_fields import SamplingFields
from verax.serve.http.body import read_body
from verax.serve.http.errors import ApiError, JsonResponse
from verax.video.options import VideoRequest

if TYPE_CHECKING:
    from verax.serve.http.server import Server

MAX_CHARACTERS = 128 * 1024
"""Length of the longest text that is rendered, about 30,000 tokens. The page shows longer ones as plain text."""

MAX_HIGHLIGHTED = 20_000
"""Length of the longest code block that is highlighted. Lexers are regular expressions, some of them slow."""


# fmt: off
_LANGUAGES = frozenset((
    "bash", "c", "c++", "console", "cpp", "cs", "csharp", "css", "diff", "docker", "dockerfile", "go", "html",
    "ini", "java", "javascript", "js", "json", "kotlin", "lua", "make", "makefile", "php", "py", "python", "r",
    "ruby", "rust", "sh", "shell", "sql", "swift", "toml", "ts", "typescript", "xml", "yaml", "yml",
))
# fmt: on
"""Languages that are highlighted. Blocks in other languages are shown unchanged."""


# fmt: off
_TAGS = frozenset((
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
))
# fmt: on


_SCHEMES = frozenset({"http", "https", "mailto"})

_ALIGNMENTS = frozenset({"align-left", "align-center", "align-right"})


def render_markdown(text: str) -> str:
    """HTML of a Markdown text: CommonMark with tables and strikethrough."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidParameterError(f"text: {len(text)} characters, at most {MAX_CHARACTERS} are rendered")
    return _clean(_parser().render(text))


@functools.cache
def _parser() -> Any:
    markdown_it = require_optional("markdown_it")
    parser = markdown_it.MarkdownIt(
        "js-default", {"html": False, "linkify": False, "maxNesting": 20, "highlight": _highlight}
    )
    parser.add_render_rule("image", _image)
    parser.add_render_rule("th_open", _cell)
    parser.add_render_rule("td_open", _cell)
    return parser


def _image(renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    """A link in place of a picture: the page loads nothing from elsewhere."""
    token = tokens[index]
    label = renderer.renderInlineAsText(token.children or [], options, env) or "picture"
    return f'<a href="{html.escape(str(token.attrGet("src") or ""))}">{html.escape(label)}</a>'


def _cell(renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    """A table cell whose alignment is a class. markdown-it writes a style."""
    style = str(tokens[index].attrGet("style") or "")
    alignment = f' class="align-{style.removeprefix("text-align:")}"' if style else ""
    return f"<{tokens[index].tag}{alignment}>"


def _highlight(code: str, language: str, _attributes: str) -> str:
    """Inner HTML of a code block, with Pygments' classes; empty if markdown-it is to write it plainly."""
    name = language.lower()
    if name not in _LANGUAGES or len(code) > MAX_HIGHLIGHTED:
        return ""
    pygments = require_optional("pygments")
    lexer = require_optional("pygments.lexers").get_lexer_by_name(name, stripnl=False)
    formatter = require_optional("pygments.formatters").HtmlFormatter(nowrap=True)
    return pygments.highlight(code, lexer, formatter)


@functools.cache
def _classes() -> dict[str, set[str]]:
    """Class names that each tag may have."""
    pygments_token = require_optional("pygments.token")
    kinds = {name for name in pygments_token.STANDARD_TYPES.values() if name}
    code = {f"language-{name}" for name in _LANGUAGES}
    return {"span": kinds, "code": code, "td": set(_ALIGNMENTS), "th": set(_ALIGNMENTS)}


def _clean(unsafe: str) -> str:
    return require_optional("nh3").clean(
        unsafe,
        tags=set(_TAGS),
        attributes={"a": {"href", "title"}, "ol": {"start"}},
        allowed_classes=_classes(),
        set_tag_attribute_values={"a": {"target": "_blank"}},
        url_schemes=set(_SCHEMES),
        url_relative="deny",
        link_rel="noopener noreferrer",
    )


CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".png": "image/png",
}
"""Kinds of files that are reports, and the type each is served with."""

MAX_REPORTS = 1000

MAX_FOLDERS = 3
"""Levels of folders that are listed: `verax compare` and `verax bench` write one folder for each run."""


@dataclass(frozen=True)
class Report:
    """One file: its name relative to the folder with `/` between parts, its size in bytes, its time of change."""

    name: str
    path: Path
    size: int
    modified: float


class Reports:
    """Listing of a folder of reports. `folder`: where the reports are. It may be missing, and files may come and go."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.token = secrets.token_urlsafe(24)
        """Secret part of the addresses of reports, which a browser opens without an API key. The listing has it."""

    def listing(self) -> dict[str, Report]:
        """Reports by name, the newest first, at most `MAX_REPORTS`. Links and hidden files are left out."""
        reports = sorted(self._files(), key=lambda report: -report.modified)
        return {report.name: report for report in reports[:MAX_REPORTS]}

    def find(self, token: str, name: str) -> Report | None:
        """The report of a name in the listing; None if there is none, or the token is wrong."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        return self.listing().get(name)

    def _files(self) -> list[Report]:
        reports: list[Report] = []
        for parent, folders, names in os.walk(self._folder):
            inside = Path(parent).relative_to(self._folder)
            if len(inside.parts) >= MAX_FOLDERS:
                folders.clear()
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(parent, name)
                if name.startswith(".") or path.suffix not in CONTENT_TYPES or path.is_symlink():
                    continue
                try:
                    status = path.stat()
                except OSError:
                    continue
                reports.append(Report((inside / name).as_posix(), path, status.st_size, status.st_mtime))
        return reports


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


def _sampling_ranges() -> dict[str, dict[str, float]]:
    """Least and largest value of each sampling parameter that has them, as attributes of an input."""
    ranges = {"min": "low", "max": "high"}
    return {
        name: {key: limit for key, field in ranges.items() if (limit := getattr(declared, field)) is not None}
        for name, declared in options_of(SamplingFields).items()
        if declared.kind is not bool
    }


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
            raise ApiError(404, "the page has no such file")
        headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(contents[name], media_type=TYPES[suffix], headers=headers)

    async def info(request: Request) -> Response:
        facts = {
            "models": list(server.text_names) if server.llm is not None else [],
            "sampling": {} if server.llm is None else server.llm.chat_sampling,
            "embeddings": server.encoder and server.encoder.name,
            "videos": server.videos and server.videos.name,
            "video_loras": list(server.video_loras),
            "video_choices": {name: list(options_of(VideoRequest)[name].choices) for name in ("recipe", "cache")},
            "reports": reports is not None,
            "ranges": _sampling_ranges(),
        }
        return JsonResponse(facts, headers={"Cache-Control": "no-store"})

    async def render(request: Request) -> Response:
        body = await read_body(request, MarkdownRequest)
        html = await asyncio.to_thread(render_markdown, body.text)
        return JsonResponse({"html": html}, headers={"X-Content-Type-Options": "nosniff"})

    async def list_reports(request: Request) -> Response:
        listing = await asyncio.to_thread(reports.listing) if reports is not None else {}
        names = ("name", "size", "modified")
        rows = [{name: getattr(report, name) for name in names} for report in listing.values()]
        prefix = f"static/reports/{reports.token}/" if reports is not None else None
        return JsonResponse({"prefix": prefix, "reports": rows}, headers={"Cache-Control": "no-store"})

    async def read_report(request: Request) -> Response:
        token, name = request.path_params["token"], request.path_params["name"]
        report = await asyncio.to_thread(reports.find, token, name) if reports is not None else None
        if report is None:
            raise ApiError(404, "this report does not exist")
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
        return FileResponse(report.path, media_type=CONTENT_TYPES[report.path.suffix], headers=headers)

    async def follow_stream(request: Request) -> Response:
        offset = request.query_params.get("from", "0")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 16):
            raise InvalidParameterError(f"from: expected a number of bytes, got {offset[:100]!r}")
        try:
            events = server.streams.follow(request.query_params.get("conv_id", ""), int(offset))
        except KeyError:
            raise ApiError(404, "conv_id: this stream does not exist, or has been forgotten", param="conv_id") from None
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
