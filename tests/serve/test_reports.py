import os

import pytest

from verax.serve.page.page import MAX_FOLDERS as MAX_DEPTH
from verax.serve.page.page import Reports


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


def test_reports_are_listed_by_name_with_the_newest_first(folder):
    os.utime(folder / "bench.json", (1, 1))
    assert list(Reports(folder).listing()) == ["run/compare.md", "bench.json"]


def test_links_are_not_followed(folder):
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    (folder / "out").symlink_to(folder.parent)
    assert sorted(Reports(folder).listing()) == ["bench.json", "run/compare.md"]


def test_deep_folders_are_left_out(folder):
    deep = folder.joinpath(*"abcdef")
    deep.mkdir(parents=True)
    (deep / "far.json").write_text("{}")
    folder.joinpath(*"abcdef"[:MAX_DEPTH], "near.json").write_text("{}")
    assert [name for name in Reports(folder).listing() if "near" in name or "far" in name] == ["a/b/c/near.json"]


def test_a_missing_folder_is_empty(tmp_path):
    assert Reports(tmp_path / "none").listing() == {}


@pytest.mark.parametrize(
    "name", ["../secret.json", "run/../bench.json", "/etc/passwd", "", ".", "bench.json/", "run", "model.safetensors"]
)
def test_a_name_that_the_listing_has_not_is_not_found(folder, name):
    reports = Reports(folder)
    assert reports.find(reports.token, name) is None


def test_a_report_is_found_with_the_token_only(folder):
    reports = Reports(folder)
    found = reports.find(reports.token, "run/compare.md")
    assert found is not None
    assert found.path.read_text() == "# equal"
    assert reports.find("é", "run/compare.md") is None
    assert Reports(folder).find(reports.token, "run/compare.md") is None
