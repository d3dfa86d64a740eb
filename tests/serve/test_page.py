"""Routes of the page without a browser: headers, files, Markdown, reports, streams."""

import re

import pytest
from starlette.testclient import TestClient

from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.page.page import CONTENT_SECURITY_POLICY, static_files

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


def test_modules_import_only_files_that_are_there():
    _, files = static_files()
    for name, content in files.items():
        for imported in re.findall(r'(?:from|import) "([^"]+)"', content.decode()):
            assert imported.removeprefix("./") in files, f"{name} imports {imported}"


@pytest.mark.parametrize(
    "path", ["/static/0123456789abcdef/app.js", "/static/{version}/none.js", "/static/{version}/index.html"]
)
def test_other_files_are_not_found(client, path):
    answer = client.get(path.format(version=static_files()[0]))
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_markdown_needs_a_key_and_names_a_wrong_field(client):
    assert client.post("/page/markdown", json={"text": "*a*"}).status_code == 401
    assert client.post("/page/markdown", json={"text": "*a*"}, headers=KEY).json() == {"html": "<p><em>a</em></p>\n"}
    for body in ({"text": 3}, {}, {"text": "x" * 200_000}):
        answer = client.post("/page/markdown", json=body, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


def test_a_report_opens_without_a_key_at_an_address_that_only_the_listing_tells(client):
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
        assert client.get("/page/info").json() == {"models": [], "embeddings": None, "videos": None, "reports": False}


@pytest.mark.parametrize("query", ["conv_id=none", "", "conv_id=" + "a" * 20])
def test_a_stream_that_is_not_there_is_404_and_stopping_it_does_nothing(client, query):
    answer = client.get(f"/v1/stream?{query}", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conv_id")
    assert client.delete(f"/v1/stream?{query}", headers=KEY).json() == {"stopped": False}


@pytest.mark.parametrize("offset", ["-1", "x", "1e3", "٣", "9" * 30])
def test_an_offset_that_is_no_number_is_an_error_of_that_field(client, offset):
    answer = client.get("/v1/stream", params={"conv_id": "a" * 20, "from": offset}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from")


def test_a_server_without_the_page_has_none_of_its_routes():
    with TestClient(
        create_app(Server(settings=ServerSettings(disable_page=True))), base_url="http://127.0.0.1:8000"
    ) as client:
        assert client.get("/").status_code == 404


def test_the_page_stays_small_enough_to_read():
    _, files = static_files()
    lines = sum(text.count(b"\n") for name, text in files.items() if name.endswith((".js", ".css")))
    assert lines <= 2000
