"""The page: its files and headers, answers as HTML, and reports."""

import os
import re

import pytest
from starlette.testclient import TestClient

from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.page import page as module
from verax.serve.page.page import CONTENT_SECURITY_POLICY, MAX_FOLDERS, Reports, static_files
from verax.serve.page.page import render_markdown as render

KEY = {"Authorization": "Bearer secret-key"}


@pytest.fixture
def client(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "compare.html").write_text("<p>equal</p>")
    settings = ServerSettings(reports=tmp_path, api_keys=("secret-key",))
    with TestClient(create_app(Server(settings=settings)), base_url="http://127.0.0.1:8000") as client:
        yield client


def test_the_page_and_its_files_need_no_key_and_have_the_strict_policy(client):
    page = client.get("/")
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    addresses = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
    assert len(addresses) >= 4
    for address in addresses:
        file = client.get(address)
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
        assert file.headers["content-security-policy"] == CONTENT_SECURITY_POLICY


def test_the_page_has_no_inline_code_and_no_address_of_another_machine():
    _, files = static_files()
    for name, content in files.items():
        text = content.decode()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    index = files["index.html"].decode()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", index)
    assert "innerHTML" not in "".join(text.decode() for name, text in files.items() if name != "markdown.js")


def test_markdown_needs_a_key_and_names_a_wrong_field(client):
    assert client.post("/page/markdown", json={"text": "*a*"}).status_code == 401
    assert client.post("/page/markdown", json={"text": "*a*"}, headers=KEY).json() == {"html": "<p><em>a</em></p>\n"}
    for body in ({"text": 3}, {}, {"text": "x" * 200_000}):
        answer = client.post("/page/markdown", json=body, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


def test_a_report_opens_without_a_key_at_an_address_that_only_the_listing_shows(client):
    assert client.get("/page/reports").status_code == 401
    listing = client.get("/page/reports", headers=KEY).json()
    assert [report["name"] for report in listing["reports"]] == ["run/compare.html"]
    report = client.get("/" + listing["prefix"] + "run/compare.html")
    assert report.text == "<p>equal</p>"
    assert report.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    for path in (
        "static/reports/guess/run/compare.html",
        listing["prefix"] + "../../etc/passwd",
        listing["prefix"] + "run",
    ):
        assert client.get("/" + path).status_code == 404


def test_a_server_without_reports_says_so():
    with TestClient(create_app(Server()), base_url="http://127.0.0.1:8000") as client:
        assert client.get("/page/reports").json() == {"prefix": None, "reports": []}
        assert client.get("/static/reports/x/y.html").status_code == 404
        info = client.get("/page/info").json()
        ranges = info.pop("ranges")
        assert info.pop("video_choices")["cache"] == ["teacache", "magcache"]
        nothing = {"models": [], "sampling": {}, "embeddings": None, "videos": None, "reports": False}
        assert info == {**nothing, "video_loras": []}
        assert ranges["min_p"] == {"min": 0, "max": 1}


@pytest.mark.parametrize("query", ["conv_id=none", "", "conv_id=" + "a" * 20])
def test_a_stream_that_is_not_there_is_404_and_stopping_it_does_nothing(client, query):
    answer = client.get(f"/v1/stream?{query}", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conv_id")
    assert client.delete(f"/v1/stream?{query}", headers=KEY).json() == {"stopped": False}


@pytest.mark.parametrize("offset", ["-1", "x", "1e3", "٣", "9" * 30])
def test_an_offset_that_is_not_a_number_is_an_error_of_that_field(client, offset):
    answer = client.get("/v1/stream", params={"conv_id": "a" * 20, "from": offset}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from")


def test_a_server_without_the_page_has_none_of_its_routes():
    with TestClient(
        create_app(Server(settings=ServerSettings(disable_page=True))), base_url="http://127.0.0.1:8000"
    ) as client:
        assert client.get("/").status_code == 404


def test_code_has_classes_and_no_styles():
    html = render("```python\ndef f():\n    return 1\n```\n\n| a |\n|--:|\n| 1 |\n")
    assert '<span class="k">def</span>' in html
    assert '<td class="align-right">1</td>' in html
    assert "style" not in html


@pytest.mark.parametrize("language", sorted(module._LANGUAGES))
def test_every_language_of_the_list_is_highlighted(language):
    assert "<span" in render(f"```{language}\n[1] 'x' # = 2 <a>\nFROM x; if\n+a\n$ ls\n```\n")


def test_another_language_and_a_long_block_are_shown_unchanged():
    long = "a = 1\n" * (module.MAX_HIGHLIGHTED // 6 + 1)
    for html in (render("```brainfuck\n+++<b>\n```"), render(f"```python\n{long}```")):
        assert "<span" not in html
        assert "<code" in html


@pytest.mark.parametrize(
    "hostile",
    [
        '<img src=x onerror="alert(1)">',
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:x)",
        "![a](https://elsewhere.example/x.png)",
        "![a](data:image/svg+xml,<svg onload=alert(1)>)",
        '![a](x "onerror=alert(1)")',
        "<svg onload=alert(1)>",
        "<a href=javascript:alert(1)>x</a>",
        "<style>body{display:none}</style>",
        '```"><script>alert(1)</script>\nx\n```',
        '[a](https://x.example "\\"><script>alert(1)</script>")',
        "<javascript:alert(1)>",
        "|a|\n|--:|\n|<b onclick=alert(1)>|",
    ],
)
def test_a_hostile_text_makes_no_element_that_does_anything(hostile):
    html = render(hostile)
    tags = re.findall(r"<([a-z]+\d?)((?:\s[^<>]*)?)>", html)
    assert {name for name, _ in tags} <= module._TAGS
    for _, attributes in tags:
        names = set(re.findall(r'([\w-]+)="', re.sub(r'="[^"]*"', '="', attributes)))
        assert names <= {"href", "title", "class", "target", "rel", "start"}
        href = re.search(r'href="([^"]*)"', attributes)
        assert href is None or href[1].startswith(("http://", "https://", "mailto:"))


def test_links_open_elsewhere_and_say_nothing_of_the_page():
    html = render("[a](https://example.com) [b](/v1/models)")
    assert '<a href="https://example.com" target="_blank" rel="noopener noreferrer">a</a>' in html
    assert "/v1/models" not in html


@pytest.mark.parametrize("piece", ["[", "*a_", "> ", "- ", "`", "![](", "<", "|a", "&", "\\", "[a](", "~~", "1. "])
def test_texts_that_repeat_a_mark_are_rendered(piece):
    assert render(piece * (20_000 // len(piece)))


def test_what_the_parser_would_let_through_is_cleaned_once_more():
    html = module._clean(
        '<script>a()</script><img src=x onerror="b()"><a href="javascript:c()">d</a><a href="data:text/html,e">f</a>'
        '<p style="g" onclick="h()" class="i">j</p><iframe src="k"></iframe><a href="/l">m</a>'
    )
    for name in ("script", "img", "onerror", "data:", "style", "onclick", "iframe", "/l", "class="):
        assert name not in html
    assert all(text in html for text in ("d", "f", "j", "m"))


@pytest.fixture
def folder(tmp_path):
    reports = tmp_path / "reports"
    (reports / "run").mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (reports / "bench.json").write_text("{}")
    (reports / "run" / "compare.md").write_text("# equal")
    (reports / "model.safetensors").write_bytes(b"weights")
    (reports / ".hidden.json").write_text("{}")
    return reports


def test_reports_are_listed_by_name_with_the_newest_first_without_links_and_deep_folders(folder):
    os.utime(folder / "bench.json", (1, 1))
    assert list(Reports(folder).listing()) == ["run/compare.md", "bench.json"]
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    (folder / "out").symlink_to(folder.parent)
    deep = folder.joinpath(*"abcdef")
    deep.mkdir(parents=True)
    (deep / "far.json").write_text("{}")
    folder.joinpath(*"abcdef"[:MAX_FOLDERS], "near.json").write_text("{}")
    assert sorted(Reports(folder).listing()) == ["a/b/c/near.json", "bench.json", "run/compare.md"]


@pytest.mark.parametrize(
    "name", ["../secret.json", "run/../bench.json", "/etc/passwd", "", ".", "bench.json/", "run", "model.safetensors"]
)
def test_a_name_that_the_listing_has_not_is_not_found(folder, name):
    reports = Reports(folder)
    assert reports.find(reports.token, name) is None
