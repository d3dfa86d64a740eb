"""Options that are declared once: their check, their documentation, and the flags that derive from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from verax.cli.options import Flags, with_flags
from verax.errors import InvalidParameterError
from verax.options import check_options, documented, option, options_of


@documented
@dataclass(frozen=True)
class Table:
    """Options of a test."""

    size: int | None = option(None, "Size of it. If None: what fits.", low=1, high=9, shown="what fits")
    share: float = option(0.5, "Share of it.", low=0, above=True, flags=("--share", "-s"), panel="Shares")
    form: str = option("round", "round or square.", choices=("round", "square"))
    quiet: bool = option(False, "Say nothing.")
    loud_names: tuple[str, ...] = option((), "A name; can be repeated.")
    folder: str | Path | None = option(None, "Folder of it.")

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("size", 0, "a whole number of 1 to 9, or None"),
        ("size", True, "a whole number of 1 to 9, or None"),
        ("share", 0, "a number of more than 0"),
        ("share", float("nan"), "a number of more than 0"),
        ("share", None, "a number of more than 0"),
        ("form", "flat", "one of round, square"),
        ("quiet", 1, "True or False"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(name, value, expected):
    with pytest.raises(InvalidParameterError, match=f"^{name}: expected {expected}, got "):
        Table(**{name: value})


def test_limits_are_allowed():
    assert (Table(size=1).size, Table(size=9).size) == (1, 9)


def test_the_docstring_lists_the_options_and_the_help_is_the_first_sentence():
    assert "size: Size of it. If None: what fits." in (Table.__doc__ or "")
    assert options_of(Table)["size"].help == "Size of it."


def invoke(flags: Flags, *arguments: str):
    taken = []

    def command(*, table) -> None:
        taken.append(table)

    command.__annotations__["table"] = Annotated[dict[str, Any], flags]
    app = typer.Typer()
    app.command()(with_flags(command))
    return CliRunner().invoke(app, arguments), *taken


def test_flags_become_a_dictionary_by_the_names_of_the_table():
    arguments = ("--size", "3", "-s", "0.25", "--quiet", "--loud-names", "a", "--loud-names", "b", "--folder", "x")
    _, taken = invoke(Flags(Table), *arguments)
    assert taken == dict(size=3, share=0.25, form="round", quiet=True, loud_names=("a", "b"), folder=Path("x"))
    _, taken = invoke(Flags(Table))
    assert Table(**taken) == Table()


def test_a_command_chooses_options_defaults_and_spellings():
    flags = Flags(Table, only=("size", "quiet", "loud_names"), defaults={"quiet": True}, prefix="my_", underscores=True)
    _, taken = invoke(flags, "--my_loud_names", "a", "--no-my-quiet")
    assert taken == {"size": None, "quiet": False, "loud_names": ("a",)}
    result, *_ = invoke(flags, "--my-size", "10")
    assert result.exit_code == 2
    assert "--my-size" in result.output
