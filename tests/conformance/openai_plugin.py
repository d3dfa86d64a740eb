"""Plugin of pytest in openai-python's tests: deselects what `openai_deselected.toml` lists, and counts by file."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("openai_deselected.toml")
RESOURCES = "tests/api_resources/"

_counts: dict[str, Counter[str]] = {}


def names_of(item: pytest.Item) -> set[str]:
    """Names that stand for a test: with and without its variant."""
    file = item.nodeid.partition("::")[0].removeprefix(RESOURCES)
    test, _, variant = item.name.partition("[")
    return {f"{file}::{test}"} | ({f"{file}::{test}[{variant}"} if variant else set())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the list."""
    groups = tomllib.loads(LIST.read_text(encoding="utf-8"))["group"]
    kinds = ("test_method", "test_raw_response", "test_streaming_response")
    listed = {name.replace("*", kind) for group in groups for name in group["tests"] for kind in kinds}
    if unknown := listed - {name for item in items for name in names_of(item)}:
        raise pytest.UsageError(f"{LIST.name}: no such tests: {', '.join(sorted(unknown))}")
    left_out = [item for item in items if listed & names_of(item)]
    for item in left_out:
        _counts.setdefault(item.nodeid.partition("::")[0], Counter())["deselected"] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not listed & names_of(item)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a result."""
    if report.when == "call" or not report.passed:
        _counts.setdefault(report.nodeid.partition("::")[0], Counter())[report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of each file."""
    for file, counts in sorted(_counts.items()):
        shown = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        terminalreporter.write_line(f"{file.removeprefix(RESOURCES)}: {shown}")
