"""Errors as OpenAI's API answers them: a status, a JSON object, and what a client should do about it."""

from __future__ import annotations

from typing import Any

from ...common import errors
from ..messages import Failure

TOO_LONG = "context_length_exceeded"


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        """`param`: the field in the client's words. `retry_after`: seconds; None: a retry cannot help."""
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        details = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": details}

    @property
    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what the openai client obeys: by itself it asks again twice after 429 and 5xx."""
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        return {"x-should-retry": "false"} if self.status >= 429 else {}


def unsupported(name: str, value: object, remedy: str = "leave it out") -> RequestError:
    """A field that is never ignored silently."""
    return RequestError(
        f"{name}: {value!r:.80} is not supported by this server; {remedy}",
        param=name, code="unsupported_parameter",
    )  # fmt: skip


def queue_full(message: str) -> RequestError:
    """As many requests wait as may."""
    return RequestError(message, 429, "rate_limit_error", code="queue_full", retry_after=1)


def process_lost(message: str) -> RequestError:
    """A process that decodes ended, and another one starts."""
    return RequestError(message, 503, "server_error", code="process_lost", retry_after=5)


def draining() -> RequestError:
    """The server ends."""
    return RequestError(
        "the server is shutting down; ask another one", 503, "server_error", code="draining", retry_after=5
    )


def error_of(failure: Failure, names: dict[str, str]) -> RequestError:
    """What a decoding process said of a request. `names`: option → the client's word for it."""
    kind, message = failure.kind, failure.message
    family = getattr(errors, kind, None)
    family = family if isinstance(family, type) else Exception
    if issubclass(family, errors.QueueFullError):
        return queue_full(message)
    if issubclass(family, errors.LostProcessError):
        return process_lost(message)
    if issubclass(family, errors.ClosedError):
        return draining()
    if issubclass(family, errors.OptionError):
        option, colon, rest = message.partition(":")
        if colon and option in names:
            return RequestError(f"{names[option]}:{rest}", param=names[option])
        return RequestError(message, param=option if colon and option.isidentifier() else None)
    if issubclass(family, errors.GrammarError):
        return RequestError(message, param=names.get("schema"), code="invalid_grammar")
    if issubclass(family, errors.PromptTooLongError):
        return RequestError(message, param=names.get("prompt"), code=TOO_LONG)
    if issubclass(family, errors.ImageError):
        return RequestError(message, param=names.get("prompt"), code="invalid_image")
    if issubclass(family, errors.InputError):
        return RequestError(message, param=names.get("prompt"), code="invalid_prompt")
    return RequestError(message, 500, "server_error", code=kind)
