"""Engines, encoder and pipeline of the server's tests."""

from tests.serve.conftest import (
    anyio_backend,
    api,
    engine,
    make_api,
    new_llm,
    new_server,
    served_encoder,
    served_llm,
    served_pipeline,
    slow,
)

__all__ = [
    "anyio_backend",
    "api",
    "engine",
    "make_api",
    "new_llm",
    "new_server",
    "served_encoder",
    "served_llm",
    "served_pipeline",
    "slow",
]
