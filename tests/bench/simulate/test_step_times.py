"""Seconds of steps: least times are those of the plan at any length, and a simulation has the steps of the engine."""

import itertools

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint, tiny_config
from verax import LLM, SamplingParams
from verax.bench.serve.load import Load
from verax.bench.serve.traffic import Traffic
from verax.bench.simulate.engines import Engines, planned_engines
from verax.bench.simulate.fleet import simulate
from verax.bench.simulate.step_times import LeastTimes, MeasuredTimes, measure_steps
from verax.errors import InvalidParameterError
from verax.plan.devices import find_device
from verax.plan.model import Described
from verax.plan.stand_ins import Span
from verax.plan.text import text_plan
from verax.text.step.step import StepShape


@pytest.fixture(scope="module")
def plan():
    return text_plan(Described("text", "tiny", tiny_config(), None), find_device("h100"), max_num_seqs=8, context=64)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3")
    sizes = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4}
    return LLM(folder, dtype="float32", use_tqdm=False, **sizes)


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        (StepShape(4, 4, True), [Span(7, 1), Span(30, 1), Span(0, 1)]),
        (StepShape(8, 8, True), [Span(63, 1)] * 8),
        (StepShape(8, 32, False), [Span(3, 20), Span(12, 1), Span(40, 1)]),
        (StepShape(8, 64, False), [Span(0, 64)]),
    ],
)
def test_least_times_are_those_of_the_plan_at_any_length(plan, shape, spans):
    expected = plan.step(shape, [spans])[1].seconds
    assert LeastTimes(plan).seconds(shape, spans) == pytest.approx(expected, rel=1e-9)
    slower = LeastTimes(plan, efficiency=0.5).seconds(shape, spans)
    assert slower == pytest.approx(2 * expected, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.1])
def test_an_efficiency_is_a_share(plan, value):
    with pytest.raises(InvalidParameterError, match=r"^efficiency: "):
        LeastTimes(plan, efficiency=value)


def test_the_cache_of_a_planned_engine_is_what_fits_beside_the_weights(plan):
    config = planned_engines(plan).config
    assert (config.max_num_seqs, config.max_model_len) == (8, 64)
    # All sequences fit, and no more blocks are made than they need: one more than theirs is padding's.
    assert (config.groups[0].num_blocks - 1) * config.block_size >= 8 * 64
    small = text_plan(plan_model(), find_device("x", memory=1e3, bandwidth=1e9, flops=1e12), context=64)
    with pytest.raises(InvalidParameterError, match="do not fit on 1 x x"):
        planned_engines(small)


def plan_model():
    return Described("text", "tiny", tiny_config(), None)


def test_every_step_of_an_engine_is_measured(llm):
    times = measure_steps(llm.engine, np.random.default_rng(0))
    assert set(times.by_shape) == set(llm.engine.runner.config.shapes)
    assert all(seconds > 0 for seconds in times.by_shape.values())
    assert times.per_cached_token >= 0
    assert not llm.engine.has_unfinished_requests
    with pytest.raises(InvalidParameterError, match="was not measured"):
        times.seconds(StepShape(5, 5, True), [])


def test_the_median_of_measurements_is_that_of_each_step():
    one, two = StepShape(1, 1, True), StepShape(2, 2, True)
    seconds = [(1.0, 5.0, 0.5), (9.0, 2.0, 0.25), (2.0, 3.0, 0.0)]
    times = MeasuredTimes.median([MeasuredTimes({one: a, two: b}, cached) for a, b, cached in seconds])
    assert times.by_shape == {one: 2.0, two: 3.0}
    assert times.seconds(one, [Span(4, 1)]) == 2.0 + 4 * 0.25
    assert times.over(MeasuredTimes({one: 1.0, two: 1.0}, 0.0)) == 2.5


class Recorded:
    """Times of a second for each step, and the shapes and sequences of the steps."""

    def __init__(self):
        self.steps = []

    def seconds(self, shape, spans):
        self.steps.append((shape, sorted(spans, key=lambda span: (span.before, span.count))))
        return 1.0


def test_a_simulation_has_the_steps_of_the_engine(llm, monkeypatch):
    traffic = Traffic(
        llm.engine.vocab_size, input_tokens=24, output_tokens=12, range_ratio=0.8, prefix_tokens=8, seed=3
    )
    asked = list(itertools.islice(traffic.requests(), 12))
    runner, real = llm.engine.runner, Recorded()
    run = runner.run

    def recording(schedule):
        spans = [Span(chunk.start, chunk.count) for chunk in schedule.chunks]
        real.seconds(runner.shape_for(schedule), spans)
        return run(schedule)

    monkeypatch.setattr(runner, "run", recording)
    params = [SamplingParams(temperature=0.0, max_tokens=each.max_tokens, ignore_eos=True) for each in asked]
    llm.generate([list(each.prompt) for each in asked], params, use_tqdm=False)

    simulated = Recorded()
    engines = Engines(runner.config, simulated, llm.engine.vocab_size)
    simulate(engines.new(1), Load("all at once", concurrency=12, num_requests=12), iter(asked))
    assert simulated.steps == real.steps
