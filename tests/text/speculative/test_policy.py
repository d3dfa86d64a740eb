"""Number of drafts: more where they hold and rows are cheap, none where they do not pay."""

import pytest

from verax.text.features.speculative import LONGEST_REST, Acceptance, Policy, StepCost

SIZES = [2, 4, 8, 16, 32]
FLAT, STEEP = StepCost(8, 18), StepCost(1, 1)


def policy(cost=FLAT, num_drafts=7, draft_cost=0.0):
    return Policy(cost, SIZES, num_drafts, draft_cost)


def test_drafts_fill_the_rows_that_cost_nothing():
    assert policy().choose(1, [0.9], [7]) == [7]
    assert sum(policy(num_drafts=32).choose(1, [0.5], [32])) == 7
    assert policy().choose(1, [0.9], [2]) == [2]


def test_there_are_none_where_they_do_not_pay():
    assert policy().choose(1, [0.05], [7]) == [0]
    assert policy(STEEP).choose(1, [0.6], [7]) == [0]
    assert policy(draft_cost=0.9).choose(1, [0.6], [7]) == [0]
    assert policy().choose(32, [0.9] * 4, [7] * 4) == [0] * 4
    assert policy(StepCost(4, 6)).choose(16, [0.3], [7]) == [0]


def test_the_likeliest_drafts_come_first():
    chosen = policy().choose(4, [0.3, 0.95, 0.95, 0.3], [7] * 4)
    assert chosen[1] == chosen[2] > chosen[0] == chosen[3]


def test_costly_drafts_are_fewer():
    cheap, dear = policy(draft_cost=0.01).choose(1, [0.7], [7]), policy(draft_cost=0.25).choose(1, [0.7], [7])
    assert cheap[0] > dear[0] > 0


def test_a_sequence_rests_longer_each_time_that_drafts_fail():
    chosen, acceptance, length, rests = policy(), Acceptance(), 0, []
    for _ in range(40):
        chosen.record(acceptance, 4, 0, length)
        if acceptance.resumes_at > length:
            rests.append(acceptance.resumes_at - length)
            length = acceptance.resumes_at
    assert rests[:4] == [16, 32, 64, 128]
    assert rests[-1] == LONGEST_REST


@pytest.mark.parametrize("accepted", [4, 3])
def test_drafts_that_hold_end_the_rests(accepted):
    chosen, acceptance = policy(), Acceptance(rest=128, trying=True)
    for _ in range(5):
        chosen.record(acceptance, 4, accepted, 200)
    assert acceptance.rest == acceptance.resumes_at == 0


@pytest.mark.parametrize(("platform", "quantized", "free"), [("cpu", False, 8), ("cpu", True, 4), ("gpu", False, 128)])
def test_a_step_costs_more_from_some_number_of_tokens_on(platform, quantized, free):
    cost = StepCost.on(platform, quantized=quantized)
    assert cost(1) == cost(free) == 1
    assert cost(free + 1) > 1
