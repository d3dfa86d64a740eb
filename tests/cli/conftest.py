"""A small checkpoint that every command can load, and a way to run a command as a shell would."""

import io
import sys
from typing import NamedTuple

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import cli


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128))


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("generate", "--json", ..., stdin="text")`: exit status and both outputs."""

    def call(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["verax", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Result(ended.value.code or 0, *capsys.readouterr())

    return call
