"""A small checkpoint that every command can load, and a way to run a command as a shell would."""

import io
import logging
import sys
from contextlib import contextmanager
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
def few_programs(monkeypatch):
    """For short prompts: with steps of 32 tokens at most, engines start in half the time."""
    monkeypatch.setattr("verax.text.step.sizes.MIN_BATCHED_TOKENS", {"cpu": 32})


@contextmanager
def kept_loggers():
    """Loggers are afterwards as they were: a server's write to the captured standard error of its test."""
    loggers = [logging.getLogger(name) for name in ("verax", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("generate", "--json", ..., stdin="text")`: exit status and both outputs."""

    def call(*arguments, stdin="", terminal=False):
        monkeypatch.setattr(sys, "argv", ["verax", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Result(ended.value.code or 0, *capsys.readouterr())

    with kept_loggers():
        yield call
