"""`vlmexport serve` against the session by itself: 16 clients that stream, one client, and what HTTP adds to an answer.

    vlmexport build --model tiny-blip2-flant5 --max-batch 16 -o runs/tiny
    python -m benchmarks.serving runs/tiny

The arms take turns. Clients keep their connections and ask again as soon as they have an answer; they run in this process,
beside the server's two. `batch` is `generate_batch` in this process, with the same requests. With plain decoding and end
tokens ignored both decode the same number of tokens. `many_over_one` compares 16 clients with one, drafts as the controller
decides. `added` is the time of an answer over HTTP less that of `generate`, request by request.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.batch import requests
from benchmarks.intervals import with_interval
from benchmarks.machine import save
from tests.support.running_server import RunningServer

CLIENTS = 16


def encoded(request: dict[str, Any]) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(request["image"]).save(file, "PNG")
    return file.getvalue()


def body_of(request: dict[str, Any], streamed: bool, plain: bool) -> bytes:
    """The same request as a client sends it."""
    prompt, content = request.get("prompt"), []
    if "image" in request:
        url = "data:image/png;base64," + base64.b64encode(encoded(request)).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    if isinstance(prompt, str):
        content.append({"type": "text", "text": prompt})
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": content}]
    body = {
        "messages": messages,
        "max_tokens": request["max_new_tokens"],
        "temperature": 0,
        "stream": streamed,
    }
    if plain:
        body |= {"ignore_eos": True, "draft": "none"}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


class Client:
    """One connection that is kept."""

    def __init__(self, port: int):
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._writer.close()

    async def ask(self, body: bytes) -> int:
        """Tokens of the answer, which is read to its end."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        data = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in data[:20], data
        if b"chunked" in data:
            data = b""
            while (size := int(await self._reader.readline(), 16)) > 0:
                data += (await self._reader.readexactly(size + 2))[:size]
            await self._reader.readline()
        else:
            length = data.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            data = await self._reader.readexactly(int(length))
        return int(data.rpartition(b'"completion_tokens":')[2].split(b",")[0])


async def rate(port: int, bodies: list[bytes], clients: int) -> float:
    """Tokens a second of all answers; each client takes the next body."""
    waiting, tokens = iter(bodies), 0

    async def work() -> None:
        nonlocal tokens
        async with Client(port) as client:
            for body in waiting:
                count = await client.ask(body)
                tokens += count

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return tokens / (time.perf_counter() - begin)


def batch_rate(session: Any, asked: list[dict[str, Any]]) -> float:
    """Tokens a second of `generate_batch`."""
    begin = time.perf_counter()
    results = session.generate_batch(asked)
    return sum(len(result.tokens) for result in results) / (time.perf_counter() - begin)


async def added(session: Any, port: int, asked: list[dict[str, Any]]) -> list[float]:
    """Milliseconds that HTTP adds to each answer."""
    found = []
    async with Client(port) as client:
        for request in asked:
            body = body_of(request, streamed=True, plain=True)
            own = {**request, "image": encoded(request)} if "image" in request else request
            begin = time.perf_counter()
            session.generate(**own)
            middle = time.perf_counter()
            await client.ask(body)
            found.append(1e3 * (time.perf_counter() - middle - (middle - begin)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    from vlmexport.runtime import Session

    rows: list[dict[str, float]] = []
    extra: list[float] = []
    with (
        Session.load(options.bundle, max_batch=CLIENTS, picture_cache=0) as session,
        RunningServer(options.bundle, "--max-batch", str(CLIENTS), "--picture-cache", "0") as server,
    ):
        port, asked = server.port, requests(session.bundle.manifest, options.requests, options.tokens)
        short = [{**request, "max_new_tokens": 16} for request in asked[:16]]
        plain, whole = ([body_of(each, streamed, True) for each in asked] for streamed in (True, False))
        drafting = [body_of(each, True, False) for each in asked]
        for number in range(options.repeats + 1):
            arms: dict[str, Any] = {
                "batch": lambda: batch_rate(session, asked),
                "streamed": lambda: asyncio.run(rate(port, plain, CLIENTS)),
                "whole": lambda: asyncio.run(rate(port, whole, CLIENTS)),
                "many": lambda: asyncio.run(rate(port, drafting, CLIENTS)),
                "one": lambda: asyncio.run(rate(port, drafting[:12], 1)),
            }
            order = list(arms)[:: 1 if number % 2 else -1]
            row = {name: arms[name]() for name in order}
            more = asyncio.run(added(session, port, short))
            if number:  # the first round learns
                rows.append(row)
                extra += more
    result = {
        "script": "benchmarks/serving.py", "model": session.bundle.manifest.model.source, "requests": options.requests,
        "tokens": options.tokens, "repeats": options.repeats,
        "tokens_per_second": {name: round(statistics.median(row[name] for row in rows)) for name in rows[0]},
        "streamed_over_batch": with_interval([row["streamed"] / row["batch"] for row in rows]),
        "whole_over_batch": with_interval([row["whole"] / row["batch"] for row in rows]),
        "many_over_one": with_interval([row["many"] / row["one"] for row in rows]),
        "added_ms": with_interval(extra),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.save:
        print(save(options.save, result))


if __name__ == "__main__":
    main()
