"""Prometheus' metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from verax.text.engine.outputs import RequestMetrics, RequestOutput, StepStats

if TYPE_CHECKING:
    from verax.text.engine.async_llm import AsyncLLM

LABELS = ("model_name", "engine")
"""The name of the model, and the number of the replica."""

GAUGES = {
    "num_requests_running": ("num_requests_running", "Requests in the engine."),
    "num_requests_waiting": ("num_requests_waiting", "Requests in the queue."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the cache in use, 0 to 1."),
}
"""Metric and its text, by the name of a field of `EngineStats`."""

COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preempted requests.",
    "prompt_tokens": "Prompt tokens of the requests that got a first token.",
    "generation_tokens": "Generated tokens.",
}
"""Text of a metric, by the name of a field of `EngineStats`."""

DRAFT_COUNTERS = {
    "num_drafts": "Times that drafts of a sequence were verified.",
    "num_draft_tokens": "Drafted tokens.",
    "num_accepted_tokens": "Drafted tokens that held.",
}
"""Text of a metric, by the name of a field of `SpeculationTotals`."""

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = tuple(scale * step for scale in (10**power for power in range(10)) for step in (1, 2, 5))

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time to first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Time between tokens.", _BETWEEN_TOKENS),
    "time_per_output_token_seconds": ("Old name of inter_token_latency_seconds.", _BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("Time of whole requests.", _WHOLE_REQUEST),
    "request_queue_time_seconds": ("Time of requests in the queue.", _WHOLE_REQUEST),
    "request_prefill_time_seconds": ("Time of prompts.", _WHOLE_REQUEST),
    "request_decode_time_seconds": ("Time of answers.", _WHOLE_REQUEST),
    "request_inference_time_seconds": ("Time in the engine.", _WHOLE_REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request.", _LENGTHS),
    "request_generation_tokens": ("Tokens of a request's answers.", _LENGTHS),
    "iteration_tokens_total": ("Tokens of an engine step.", _STEP_TOKENS),
}
"""Text of a histogram, and vLLM's bounds of its buckets in seconds or tokens."""


class TextMetrics:
    """Metrics of the text engines: state and totals when they are read, histograms as requests end."""

    def __init__(self, llm: AsyncLLM, model_name: str, registry: CollectorRegistry):
        self._llm = llm
        self._labels = [(model_name, str(replica)) for replica in range(len(llm.replica_stats()))]
        self._histograms: dict[str, Histogram] = {}
        for name, (text, bounds) in HISTOGRAMS.items():
            if bounds is _LENGTHS:
                bounds = tuple(bound for bound in bounds if bound <= llm.max_model_len)
            self._histograms[name] = Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=bounds)
            for labels in self._labels:
                self._histograms[name].labels(*labels)
        labels = (*LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=registry)
        for reason in ("stop", "length", "abort"):
            for labels in self._labels:
                self._success.labels(*labels, reason)
        registry.register(self)
        llm.add_observer(self.observe)

    def observe(self, replica: int, event: StepStats | RequestOutput) -> None:
        """Take the figures of a step of a replica, or of a request that has ended there."""
        if isinstance(event, StepStats):
            self._note(replica, iteration_tokens_total=event.num_tokens)
            return
        tokens = [len(sample.token_ids) for sample in event.outputs]
        for sample in event.outputs:
            self._success.labels(*self._labels[replica], sample.finish_reason or "abort").inc()
        self._note(replica, request_prompt_tokens=len(event.prompt_token_ids), request_generation_tokens=sum(tokens))
        if event.metrics is not None:
            self._note(replica, **_times(event.metrics, max(tokens, default=0)))

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, from the state of the engines now."""
        stats = self._llm.replica_stats()
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for labels, engine in zip(self._labels, stats, strict=True):
                gauge.add_metric(labels, getattr(engine, field))
            yield gauge
        for name, text in COUNTERS.items():
            yield self._counter(name, text, [getattr(engine, name) for engine in stats])
        drafts = [engine.spec_decode for engine in stats if engine.spec_decode is not None]
        if not drafts:
            return
        for name, text in DRAFT_COUNTERS.items():
            yield self._counter(f"spec_decode_{name}", text, [getattr(totals, name) for totals in drafts])
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that held, by place in the draft from 0.",
            labels=(*LABELS, "position"),
        )
        for labels, totals in zip(self._labels, drafts, strict=True):
            for place, value in enumerate(totals.num_accepted_tokens_per_pos):
                by_place.add_metric((*labels, str(place)), value)
        yield by_place

    def _counter(self, name: str, text: str, values: Sequence[float]) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for labels, value in zip(self._labels, values, strict=True):
            counter.add_metric(labels, value)
        return counter

    def _note(self, replica: int, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].labels(*self._labels[replica]).observe(value)


def _times(metrics: RequestMetrics, tokens: int) -> dict[str, float]:
    """Values of the histograms of times, of a request whose longest answer has `tokens` tokens."""
    end, first = metrics.finished_time or time.perf_counter(), metrics.first_token_time
    values = {"e2e_request_latency_seconds": end - metrics.arrival_time}
    if first is None:
        return values
    scheduled = metrics.first_scheduled_time or metrics.arrival_time
    values |= {
        "time_to_first_token_seconds": first - metrics.arrival_time,
        "request_queue_time_seconds": scheduled - metrics.arrival_time,
        "request_prefill_time_seconds": first - scheduled,
        "request_inference_time_seconds": end - scheduled,
        "request_decode_time_seconds": end - first,
    }
    if tokens > 1:
        between = (end - first) / (tokens - 1)
        values |= {"inter_token_latency_seconds": between, "time_per_output_token_seconds": between}
    return values
