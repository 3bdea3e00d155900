"""`vlmexport serve` as a program: clients that leave, too many of them, keys, bodies, signals, processes that die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.support.running_server import WAIT, RunningServer, half_open, until

TURN = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
LONG = {"messages": TURN, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
SHORT = {"messages": TURN, "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[[str], Any]) -> Path:
    return tiny_bundle("llama").path


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle, "--max-batch", "16", "--max-waiting", "64") as running:
        yield running


class Stopped:
    """The process that decodes stands still: what the server does meanwhile does not depend on its speed."""

    def __init__(self, server: RunningServer):
        (self.process,) = server.decoding

    def __enter__(self) -> Stopped:
        os.kill(self.process, signal.SIGSTOP)
        return self

    def __exit__(self, *exception: object) -> None:
        os.kill(self.process, signal.SIGCONT)


def test_of_120_clients_80_are_answered_and_40_refused(server: RunningServer) -> None:
    def ask(number: int) -> tuple[int, Any, dict[str, str]]:
        return server.ask(CHAT, {**LONG, "max_tokens": 5 + number % 9})

    with ThreadPoolExecutor(120) as pool:
        with Stopped(server):
            asked = [pool.submit(ask, number) for number in range(120)]
            until(lambda: sum(each.done() for each in asked) == 40)
            assert server.metric("vlmexport:num_requests_running") == 16
            assert server.metric("vlmexport:num_requests_waiting") == 64
        answers = [each.result(WAIT) for each in asked]
    assert Counter(status for status, *_ in answers) == {200: 80, 429: 40}
    for status, body, headers in answers:
        if status == 429:
            assert headers["retry-after"] == "1" and body["error"]["type"] == "rate_limit_error"
            assert "80 requests" in body["error"]["message"]
    assert server.metric("vlmexport:num_requests_running") == 0


def test_who_leaves_makes_room(bundle: Path) -> None:
    """One place, none to wait: the next one is served as soon as the client is gone, streamed or not."""
    with RunningServer(bundle, "--max-batch", "1", "--max-waiting", "0") as server:
        for number in range(1, 4):
            with Stopped(server):
                connection = socket.create_connection(("127.0.0.1", server.port))
                data = json.dumps(LONG).encode()
                head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
                connection.sendall(head.encode() + b"\r\n\r\n" + data)
                until(lambda: server.metric("vlmexport:num_requests_running") == 1)
                assert server.ask(CHAT, SHORT)[0] == 429
                connection.close()
                server.ask("/health")
            until(lambda count=number: server.metric("vlmexport:request_errors_total", status="499") == count)
            assert server.ask(CHAT, SHORT)[0] == 200
        connection, _ = half_open(server, {**LONG, "n": 1})
        connection.close()
        until(lambda: server.metric("vlmexport:num_requests_running") == 0)
        assert server.ask(CHAT, SHORT)[0] == 200
        # Three times a whole answer of 120 tokens was not made.
        assert server.metric("vlmexport:request_success_total", finished_reason="length") <= 5


@pytest.mark.slow
def test_all_choices_or_none(bundle: Path) -> None:
    with RunningServer(bundle, "--max-batch", "2", "--max-waiting", "1") as server:
        assert server.ask(CHAT, {**SHORT, "n": 4})[0] == 429
        status, body, _ = server.ask(CHAT, {**SHORT, "n": 3})
        assert status == 200 and len(body["choices"]) == 3


def test_deadline_that_passes_while_waiting(bundle: Path) -> None:
    with RunningServer(bundle, "--max-batch", "1") as server:
        status, body, headers = server.ask(CHAT, {**LONG, "deadline": 1e-4})
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert headers["x-should-retry"] == "false"  # else the client asks an overloaded server three times
        status, body, _ = server.ask(CHAT, {**LONG, "deadline": 100})
        assert status == 200


def test_bodies_that_are_refused(server: RunningServer) -> None:
    def ask(body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, answer, _ = server.ask(CHAT, body, headers)
        return status, answer["error"]["message"]

    assert ask(b"{")[0] == 400
    assert ask(b"\xff\xfe")[0] == 400
    assert ask(b"[" * 100_000)[0] == 400
    assert ask(b'{"messages": 1}') == (400, "messages: Expected `array`, got `int`")
    assert ask(b"{}") == (400, "messages: the field is missing")
    status, message = ask(json.dumps(SHORT).encode(), {"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in message
    status, body, _ = server.ask("/v1/nothing")
    assert (status, body["error"]["message"]) == (404, "GET /v1/nothing: Not Found")
    assert server.ask(CHAT)[0] == 405


def test_a_large_body_is_refused_unread(bundle: Path) -> None:
    with RunningServer(bundle, "--max-body", "1") as server:
        large = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode()
        connection = socket.create_connection(("127.0.0.1", server.port), WAIT)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(large)}\r\n\r\n"
        connection.sendall(head.encode())  # and nothing of the body
        assert b" 413 " in connection.recv(1 << 16)
        connection.close()
        chunked = HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
        chunked.request(
            "POST", CHAT, iter([large]), {"Content-Type": "application/json"}, encode_chunked=True
        )
        assert chunked.getresponse().status == 413
        assert server.ask(CHAT, SHORT)[0] == 200


def test_keys(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\n  second \n")
    with RunningServer(bundle, "--api-key-file", str(tmp_path / "keys")) as server:
        for path, body in (
            (CHAT, SHORT),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
            ("/v1/models", None),
        ):
            for wrong in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Bearer "}):
                status, answer, _headers = server.ask(path, body, wrong)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            for key in ("first", "second"):
                assert server.ask(path, body, {"Authorization": f"Bearer {key}"})[0] == 200
        assert server.ask("/health")[0] == server.ask("/ready")[0] == server.ask("/metrics")[0] == 200


def test_sigterm_drains(bundle: Path) -> None:
    """Who is served gets the answer, who comes is told to go elsewhere, and the server ends with status 0."""
    with RunningServer(bundle, "--drain", "100") as server, ThreadPoolExecutor(2) as pool:
        with Stopped(server):
            asked = pool.submit(server.ask, CHAT, LONG)
            until(lambda: server.metric("vlmexport:num_requests_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.ask("/ready")[0] == 503)
            assert server.ask("/health")[0] == 200
            status, body, headers = server.ask(CHAT, SHORT)
            assert (status, body["error"]["code"], headers["retry-after"]) == (503, "draining", "5")
        status, body, _ = asked.result(WAIT)
        assert status == 200 and body["usage"]["completion_tokens"] == 120
        assert server.process.wait(WAIT) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once(bundle: Path) -> None:
    with RunningServer(bundle, "--drain", "1000") as server, ThreadPoolExecutor(2) as pool:
        with Stopped(server):
            asked = pool.submit(server.ask, CHAT, LONG)
            until(lambda: server.metric("vlmexport:num_requests_running") == 1)
            for _ in range(2):
                server.process.send_signal(signal.SIGINT)
                until(lambda: server.ask("/ready")[0] == 503)
        status, body, _ = asked.result(WAIT)
        assert (status, body["error"]["code"]) in ((503, "draining"), (503, "process_lost"))
        assert server.process.wait(WAIT) == 0


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(bundle: Path) -> None:
    with RunningServer(bundle) as server, ThreadPoolExecutor(1) as pool:
        (first,) = server.decoding
        os.kill(first, signal.SIGSTOP)
        asked = pool.submit(server.ask, CHAT, LONG)
        until(lambda: server.metric("vlmexport:num_requests_running") == 1)
        os.kill(first, signal.SIGKILL)
        status, body, headers = asked.result(WAIT)
        assert (status, body["error"]["code"]) == (503, "process_lost")
        assert "retry-after" in headers
        until(lambda: server.ask("/health")[0] == 200)
        assert server.ask(CHAT, SHORT)[0] == 200
        (second,) = server.decoding
        os.kill(second, signal.SIGKILL)  # again, right after its start: there is no use in a third one
        assert server.process.wait(WAIT) == 2
    assert "again and again" in server.lines[-1]


@pytest.mark.slow
def test_its_processes_end_with_the_server(bundle: Path) -> None:
    with RunningServer(bundle, "--sessions", "2") as server:
        decoding = server.decoding
        assert len(decoding) == 2
        with ThreadPoolExecutor(4) as pool:
            assert [each[0] for each in pool.map(lambda _: server.ask(CHAT, SHORT), range(8))] == [200] * 8
        server.process.kill()
        until(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in decoding))


@pytest.mark.slow
def test_unix_socket(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "vlm.sock"
    with RunningServer(bundle, "--unix-socket", str(path), "--metrics-prefix", "vllm:") as server:
        assert server.url == f"unix:{path}"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert b"vllm:num_requests_running" in text
        second = started(bundle, "--unix-socket", str(path))
        assert (second.returncode, "choose another path" in second.stderr) == (2, True)
    assert not path.exists()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a server leaves it that was killed
    with RunningServer(bundle, "--unix-socket", str(path)):
        pass


def started(bundle: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlmexport.runtime.cli", "serve", str(bundle), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT)


@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_one_line(
    server: RunningServer, bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n")
    for options, said in (
        (("--port", str(server.port)), "choose another one"),
        (("--host", "8.8.8.8"), "choose another one"),
        (("--max-batch", "1000"), "max_batch"),
        (("--api-key-file", str(tmp_path / "keys")), "no key in it"),
        (("--api-key-file", str(tmp_path / "none")), "a text file"),
        (("--device", "abacus", "--port", "0"), "abacus"),
    ):
        run = started(bundle, *options)
        assert run.returncode == 2 and said in run.stderr, run.stderr
        assert len(run.stderr.splitlines()) == 1, run.stderr


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + b"0" * 40 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_k": 1' + b"0" * 40 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["' + b"x" * 200_000 + b'"]}', 400),
        (b'{"messages": [{"role": "user", "content": "\\u0000"}], "max_tokens": 1}', 200),
        (b'{"messages": [{"role": "user", "content": ""}], "max_tokens": 1}', 200),
        (b'{"messages": [{"role": "user", "content": []}], "max_tokens": 1}', 200),
    ],
)
def test_odd_values(server: RunningServer, body: bytes, status: int) -> None:
    assert server.ask(CHAT, body)[0] == status
    assert len(server.decoding) == 1 and server.ask(CHAT, SHORT)[0] == 200
