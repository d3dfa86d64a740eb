"""A simulated fleet: times of answers that can be added up by hand, failures that lose nothing, routers, shares."""

import itertools

import pytest

from verax.bench.serve.load import Load
from verax.bench.serve.traffic import Request, Traffic
from verax.bench.simulate import run as module
from verax.bench.simulate.fleet import Failures, simulate
from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.run import simulate_fleets
from verax.errors import InvalidParameterError


def requests(*lengths, prefix=()):
    """Requests of (prompt, answer) tokens. No two prompts begin alike behind the prefix."""
    return iter(
        [
            Request(number, (*prefix, 3 + number, *range(40, 39 + prompt)), answer)
            for number, (prompt, answer) in enumerate(lengths)
        ]
    )


def at(*times):
    """Requests that arrive at these times."""
    return Load("at", arrivals=lambda run: itertools.chain(times, itertools.repeat(1e9)), num_requests=len(times))


def closed(concurrency, count):
    return Load("closed", concurrency=concurrency, num_requests=count)


def test_an_answer_has_a_token_at_the_end_of_each_step(make_engines):
    run, _ = simulate(make_engines().new(1), closed(1, 1), requests((8, 4)))
    (answer,) = run.answers
    assert answer.events == [1.0, 2.0, 3.0, 4.0]
    assert (answer.sent, answer.ended, answer.completion_tokens, answer.prompt_tokens) == (0.0, 4.0, 4, 8)
    assert run.seconds == 4.0


def test_sequences_share_steps_and_a_long_prompt_takes_several(make_engines):
    run, _ = simulate(make_engines().new(1), closed(2, 2), requests((8, 4), (70, 2)))
    assert run.answers[0].events == [1.0, 2.0, 3.0, 4.0]
    # 32 tokens a step: 24 beside the other prompt, then 31 beside its decodes, then the rest and a token.
    assert run.answers[1].events == [3.0, 4.0]


def test_a_request_waits_for_the_turn_in_which_it_arrives(make_engines):
    run, _ = simulate(make_engines().new(1), at(0.0, 0.5), requests((8, 4), (8, 1)))
    assert run.answers[0].events == [1.0, 2.0, 3.0, 4.0]
    # At 0.5 the first step runs and the second is dispatched. The turn that plans the third begins at 1.0.
    assert run.answers[1].events == [3.0]


def test_an_idle_replica_begins_at_the_arrival(make_engines):
    run, _ = simulate(make_engines().new(1), at(0.0, 10.25), requests((8, 2), (8, 2)))
    assert run.answers[1].events == [11.25, 12.25]


def test_replicas_work_at_the_same_time(make_engines):
    one, _ = simulate(make_engines(max_num_seqs=1).new(1), closed(4, 4), requests(*[(8, 4)] * 4))
    four, _ = simulate(make_engines(max_num_seqs=1).new(4), closed(4, 4), requests(*[(8, 4)] * 4))
    assert four.seconds == 4.0
    assert one.seconds == 16.0


def test_a_prefix_is_read_once_where_its_replica_is_chosen_by_it(make_engines):
    def busy(router):
        engines = make_engines(per_token=1.0)
        replicas = engines.new(2)
        prefix = tuple(range(100, 132))
        alike = requests(*[(2, 1)] * 6, prefix=prefix)
        simulate(replicas, at(*range(0, 600, 100)), alike, router=router)
        return sum(tokens.count for _, spans in engines.times.steps for tokens in spans)

    # Idle replicas are equally loaded, so the first gets all requests either way.
    assert busy("least-loaded") == busy("prefix") < 2 * 34 + 4 * 8


def test_the_prefix_router_spreads_what_is_too_much_for_one_replica(make_engines):
    replicas = make_engines().new(2)
    loads = []
    original = type(replicas[0]).submit

    def submit(self, answer, now):
        original(self, answer, now)
        loads.append([len(replica.answers) for replica in replicas])

    for replica in replicas:
        replica.submit = submit.__get__(replica)
    simulate(replicas, closed(8, 8), requests(*[(8, 8)] * 8, prefix=tuple(range(100, 110))), router="prefix")
    assert max(loads[7]) <= 6
    assert min(loads[7]) >= 2


def test_failures_lose_and_repeat_no_token(make_engines):
    lengths = [(5 + number % 7, 1 + number % 9) for number in range(60)]
    replicas = make_engines().new(3)
    run, failures = simulate(
        replicas, closed(12, 60), requests(*lengths), failures=Failures(mean_time=6.0, restart=3.0, seed=1)
    )
    assert failures > 5
    assert [answer.request.number for answer in run.answers] == list(range(60))
    for answer, (_, length) in zip(run.answers, lengths, strict=True):
        assert answer.completion_tokens == len(answer.events) == length
        assert answer.events == sorted(answer.events)
    calm, none = simulate(make_engines().new(3), closed(12, 60), requests(*lengths))
    assert none == 0
    assert run.seconds > calm.seconds


def test_tokens_of_a_step_that_a_failure_ends_are_computed_again(make_engines):
    failures = Failures(mean_time=9.0, restart=100.0, seed=2)
    run, _ = simulate(make_engines().new(1), closed(1, 1), requests((8, 30)), failures=failures)
    pause = next(pair for pair in itertools.pairwise(run.answers[0].events) if pair[1] - pair[0] > 100)
    # The last step before the failure is lost. Behind it the prompt and the answer so far are read in one step.
    assert pause[0] == int(pause[0])
    assert 101 < pause[1] - pause[0] < 102


def test_requests_wait_while_no_replica_serves(make_engines):
    run, failures = simulate(
        make_engines().new(1), closed(1, 1), requests((8, 30)), failures=Failures(mean_time=9.0, restart=100.0, seed=2)
    )
    assert failures
    assert run.answers[0].completion_tokens == 30
    assert run.seconds > 130


def test_requests_are_read_one_after_another_before_they_are_queued(make_engines):
    run, _ = simulate(
        make_engines(overheads=Overheads(per_request=0.25)).new(1), at(0.0, 0.0, 5.0), requests((8, 2), (8, 2), (8, 2))
    )
    # The host has read the first at 0.25 and the second at 0.5, within a step that began without it.
    assert [answer.events for answer in run.answers] == [[1.25, 2.25], [3.25, 4.25], [6.25, 7.25]]
    assert run.answers[1].sent == 0.0


def test_the_host_sends_tokens_while_a_device_of_its_own_works(make_engines):
    run, _ = simulate(make_engines(overheads=Overheads(per_token=0.25)).new(1), closed(2, 2), requests((8, 3), (8, 3)))
    assert [answer.events for answer in run.answers] == [[1.5, 2.5, 3.5]] * 2


def test_tokens_come_late_where_the_host_takes_longer_than_a_step(make_engines):
    run, _ = simulate(make_engines(overheads=Overheads(per_token=1.5)).new(1), closed(1, 1), requests((8, 4)))
    assert run.answers[0].events == [2.5, 4.0, 5.5, 7.0]


def test_steps_take_longer_by_what_the_host_takes_of_the_device(make_engines):
    overheads = Overheads(per_token=0.25, contention=0.5)
    run, _ = simulate(make_engines(overheads=overheads).new(1), closed(2, 2), requests((8, 3), (8, 3)))
    # Half of the half second for two tokens, in each step but the first, beside which nothing was sent.
    assert [answer.events for answer in run.answers] == [[1.5, 2.75, 4.0]] * 2
    overheads = Overheads(per_request=0.5, contention=0.5)
    run, _ = simulate(make_engines(overheads=overheads).new(1), at(0.0, 1.0), requests((8, 4), (8, 1)))
    # The second request is read within the first step, and holds up the one behind it.
    assert run.answers[0].events == [1.5, 2.75, 3.75, 4.75]


def test_a_device_waits_for_the_overhead_of_a_step_and_does_not_count_as_busy(make_engines):
    engines = make_engines(overheads=Overheads(per_step=0.5))
    run, _ = simulate(engines.new(1), closed(1, 1), requests((8, 3)))
    assert run.answers[0].events == [1.5, 3.0, 4.5]
    (fleet,) = simulate_fleets(engines, Traffic(96, input_tokens=4, output_tokens=4), [1], concurrency=1)
    assert fleet["busy"] == pytest.approx(2 / 3)


def test_failures_lose_no_request_that_a_host_reads_or_sends(make_engines):
    lengths = [(5 + number % 7, 1 + number % 9) for number in range(60)]
    overheads = Overheads(per_step=0.1, per_token=0.2, per_request=0.7, contention=0.5)
    run, failures = simulate(
        make_engines(overheads=overheads).new(3),
        closed(12, 60),
        requests(*lengths),
        failures=Failures(mean_time=6.0, restart=3.0, seed=1),
    )
    assert failures > 5
    for answer, (_, length) in zip(run.answers, lengths, strict=True):
        assert answer.completion_tokens == len(answer.events) == length
        assert answer.events == sorted(answer.events)


@pytest.mark.parametrize("name", ["per_step", "per_token", "per_request"])
def test_overheads_are_not_negative(name):
    with pytest.raises(InvalidParameterError, match=f"^overhead_{name}: "):
        Overheads(**{name: -1.0})


def test_a_full_cache_preempts_as_in_the_engine(make_engines):
    replicas = make_engines(blocks=12, max_model_len=40).new(1)
    run, _ = simulate(replicas, closed(4, 4), requests(*[(8, 20)] * 4))
    replicas[0].collect()
    assert replicas[0].preemptions
    assert all(answer.completion_tokens == 20 for answer in run.answers)


def test_a_large_fleet_is_a_share_of_it_scaled(make_engines, monkeypatch):
    monkeypatch.setattr(module, "MOST_SIMULATED", 2)
    traffic = Traffic(96, input_tokens=8, output_tokens=4)
    two, eight = simulate_fleets(make_engines(), traffic, [2, 8], concurrency=16, num_requests=64)
    assert (two["simulated"], eight["simulated"], eight["devices"]) == (2, 2, 8)
    (whole,) = simulate_fleets(make_engines(), traffic, [2], concurrency=4, num_requests=64)
    assert eight["output_tokens_per_s"] == pytest.approx(4 * whole["output_tokens_per_s"])
    assert eight["latency_ms"] == whole["latency_ms"]
    assert two["device_seconds_per_million_tokens"] == pytest.approx(1e6 * 2 / two["output_tokens_per_s"])


def test_a_report_has_the_device_s_share_of_time_and_what_the_cache_held(make_engines):
    traffic = Traffic(96, input_tokens=4, output_tokens=4, prefix_tokens=16)
    (fleet,) = simulate_fleets(make_engines(), traffic, [1], request_rate=0.05, num_requests=20, goodput={"ttft": 1100})
    assert 0 < fleet["busy"] < 1
    assert fleet["prefix_hits"] > 0.5
    assert fleet["requests"] == fleet["completed"] == 20
    assert 0 < fleet["goodput_requests_per_s"] <= fleet["requests_per_s"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "concurrency"),
        ({"concurrency": 0}, "concurrency"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": 1.0, "concurrency": 1}, "concurrency"),
        ({"concurrency": 1, "router": "random"}, "router"),
        ({"concurrency": 1, "sizes": [0]}, "replicas"),
        ({"concurrency": 1, "input_tokens": 95}, "context"),
    ],
)
def test_options_out_of_range_are_named(make_engines, options, name):
    traffic = Traffic(96, input_tokens=options.pop("input_tokens", 8), output_tokens=4)
    sizes = options.pop("sizes", [1])
    with pytest.raises(InvalidParameterError, match=f"^{name}: "):
        simulate_fleets(make_engines(), traffic, sizes, num_requests=4, **options)


@pytest.mark.parametrize(("times", "name"), [((0.0, 1.0), "mtbf"), ((1.0, float("inf")), "restart")])
def test_times_of_failures_are_positive(times, name):
    with pytest.raises(InvalidParameterError, match=f"^{name}: "):
        Failures(*times)
