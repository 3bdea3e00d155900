"""Answers in OpenAI's forms: whole ones, and events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ..messages import Answer, Counts, Entry, Token

FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "deadline": "length",
    "cancelled": "stop",
}
"""Ours → OpenAI's. Ours stands beside it, in the field `vlmexport` of a choice."""

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    """UTF-8."""
    return _encode(value)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class Form:
    """The form of the answers to one request: of `/v1/chat/completions`, or with `plain` of `/v1/completions`."""

    def __init__(
        self, plain: bool, model: str, fingerprint: str, top: int | None, include_usage: bool, choices: int
    ):
        """`top`: alternatives of a token that were asked for; None: no log-probabilities. `choices`: of one prompt."""
        self._plain, self._top, self._include_usage, self._choices = plain, top, include_usage, choices
        self._head = {
            "id": ("cmpl-" if plain else "chatcmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer with a choice of each."""
        choices = []
        for index, answer in enumerate(answers):
            choice: dict[str, Any] = {"index": index}
            if self._plain:
                choice["text"] = answer.text
            else:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append({**choice, **self._end(index, answer)})
        kind = "text_completion" if self._plain else "chat.completion"
        return {
            **self._head, "object": kind, "choices": choices, "usage": self._usage(answers),
            **metrics_of(answers),
        }  # fmt: skip

    def piece(self, index: int, text: str, entries: Sequence[Entry]) -> bytes:
        """An event with a piece of a choice's text."""
        choice = {"index": index, **self._delta(index, text), "finish_reason": None}
        choice["logprobs"] = self._logprobs(index, entries)
        return self._event([choice])

    def last(self, index: int, answer: Answer) -> bytes:
        """The last event of a choice."""
        return self._event([{"index": index, **self._delta(index, ""), **self._end(index, answer)}])

    def usage(self, answers: Sequence[Answer]) -> bytes:
        """The event behind all choices, where it was asked for."""
        if not self._include_usage:
            return b""
        value = {"object": self._chunk, "choices": [], "usage": self._usage(answers)}
        return event({**self._head, **value, **metrics_of(answers)})

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage_of([each.counts for each in answers], self._choices)

    @property
    def _chunk(self) -> str:
        return "text_completion" if self._plain else "chat.completion.chunk"

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        value = {**self._head, "object": self._chunk, "choices": choices}
        return event({**value, "usage": None} if self._include_usage else value)

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self._plain:
            return {"text": text}
        delta = {"content": text} if text else {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": text}
        return {"delta": delta}

    def _end(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(index, answer.entries),
            "finish_reason": FINISH_REASONS[answer.finish_reason],
            "vlmexport": {"finish_reason": answer.finish_reason},
        }

    def _logprobs(self, index: int, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if not self._plain:
            content = [
                {
                    **_spelled(each.token),
                    "top_logprobs": list(map(_spelled, each.top)),
                    "drafted": each.drafted,
                }
                for each in entries
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for each in entries:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(each.token[0])
        return {
            "tokens": [each.token[0] for each in entries],
            "token_logprobs": [each.token[2] for each in entries],
            "top_logprobs": [{text: value for text, _, value in [*each.top, each.token]} for each in entries],
            "text_offset": offsets,
        }


def _spelled(token: Token) -> dict[str, Any]:
    text, data, logprob = token
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def usage_of(counts: Sequence[Counts], choices: int) -> dict[str, Any]:
    """Tokens of a request; those of a prompt once, which so many `choices` share."""
    prompt = sum(each.prompt_tokens for each in counts[::choices])
    cached = sum(each.cached_tokens for each in counts[::choices])
    tokens = sum(each.tokens for each in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(each.accepted for each in counts),
            "rejected_prediction_tokens": sum(each.proposed - each.accepted for each in counts),
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def metrics_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """vLLM's field `metrics`, of an answer with one choice: times, and what speculation did."""
    if len(answers) != 1:
        return {}
    counts = answers[0].counts
    generation = counts.total_seconds - counts.first_token_seconds
    times: dict[str, Any] = {
        "time_to_first_token_ms": 1e3 * (counts.first_token_seconds - counts.queue_seconds),
        "generation_time_ms": 1e3 * generation,
        "queue_time_ms": 1e3 * counts.queue_seconds,
    }
    if counts.tokens > 1 and generation > 0:
        times["mean_itl_ms"] = 1e3 * generation / (counts.tokens - 1)
        times["tokens_per_second"] = (counts.tokens - 1) / generation
    return {"metrics": {**times, "speculative_decoding": speculation_of(counts)}}


def speculation_of(counts: Counts) -> dict[str, Any] | None:
    """In vLLM's form. `acceptance_histogram`: cycles that drafted, by how many of their tokens were accepted."""
    steps = counts.drafting_cycles
    if not steps:
        return None
    at_least = [steps, *counts.accepted_by_depth, 0]
    histogram = [at_least[depth] - at_least[depth + 1] for depth in range(len(at_least) - 1)]
    histogram += [0] * (counts.deepest + 1 - len(histogram))
    return {
        "mean_acceptance_length": 1 + counts.accepted / steps,
        "draft_acceptance_rate": counts.accepted / counts.proposed if counts.proposed else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.proposed,
        "num_spec_tokens": counts.deepest,
    }
