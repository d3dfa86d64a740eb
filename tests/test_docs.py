"""The documentation's picture, links and navigation agree with the sources."""

import re
import runpy
from pathlib import Path

import pytest

import verax
from tests.support.markdown import is_generated

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ARCHITECTURE = runpy.run_path(str(ROOT / "docs/architecture.py"))


def test_the_pictures_match_the_script():
    for file, text in ARCHITECTURE["pictures"]().items():
        assert (ROOT / "docs" / file).read_text(encoding="utf-8") == text, "run `python docs/architecture.py`"


def test_the_pictures_name_modules_that_exist():
    for stages in ARCHITECTURE["FLOWS"].values():
        for module in (module for _, modules, _ in stages for module in modules.split(", ")):
            assert (ROOT / "src/verax" / module).is_file(), module


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [target for target in targets if target and not (ROOT / target).exists()] == []


SOURCES = (ROOT, ROOT / "src/verax", ROOT / "src/verax/ops/cpu", ROOT / "examples/port_gpt2")
"""Folders that the paths of source files in the pages begin in."""


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page):
    text = "" if is_generated(page) else page.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+\.(?:py|cc|h))`", text))
    assert [path for path in sorted(named) if not any((folder / path).is_file() for folder in SOURCES)] == []


def test_the_page_of_features_lists_every_public_name():
    section = (ROOT / "docs/features.md").read_text(encoding="utf-8").partition("## Public names")[2]
    listed = {name.removeprefix("verax.") for name in re.findall(r"`([\w.]+)`", section)}
    assert set(verax.__all__) - {"__version__"} <= listed
