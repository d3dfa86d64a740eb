"""Engines, encoder and pipeline of the server's tests."""

from tests.serve.conftest import *  # noqa: F403
