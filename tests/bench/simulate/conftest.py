"""Engines of a tiny model whose steps take times that a test can add up."""

from collections.abc import Sequence

import pytest

from tests.support.tiny import tiny_config
from verax.bench.simulate.engines import Engines
from verax.bench.simulate.overheads import Overheads
from verax.models import causal_lm
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.sizes import block_bytes, plan_sizes


class CountedTimes:
    """A second for each step, and `per_token` for each of its tokens. Keeps the shapes of all steps."""

    def __init__(self, per_token=0.0):
        self.per_token = per_token
        self.steps = []

    def seconds(self, shape, spans: Sequence):
        self.steps.append((shape, tuple(spans)))
        return 1.0 + self.per_token * sum(span.count for span in spans)


@pytest.fixture
def make_engines():
    def make(per_token=0.0, *, blocks=200, overheads=None, **options):
        _, config = causal_lm(tiny_config())
        sizes = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, **options}
        memory = blocks * block_bytes(config, 4, "float32")
        planned = plan_sizes(config, "float32", EngineConfig(kv_cache_memory=memory, **sizes))
        times = CountedTimes(per_token)
        return Engines(planned, times, config.vocab_size, overheads=overheads or Overheads())

    return make
