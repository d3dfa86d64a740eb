"""Prometheus' metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from verax.serve.text.engine import TextEngine
from verax.text.engine.outputs import RequestMetrics, RequestOutput
from verax.text.engine.stats import SpeculationTotals, StepStats

__all__ = ["TextMetrics"]

LABELS = ("model_name", "engine")
"""The name of the model, and the number of the replica."""

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)

BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)

WHOLE_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histograms' buckets: seconds, and tokens of a step; vLLM's."""

GAUGES = {
    "num_requests_running": "Requests in the engine.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage": "Share of the cache in use, 0 to 1.",
}

COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preempted requests.",
    "prompt_tokens": "Prompt tokens of the requests that got a first token.",
    "generation_tokens": "Generated tokens.",
}
"""Texts of metrics by the name of a field of `EngineStats`."""

DRAFT_COUNTERS = {
    "num_drafts": "Times that drafts of a sequence were verified.",
    "num_draft_tokens": "Drafted tokens.",
    "num_accepted_tokens": "Drafted tokens that held.",
}
"""The same of `SpeculationTotals`."""

_NAMES = {"kv_cache_usage": "kv_cache_usage_perc"}
"""Names of metrics that are not their field's."""


class TextMetrics:
    """Metrics of the text engines: state and totals when they are read, histograms as requests end."""

    def __init__(self, llm: TextEngine, model_name: str, registry: CollectorRegistry):
        self._llm = llm
        self._labels = [(model_name, str(replica)) for replica in range(len(llm.replica_stats()))]
        self._registry = registry
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between tokens.", BETWEEN_TOKENS)
        self._between_old = self._histogram(
            "time_per_output_token_seconds", "Old name of inter_token_latency_seconds.", BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of whole requests.", WHOLE_REQUEST)
        self._queued = self._histogram("request_queue_time_seconds", "Time of requests in the queue.", WHOLE_REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time of prompts.", WHOLE_REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "Time of answers.", WHOLE_REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "Time in the engine.", WHOLE_REQUEST)
        lengths = _lengths(llm.max_model_len)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._generation = self._histogram("request_generation_tokens", "Tokens of a request's answers.", lengths)
        self._step = self._histogram("iteration_tokens_total", "Tokens of an engine step.", STEP_TOKENS)
        self._success = Counter(
            "vllm:request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=registry
        )
        for reason in ("stop", "length", "abort"):
            for labels in self._labels:
                self._success.labels(*labels, reason)
        registry.register(self)
        llm.add_observer(self.observe)

    def observe(self, replica: int, event: StepStats | RequestOutput) -> None:
        """Take the figures of a step of a replica, or of a request that has ended there."""
        if isinstance(event, StepStats):
            self._step[replica].observe(event.num_tokens)
            return
        tokens = [len(sample.token_ids) for sample in event.outputs]
        for sample in event.outputs:
            self._success.labels(*self._labels[replica], sample.finish_reason or "abort").inc()
        self._prompt[replica].observe(len(event.prompt_token_ids))
        self._generation[replica].observe(sum(tokens))
        if event.metrics is not None:
            self._observe_times(replica, event.metrics, max(tokens, default=0))

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, from the state of the engines now."""
        stats = self._llm.replica_stats()
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{_NAMES.get(name, name)}", text, labels=LABELS)
            for labels, of in zip(self._labels, stats, strict=True):
                gauge.add_metric(labels, getattr(of, name))
            yield gauge
        for name, text in COUNTERS.items():
            yield self._counter(name, text, [getattr(of, name) for of in stats])
        drafts = [of.spec_decode for of in stats if of.spec_decode is not None]
        if drafts:
            yield from self._collect_drafts(drafts)

    def _counter(self, name: str, text: str, values: Sequence[float]) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for labels, value in zip(self._labels, values, strict=True):
            counter.add_metric(labels, value)
        return counter

    def _collect_drafts(self, totals: Sequence[SpeculationTotals]) -> Iterator[Metric]:
        """Counters of speculative decoding."""
        for name, text in DRAFT_COUNTERS.items():
            yield self._counter(f"spec_decode_{name}", text, [getattr(of, name) for of in totals])
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that held, by place in the draft from 0.",
            labels=(*LABELS, "position"),
        )
        for labels, of in zip(self._labels, totals, strict=True):
            for place, value in enumerate(of.num_accepted_tokens_per_pos):
                by_place.add_metric((*labels, str(place)), value)
        yield by_place

    def _observe_times(self, replica: int, metrics: RequestMetrics, tokens: int) -> None:
        end = metrics.finished_time or time.perf_counter()
        self._whole[replica].observe(end - metrics.arrival_time)
        first = metrics.first_token_time
        if first is None:
            return
        scheduled = metrics.first_scheduled_time or metrics.arrival_time
        self._first_token[replica].observe(first - metrics.arrival_time)
        self._queued[replica].observe(scheduled - metrics.arrival_time)
        self._prefill[replica].observe(first - scheduled)
        self._inference[replica].observe(end - scheduled)
        self._decode[replica].observe(end - first)
        if tokens > 1:
            for histogram in (self._between, self._between_old):
                histogram[replica].observe((end - first) / (tokens - 1))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> list[Histogram]:
        """A histogram for each replica."""
        histogram = Histogram(f"vllm:{name}", text, LABELS, registry=self._registry, buckets=bounds)
        return [histogram.labels(*labels) for labels in self._labels]


def _lengths(longest: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, 50, ... up to a length."""
    bounds = [scale * step for scale in (10**power for power in range(10)) for step in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= longest)
