"""The scheduler under a pretended device: planned scenes, and a state machine that does everything in any order."""

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.invariants import check_scheduler
from verax.text.engine.blocks import BlockManager, most_blocks
from verax.text.engine.outputs import RequestMetrics
from verax.text.engine.request import Request, Sequence, SequenceState
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import Scheduler


def make_sequence(tokens, *, max_tokens=100):
    params = SamplingParams(max_tokens=max_tokens)
    request = Request("r", None, tuple(tokens), params, max_tokens, RequestMetrics(0.0))
    request.sequences = [Sequence(request, 0, 0, list(tokens))]
    return request.sequences[0]


class PretendedDevice:
    """Runs schedules on a cache of plain integers, one step late, and asserts what every step must be able to trust.

    The cache holds, at each position, the whole text up to it: a wrong page, a stale block or a shared one that was
    written shows as a different text.
    """

    def __init__(
        self, num_blocks, block_size, max_num_seqs, budget, *, caching=True, windows=(None,), sizes=(), steps=None
    ):
        self.blocks = BlockManager(num_blocks, block_size, windows=windows, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prompt_sizes=sizes,
            decode_steps=steps,
        )
        self.windows = windows
        self.caches = [np.zeros((count, block_size), object) for count in num_blocks]
        self.in_flight = None
        self.tables = {}
        self.tokens = {}  # by slot: what the device knows, sampled tokens included
        self.step_sizes = []

    def step(self):
        plan = self.scheduler.schedule()
        rounds = max((chunk.num_sampled for chunk in plan.chunks), default=1)
        if rounds > 1:
            assert all(chunk.count == chunk.num_sampled for chunk in plan.chunks)
        else:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.chunks) <= self.scheduler.max_num_seqs
        assert len({c.sequence.slot for c in plan.chunks}) == len(plan.chunks)
        self.step_sizes.append(plan.num_tokens)
        for sequence in plan.admitted:
            assert sequence.num_pending <= 1  # at most the token that this very plan samples
            self.tables[sequence.slot] = dict(enumerate(zip(*sequence.tables, strict=True)))
            self.tokens[sequence.slot] = list(sequence.tokens)
        for chunk in plan.chunks:
            for table, window in zip(chunk.sequence.tables, self.windows, strict=True):
                most = most_blocks(
                    chunk.sequence.num_tokens, window, self.scheduler.max_num_batched_tokens, self.blocks.block_size
                )
                assert sum(map(bool, table)) <= most
        # As on the device: all of a layer's keys are written before any are read, so a prompt may share a block with
        # one that is computed in the same step.
        sampled = [[] for _ in plan.chunks]
        for i in range(max(rounds, 1)):
            parts = list(map(partial(part_of, i), plan.chunks)) if rounds > 1 else plan.chunks
            for part in filter(None, parts):
                self._write(part)
            for part, tokens in zip(parts, sampled, strict=True):
                if part:
                    tokens += self._attend_and_sample(part)
        if self.in_flight:
            self._read(*self.in_flight)
        self.in_flight = (plan, sampled) if plan.chunks else None

    def _write(self, chunk):
        table, text = self.tables[chunk.sequence.slot], self.tokens[chunk.sequence.slot]
        for i, blocks in enumerate(chunk.new_blocks, start=chunk.first_new_block):
            table[i] = blocks
        assert chunk.count >= 1
        assert chunk.start + chunk.count <= len(text)
        size = self.blocks.block_size
        for position in range(chunk.start, chunk.start + chunk.count):
            for cache, block in zip(self.caches, table[position // size], strict=True):
                assert block != 0
                cache[block, position % size] = tuple(text[: position + 1])

    def _attend_and_sample(self, chunk):
        table, text = self.tables[chunk.sequence.slot], self.tokens[chunk.sequence.slot]
        size = self.blocks.block_size
        for group, (cache, window) in enumerate(zip(self.caches, self.windows, strict=True)):
            for position in range(max(0, chunk.start - (window or len(text)) + 1), chunk.start + chunk.count):
                assert cache[table[position // size][group], position % size] == tuple(text[: position + 1])
        if chunk.num_sampled:
            assert chunk.start + chunk.count == len(text)
            text.append(next_token(text))
            return text[-1:]
        return []

    def _read(self, plan, sampled):
        for chunk, tokens in zip(plan.chunks, sampled, strict=True):
            sequence = chunk.sequence
            sequence.num_pending -= len(tokens)
            for token in tokens:
                if sequence.finished:
                    break
                sequence.tokens.append(token)
                if token == 0 or len(sequence.output_tokens) >= sequence.request.max_tokens:
                    self.scheduler.finish(sequence)

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
            check_scheduler(self.scheduler)
        raise AssertionError("the scheduler does not come to an end")


def part_of(i, chunk):
    """Token i of a decode step of several, as a chunk; None past its last."""
    blocks = chunk.new_blocks if i == 0 else ()
    part = replace(chunk, start=chunk.start + i, count=1, num_sampled=1, new_blocks=blocks)
    return part if i < chunk.count else None


def next_token(text):
    """The next token of this model: a function of the text alone. 0 ends it."""
    return (sum(text) * 7 + len(text)) % 23


def expected_output(sequence):
    text = list(sequence.request.prompt_token_ids)
    while len(text) - sequence.num_prompt < sequence.request.max_tokens:
        text.append(next_token(text))
        if text[-1] == 0:
            break
    return text[sequence.num_prompt :]


def serve(device, *sequences):
    for sequence in sequences:
        device.scheduler.add(sequence)
    device.run()
    for sequence in sequences:
        assert sequence.output_tokens == expected_output(sequence)


def test_equal_hashes_of_different_tokens_do_not_mix():
    class Colliding(int):
        def __hash__(self):
            return 1

    device = PretendedDevice([20], 2, 4, 16)
    for tokens in ((5, 6, 7), (6, 5, 7)):
        serve(device, make_sequence([Colliding(token) for token in tokens], max_tokens=3))


def test_a_full_step_computes_no_token_twice():
    device = PretendedDevice([100], 4, 4, 16, caching=False)
    prompts = [make_sequence(range(1, n), max_tokens=3) for n in (40, 3, 18, 27)]
    serve(device, *prompts)
    computed = sum(s.num_prompt + len(s.output_tokens) - 1 for s in prompts)
    wasted = len(prompts)  # a step that was planned before the end was known
    assert computed <= sum(device.step_sizes) <= computed + wasted


def test_nothing_is_planned_beyond_the_tokens_that_a_request_may_get():
    device = PretendedDevice([50], 4, 4, 16)
    device.scheduler.add(make_sequence([1, 2, 3], max_tokens=2))
    counts = [device.scheduler.schedule().num_tokens for _ in range(4)]  # planned ahead: no token has come back yet
    assert counts == [3, 1, 0, 0]


def test_a_plan_that_preempts_admits_nobody():
    # 8 blocks of 4: two running sequences fill them; the one that gives way must not come back in the same plan.
    device = PretendedDevice([9], 4, 4, 32, caching=False)
    for i in range(2):
        device.scheduler.add(make_sequence([i + 1] * 15, max_tokens=30))
    device.scheduler.add(make_sequence([9], max_tokens=2))
    preempting = 0
    while device.scheduler.has_work:
        before = device.scheduler.num_preemptions, list(device.scheduler.waiting)
        device.step()
        if device.scheduler.num_preemptions > before[0]:
            preempting += 1
            assert len(device.scheduler.waiting) > len(before[1])
    assert preempting


def counts_of_steps(prompt, sizes):
    device = PretendedDevice([200], 4, 4, sizes[-1], sizes=sizes)
    serve(device, make_sequence(range(1, prompt + 1), max_tokens=1))
    return [size for size in device.step_sizes if size]


def test_a_prompt_takes_the_steps_of_the_least_time_where_padding_takes_time():
    sizes = (8, 32, 128, 512)
    # A step costs as much as its size and 32 tokens: for 33 tokens, 32 + 32 and 32 + 8 are less than 32 + 128.
    expected = [[3], [8], [9], [32, 1], [72], [128, 2], [128, 72], [128, 128, 124], [400], [512, 88]]
    assert [counts_of_steps(sum(counts), sizes) for counts in expected] == expected


def test_a_prompt_is_not_computed_token_by_token_in_the_places_that_decodes_leave():
    device = PretendedDevice([200], 4, 32, 128, sizes=(32, 128))
    for i in range(31):
        device.scheduler.add(make_sequence([i + 1], max_tokens=40))
    device.step()
    device.scheduler.add(make_sequence(range(1, 21), max_tokens=2))
    while device.scheduler.has_work:
        device.step()
    assert device.step_sizes[:2] == [31, 31 + 20]


class Machine(RuleBasedStateMachine):
    """Adds, steps and aborts in any order, with few blocks, so that sequences are preempted and blocks evicted."""

    @initialize(
        num_blocks=st.integers(9, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 12),
        caching=st.booleans(),
        windows=st.sampled_from([(None,), (None, 1), (None, 3), (None, 6), (4,), (5, 9), (None, 2, 8)]),
        spare=st.integers(0, 6),
        sizes=st.sampled_from([(), (2, 4, 8, 12), (5, 12)]),
        steps=st.sampled_from([{}, {1: 4, 4: 3}, {5: 5}]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, caching, windows, spare, sizes, steps):
        self.longest = (num_blocks - 1) * block_size
        least = [most_blocks(self.longest, window, budget, block_size) for window in windows]
        counts = [1 + blocks + (spare if window else 0) for blocks, window in zip(least, windows, strict=True)]
        self.device = PretendedDevice(
            counts, block_size, max_num_seqs, budget, caching=caching, windows=windows, sizes=sizes, steps=steps
        )
        self.sequences = []
        self.aborted = set()

    @rule(length=st.integers(1, 20), family=st.integers(0, 2), max_tokens=st.integers(1, 8))
    def add(self, length, family, max_tokens):
        length = max(1, min(length, self.longest - max_tokens))  # admission control's part
        sequence = make_sequence(
            [family * i % 5 + 1 for i in range(length)], max_tokens=min(max_tokens, self.longest - length)
        )
        if sequence.request.max_tokens:
            self.sequences.append(sequence)
            self.device.scheduler.add(sequence)

    @rule()
    def step(self):
        self.device.step()

    @precondition(lambda self: any(not s.finished for s in self.sequences))
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from([s for s in self.sequences if not s.finished]))
        self.device.scheduler.finish(victim)
        self.aborted.add(victim)

    @invariant()
    def the_books_balance(self):
        if hasattr(self, "device"):
            check_scheduler(self.device.scheduler)

    def teardown(self):
        if not hasattr(self, "device"):
            return
        self.device.run()
        for sequence in self.sequences:
            assert sequence.state is SequenceState.FINISHED
            expected = expected_output(sequence)
            assert sequence.output_tokens == (
                expected[: len(sequence.output_tokens)] if sequence in self.aborted else expected
            )
        assert self.device.blocks.usage == 0


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
