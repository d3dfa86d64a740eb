"""One simulated engine: the real one, scheduler and cache included, whose runner moves a clock instead of a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from verax.bench.serve.client import Answer
from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.step_times import StepTimes, spans_of
from verax.text.engine.blocks import BlockManager
from verax.text.engine.engine import Engine
from verax.text.engine.request import RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import Schedule, Scheduler, work
from verax.text.step.runner import ModelRunner, PendingStep
from verax.text.step.sampler import no_logprobs
from verax.text.step.sizes import RunnerConfig
from verax.text.step.step import StepOutput

__all__ = ["Progress", "Replica", "SimulatedRunner"]

TOKEN = 1
"""The token of every answer."""


class SimulatedRunner(ModelRunner):
    """Runner without weights or device. Its steps end at times of a clock, one after another.

    Args:
        config: sizes of the engine.
        times: seconds of the steps.
        overhead: seconds between two steps for which the device waits.
    """

    def __init__(self, config: RunnerConfig, times: StepTimes, overhead: float = 0.0):
        self.config = config
        self.group = None
        self.eos_token_ids = ()
        self._times, self._overhead = times, overhead
        self._no_logprobs = no_logprobs(0, 1)
        self.now = 0.0
        """Seconds at which the host dispatches."""
        self.end = 0.0
        """Seconds at which the last step ends."""
        self.busy = 0.0
        """Seconds of the device's work in all steps."""

    def run(self, schedule: Schedule) -> PendingStep:
        """Put a step behind those that are on their way."""
        shape = self.shape_for(schedule)
        seconds = self._times.seconds(shape, spans_of(schedule))
        self.end = max(self.now, self.end) + self._overhead + seconds
        self.busy += seconds
        tokens: Any = np.full(shape.num_sampled, TOKEN, np.int32)
        return PendingStep(schedule, StepOutput(tokens, self._no_logprobs, None, None), ())


class Progress(NamedTuple):
    """Tokens that an engine has read for a request."""

    name: str
    num_tokens: int
    """Tokens of the answer so far."""
    finished: bool


class Replica:
    """An engine, the answers that it works on, and two clocks: the device's and the host's.

    The host reads requests and sends tokens one after another. The engine does not wait for it: what it plans and
    dispatches is part of a step's time.

    Args:
        config: sizes of the engine.
        times: seconds of the steps.
        overheads: seconds of the host.
        vocab_size: of the model.
        prefix_caching: keep full blocks findable after their sequence.
    """

    def __init__(
        self, config: RunnerConfig, times: StepTimes, overheads: Overheads, *, vocab_size: int, prefix_caching: bool
    ):
        self._config, self._times, self._overheads = config, times, overheads
        self._vocab_size, self._prefix_caching = vocab_size, prefix_caching
        self.busy = 0.0
        """Seconds of the device's work, of engines that are gone too."""
        self.epoch = 0
        """Number of engines that are gone."""
        self.preemptions = self.cache_hits = self.cache_queries = 0
        self._start()

    def _start(self) -> None:
        config = self._config
        self._blocks = BlockManager(
            [group.num_blocks for group in config.groups],
            config.block_size,
            windows=[group.window for group in config.groups],
            enable_prefix_caching=self._prefix_caching,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prompt_sizes=config.prompt_sizes,
        )
        self._runner = SimulatedRunner(config, self._times, self._overheads.per_step)
        self._engine = Engine(self._runner, self._scheduler, vocab_size=self._vocab_size, tokenizer=None)
        self._host_end = 0.0
        """Seconds at which the host has done all that came so far."""
        self._arriving: dict[int, Answer] = {}
        """Answers of the requests that the host has not read yet, by number."""
        self.answers: dict[str, Answer] = {}

    @property
    def load(self) -> int:
        """Work of the unfinished requests, in tokens."""
        waiting = sum(len(answer.request.prompt) for answer in self._arriving.values())
        return self._scheduler.load + work(waiting, len(self._arriving))

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""
        return self._config.block_size

    def receive(self, answer: Answer, now: float) -> float:
        """Let the host read a request; seconds at which `submit` is to queue it."""
        self._arriving[answer.request.number] = answer
        return self._host_works(self._overheads.per_request, now)

    def submit(self, answer: Answer, now: float) -> None:
        """Queue a request that the host has read, behind what its answer has already."""
        request = answer.request
        del self._arriving[request.number]
        self._delay_device(self._overheads.per_request, now)
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        so_far = [[TOKEN] * answer.completion_tokens] if answer.completion_tokens else None
        name = self._engine.add_request(RequestInput(list(request.prompt), params, output_token_ids=so_far))
        self.answers[name] = answer

    @property
    def has_work(self) -> bool:
        """True if a turn has anything to do."""
        return self._engine.has_unfinished_requests

    def step(self, now: float) -> tuple[float, list[Progress]]:
        """One turn of the engine's loop.

        Args:
            now: seconds at which the turn begins.

        Returns:
            Seconds at which it ends, and what is to be delivered then.
        """
        runner = self._runner
        # The engine reads the step before the one that it dispatches: the turn ends when that is there.
        end = max(now, runner.end) if self._engine.in_flight is not None else now
        runner.now = now
        read = []
        for request in self._engine.advance():
            name, finished = request.request_id, request.finished
            read.append(Progress(name, len(request.sequences[0].output_tokens), finished))
            if finished:
                self._engine.remove(request)
        return end, read

    def send(self, read: list[Progress], now: float) -> float:
        """Let the host send the tokens that a turn has read; seconds at which `deliver` is to give them."""
        seconds = self._overheads.per_token * len(read)
        self._delay_device(seconds, now)
        return self._host_works(seconds, now)

    def _host_works(self, seconds: float, now: float) -> float:
        """Seconds at which the host has done what comes now, behind all that came before."""
        self._host_end = max(now, self._host_end) + seconds
        return self._host_end

    def _delay_device(self, seconds: float, now: float) -> None:
        """Let the steps that are on their way end later by what the host's work takes of the device."""
        if self._runner.end > now:
            self._runner.end += self._overheads.contention * seconds

    def deliver(self, progress: Progress, now: float) -> Answer:
        """Give a request the tokens that were read for it; its answer."""
        answer = self.answers[progress.name]
        answer.events.append(now)
        answer.completion_tokens = progress.num_tokens
        if progress.finished:
            answer.ended = now
            del self.answers[progress.name]
        return answer

    def fail(self) -> list[Answer]:
        """Lose the engine with all that it holds, and have a new one; the answers that it worked on."""
        lost = [*self.answers.values(), *self._arriving.values()]
        self.epoch += 1
        self.collect()
        self._start()
        return lost

    def collect(self) -> None:
        """Add what the engine counted to the totals."""
        self.busy += self._runner.busy
        self.preemptions += self._scheduler.num_preemptions
        self.cache_hits += self._blocks.num_hits
        self.cache_queries += self._blocks.num_queries
