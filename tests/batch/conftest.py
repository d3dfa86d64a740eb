"""Engines, encoder and pipeline of the server's tests."""

from tests.serve.conftest import api as api
from tests.serve.conftest import engine as engine
from tests.serve.conftest import make_api as make_api
from tests.serve.conftest import new_llm as new_llm
from tests.serve.conftest import new_server as new_server
from tests.serve.conftest import served_encoder as served_encoder
from tests.serve.conftest import served_llm as served_llm
from tests.serve.conftest import served_pipeline as served_pipeline
from tests.serve.conftest import slow as slow
