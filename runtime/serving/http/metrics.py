"""What Prometheus reads: vLLM's names, behind a prefix of ours or of vLLM's."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from ..messages import Answer, Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
BETWEEN = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)
LATENCY = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)


class Metrics:
    """Counters of a server. Seconds are histograms, of requests that gave an answer."""

    def __init__(self, prefix: str, model: str, running: Callable[[], int], waiting: Callable[[], int]):
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        label = {"model_name": model}

        def gauge(name: str, text: str, value: Callable[[], int]) -> None:
            metric = Gauge(prefix + name, text, list(label), registry=registry)
            metric.labels(**label).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, list(label), registry=registry).labels(**label)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(prefix + name, text, list(label), buckets=buckets, registry=registry)
            return metric.labels(**label)

        gauge("num_requests_running", "Requests that have a place.", running)
        gauge("num_requests_waiting", "Requests that wait for a place.", waiting)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self._drafts = counter("spec_decode_num_drafts", "Cycles that drafted.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        by_position = "spec_decode_num_accepted_tokens_per_pos"
        self._accepted_at = Counter(
            prefix + by_position,
            "Drafted tokens that were accepted, by their depth.",
            [*label, "position"],
            registry=registry,
        )
        self._success = Counter(
            prefix + "request_success",
            "Answers, by what ended them.",
            [*label, "finished_reason"],
            registry=registry,
        )
        self._refused = Counter(
            prefix + "request_errors", "Requests without an answer, by status; 499: the client went away.",
            [*label, "status"], registry=registry,
        )  # fmt: skip
        self._first_token = histogram("time_to_first_token_seconds", "From arrival.", FIRST_TOKEN)
        self._between = histogram("inter_token_latency_seconds", "Mean of a request.", BETWEEN)
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to end.", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "From arrival to a place.", LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._label = label

    def count(self, answer: Answer) -> None:
        """A request has an answer."""
        counts = answer.counts
        self._count_tokens(counts)
        self._success.labels(**self._label, finished_reason=answer.finish_reason).inc()
        self._first_token.observe(counts.first_token_seconds)
        self._latency.observe(counts.total_seconds)
        self._queue.observe(counts.queue_seconds)
        self._prompt.observe(counts.prompt_tokens)
        self._generated.observe(counts.tokens)
        if counts.tokens > 1:
            self._between.observe((counts.total_seconds - counts.first_token_seconds) / (counts.tokens - 1))

    def count_error(self, status: int) -> None:
        """A request was answered with an error, or nobody waits for its answer any more (499)."""
        self._refused.labels(**self._label, status=str(status)).inc()

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    def _count_tokens(self, counts: Counts) -> None:
        self._prompt_tokens.inc(counts.prompt_tokens)
        self._generation_tokens.inc(counts.tokens)
        self._drafts.inc(counts.drafting_cycles)
        self._draft_tokens.inc(counts.proposed)
        self._accepted.inc(counts.accepted)
        for position, accepted in enumerate(counts.accepted_by_depth):
            self._accepted_at.labels(**self._label, position=str(position)).inc(accepted)
