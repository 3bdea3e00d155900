"""The routes of the server."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...common.errors import LostProcessError, QueueFullError
from ..decoding_processes import DecodingProcesses
from ..messages import Loaded
from .answers import Form, to_json
from .conversation import Conversation, Gone, stream
from .errors import RequestError, draining, process_lost, queue_full
from .metrics import CONTENT_TYPE, Metrics
from .page import page_routes
from .pictures import Pictures
from .requests import read_chat, read_completion
from .translate import Defaults, Translated, check_model, translate_chat, translate_completion


@dataclass(frozen=True)
class ApiOptions:
    """How the server answers."""

    served_name: str
    api_keys: tuple[str, ...] = ()
    """One of them must come as `Authorization: Bearer KEY`; none: everybody is served."""
    pictures: Pictures = field(default_factory=Pictures)
    max_body: int = 32 << 20
    """Bytes; a longer body is refused before it is read."""
    defaults: Defaults = field(default_factory=Defaults)
    metrics_prefix: str = "vlmexport:"


class Api:
    """OpenAI's API over decoding processes."""

    def __init__(self, processes: DecodingProcesses, info: Loaded, options: ApiOptions):
        self._processes, self._info, self._options = processes, info, options
        self.draining = False
        """Whether new requests are refused, since the server ends."""
        self.metrics = Metrics(
            options.metrics_prefix, options.served_name,
            lambda: processes.running, lambda: processes.in_flight - processes.running,
        )  # fmt: skip

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self._options.served_name

    def app(self) -> Starlette:
        """As an ASGI application."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            *page_routes(),
        ]
        return Starlette(
            routes=routes, exception_handlers={HTTPException: self._http_error, Exception: self._failed}
        )

    # --- answers ---

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, False)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, True)

    async def _answer(self, request: Request, plain: bool) -> Response:
        conversation: Conversation | None = None
        try:
            self._check_key(request)
            self._check_room()  # before a body is read
            body: Any = (read_completion if plain else read_chat)(await self._body(request))
            check_model(body.model, self._options.served_name)
            translated = await self._translated(body, plain)
            form = Form(
                plain, self._options.served_name, self._info.fingerprint[:24], translated.top,
                bool(body.stream and body.stream_options and body.stream_options.include_usage), body.n or 1,
            )  # fmt: skip
            conversation = self._asked(translated, bool(body.stream))
            conversation.watch(request.receive)
            if body.stream:
                await conversation.begin()
                return EventStream(stream(conversation, form, self.metrics))
            answers = await conversation.answers()
        except RequestError as error:
            if conversation is not None:
                conversation.close()
            return self._refused(error)
        except (ClientDisconnect, Gone):
            if conversation is not None:
                conversation.close()
            self.metrics.count_error(499)
            return Response(status_code=499)
        for answer in answers:
            self.metrics.count(answer)
        return json_response(form.whole(answers))

    async def _translated(self, body: Any, plain: bool) -> Translated:
        options = self._options
        if plain:
            return translate_completion(body, self._info, options.defaults)
        arguments = body, self._info, options.pictures.get, options.defaults
        if options.pictures.hosts:  # it may wait for another server
            return await asyncio.to_thread(translate_chat, *arguments)
        return translate_chat(*arguments)

    def _asked(self, translated: Translated, streamed: bool) -> Conversation:
        """All choices, or none. Raises `RequestError`."""
        self._check_room(len(translated.requests))
        conversation = Conversation(translated.names)
        how = {"raw": translated.raw, "streamed": streamed, "top": translated.top}
        conversation.asked = [
            self._processes.ask(conversation.inbox, number, request, **how)
            for number, request in enumerate(translated.requests)
        ]
        return conversation

    def _check_room(self, count: int = 1) -> None:
        if self.draining:
            raise draining()
        try:
            self._processes.check_room(count)
        except QueueFullError as error:
            raise queue_full(str(error)) from None
        except LostProcessError as error:
            raise process_lost(str(error)) from None

    def _check_key(self, request: Request) -> None:
        keys = self._options.api_keys
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        key_given = given.strip().encode() if scheme.lower() == "bearer" else b""
        # All of them are compared, each in a time that does not depend on where it differs.
        right = [hmac.compare_digest(key_given, key.encode()) for key in keys]
        if keys and True not in right:
            raise RequestError(
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                401, "authentication_error", code="invalid_api_key",
            )  # fmt: skip

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Else a page of another site could ask through its visitor's browser, which sends other types unasked.
            raise RequestError(f"the content type is {kind!r:.60}; send application/json", 415)
        most = self._options.max_body
        length = request.headers.get("content-length", "")
        too_large = RequestError(f"the body has more than {most:,} bytes; send smaller pictures", 413)
        if length.isdecimal() and int(length) > most:
            raise too_large
        parts, size = [], 0
        async for chunk in request.stream():
            parts.append(chunk)
            size += len(chunk)
            if size > most:
                raise too_large
        return b"".join(parts)

    # --- the rest ---

    async def _models(self, request: Request) -> Response:
        return self._guarded(request, lambda: {"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        def found() -> dict[str, Any]:
            check_model(request.path_params["name"], self._options.served_name)
            return self._described()

        return self._guarded(request, found)

    def _guarded(self, request: Request, value: Callable[[], dict[str, Any]]) -> Response:
        try:
            self._check_key(request)
            return json_response(value())
        except RequestError as error:
            return self._refused(error)

    def _described(self) -> dict[str, Any]:
        name = self._options.served_name
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "vlmexport", "root": self._info.model,
            "max_model_len": self._info.max_length,
        }  # fmt: skip

    async def _health(self, request: Request) -> Response:
        alive = bool(self._processes.ready)
        return json_response({"status": "ok" if alive else "no process decodes"}, 200 if alive else 503)

    async def _ready(self, request: Request) -> Response:
        ready = bool(self._processes.ready) and not self.draining
        status = "ready" if ready else "draining" if self.draining else "no process decodes"
        return json_response({"status": status}, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _http_error(self, request: Request, error: Any) -> Response:
        """An address or a method that is not there."""
        message = f"{request.method} {request.url.path:.200}: {error.detail}"
        return self._refused(RequestError(message, error.status_code), dict(error.headers or {}))

    async def _failed(self, request: Request, error: Exception) -> Response:
        return self._refused(RequestError(f"the server failed: {type(error).__name__}", 500, "server_error"))

    def _refused(self, error: RequestError, headers: dict[str, str] | None = None) -> Response:
        self.metrics.count_error(error.status)
        return json_response(error.body, error.status, {**(headers or {}), **error.headers})


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


class EventStream(Response):
    """A response of server-sent events."""

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
