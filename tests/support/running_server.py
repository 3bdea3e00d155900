"""`vlmexport serve` as a process of its own, on a free port."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WAIT = 120.0
"""Seconds until a test gives up: nothing here takes a tenth of it."""


class RunningServer:
    """A server of a bundle; `with` ends it."""

    def __init__(self, bundle: Path, *options: str, port: int = 0):
        command = [
            sys.executable,
            "-m",
            "vlmexport.runtime.cli",
            "serve",
            str(bundle),
            "--port",
            str(port),
            *options,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        """What it wrote on stderr."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        until(lambda: self._served() or self.process.poll() is not None)
        assert self.url, self.lines

    def _served(self) -> bool:
        found = re.search(r"is served at (\S+)", "".join(self.lines))
        self.url = found[1] if found else ""
        return bool(found)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def decoding(self) -> list[int]:
        """The ids of the processes that decode."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(each) for each in found.split()]

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or text, headers) of a GET, or of a POST where there is a body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, {**usual, **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        named = {name.lower(): value for name, value in response.getheaders()}
        connection.close()
        return response.status, json.loads(text) if "json" in named.get("content-type", "") else text, named

    def metric(self, name: str, **labels: str) -> float:
        """A number at /metrics; 0 where it is not there yet."""
        for line in self.ask("/metrics")[1].splitlines():
            if line.startswith(f"{name}{{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return 0.0

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(WAIT)
        return status

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self.decoding if self.process.poll() is None else ():
            os.kill(child, signal.SIGCONT)
        self.stop()
        print(*self.lines, sep="")  # shown where a test fails


def until(happened: Any, seconds: float = WAIT) -> None:
    """Wait for something, and fail where it does not happen."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def picture(seed: int, size: tuple[int, int] = (56, 56)) -> np.ndarray:
    """uint8 [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)


def data_url(pixels: np.ndarray) -> str:
    """As a client sends it."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def sse(data: bytes) -> list[Any]:
    """The events of a stream; the last one is "[DONE]"."""
    events = [each.removeprefix(b"data: ") for each in data.split(b"\n\n") if each]
    return [each.decode() if each == b"[DONE]" else json.loads(each) for each in events]


def half_open(server: RunningServer, body: dict[str, Any]) -> tuple[socket.socket, bytes]:
    """A connection on which a streamed answer has begun, and what came of it."""
    connection = socket.create_connection(("127.0.0.1", server.port), WAIT)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    got = b""
    while b"data: " not in got:
        chunk = connection.recv(1 << 16)
        assert chunk, got
        got += chunk
    return connection, got
