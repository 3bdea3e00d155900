"""Hours of mixed load on `vlmexport serve`: nobody waits for ever, nobody gets another text, and memory stays flat.

    make soak-server MINUTES=120
    python -m tests.integration.soak.serving [BUNDLE] --minutes 120 --seed 0 [--save FILE.json]

Clients on the loopback ask whole and streamed, go away in the middle, give up by a time-out, set deadlines that pass, and
send what is no request. Now and then the process that decodes is killed. Every request that its client waits for must be
answered: with the text that `Session.generate` gives for it, or with an error that the protocol has for its case. The exit
status is 1 if anything of that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.integration.soak.soak import built
from tests.support.running_server import RunningServer, data_url, half_open, picture, sse

CHAT = "/v1/chat/completions"
GROWTH = 0.05
"""Share by which the memory of a process may grow from the second quarter to the last one."""
KILL = 300.0
"""Seconds between two kills of the process that decodes."""
ALLOWED = {200, 429, 503}
"""Statuses of a request that can be served: served, too many at once, a process that was killed."""


class Load:
    """Clients of one server, and what they saw."""

    def __init__(self, server: RunningServer, bundle: Path, seed: int, pause: float):
        """`pause`: mean seconds of a client between two requests."""
        from vlmexport.runtime import Session

        self.pause = pause
        self.server, self.seed, self.stopped = server, seed, threading.Event()
        self.seen: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.texts: list[str] = []
        with Session.load(bundle) as session:
            seeing = session.bundle.manifest.image is not None
            for number in range(24):
                request = {
                    "max_new_tokens": (4, 16, 60)[number % 3],
                    "temperature": 0.7 * (number % 2),
                    "seed": number,
                }
                content: list[dict[str, Any]] = (
                    [] if seeing else [{"type": "text", "text": f"number {number} of them"}]
                )
                if seeing:
                    pixels = picture(number, ((96, 96), (41, 30))[number % 2])
                    content.append({"type": "image_url", "image_url": {"url": data_url(pixels)}})
                    want = session.generate(image=pixels, **request)
                else:
                    want = session.generate(
                        prompt=[{"role": "user", "content": content}], plain_text=True, **request
                    )
                self.texts.append(want.text)
                self.bodies.append({
                    "messages": [{"role": "user", "content": content}], "max_tokens": request["max_new_tokens"],
                    "temperature": request["temperature"], "seed": number,
                })  # fmt: skip

    def count(self, what: str, failure: str | None = None) -> None:
        with self._lock:
            self.seen[what] += 1
            if failure is not None:
                self.failures.append(f"{what}: {failure}")

    def client(self, number: int) -> None:
        """One client, until the end."""
        rng = random.Random(self.seed * 1000 + number)
        while not self.stopped.wait(rng.random() * 2 * self.pause):
            kind = rng.choices(("whole", "streamed", "left", "late", "wrong", "gave_up"), (6, 6, 2, 1, 2, 1))[
                0
            ]
            try:
                getattr(self, kind)(rng)
            except (
                OSError,
                AssertionError,
            ) as error:  # a connection that the server dropped, or a wait without an end
                self.count(kind, f"{type(error).__name__}: {error}")

    def whole(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.bodies))
        status, answer, _ = self.server.ask(CHAT, self.bodies[number])
        self.count(f"whole {status}", None if status in ALLOWED else str(answer))
        if status == 200 and (text := answer["choices"][0]["message"]["content"]) != self.texts[number]:
            self.count("whole", f"request {number}: another text: {text!r}")

    def streamed(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.bodies))
        status, data, _ = self.server.ask(CHAT, {**self.bodies[number], "stream": True})
        if status != 200:
            self.count(f"streamed {status}", None if status in ALLOWED else str(data))
            return
        events = sse(data.encode())
        failed = [each for each in events[:-1] if "error" in each]
        text = "".join(
            each["choices"][0]["delta"].get("content", "") for each in events[:-1] if "choices" in each
        )
        right = bool(failed) or text == self.texts[number]
        self.count(
            f"streamed {'lost' if failed else 200}",
            None if right and events[-1] == "[DONE]" else f"request {number}: {data[-300:]}",
        )

    def left(self, rng: random.Random) -> None:
        """The client goes away in the middle of a stream."""
        try:
            connection, _ = half_open(self.server, {**self.bodies[2], "ignore_eos": True, "max_tokens": 90})
        except AssertionError:  # it was refused
            self.count("left, refused")
            return
        connection.close()
        self.count("left")

    def gave_up(self, rng: random.Random) -> None:
        """The client goes away before anything came."""
        connection = socket.create_connection(("127.0.0.1", self.server.port))
        data = json.dumps(rng.choice(self.bodies)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[: rng.choice((0, 10, len(data)))])
        time.sleep(rng.random() * 0.05)
        connection.close()
        self.count("gave up")

    def late(self, rng: random.Random) -> None:
        body = {**rng.choice(self.bodies), "deadline": rng.choice((1e-4, 0.02, 0.1))}
        status, answer, _ = self.server.ask(CHAT, body)
        self.count(f"late {status}", None if status in ALLOWED | {504} else str(answer))

    def wrong(self, rng: random.Random) -> None:
        wrong: Any = rng.choice((
            b"{", b"\xff", b"[" * 5000, {"messages": []}, {**self.bodies[0], "max_tokens": -1}, {**self.bodies[0], "n": 0},
            {**self.bodies[0], "unknown": 1}, {**self.bodies[0], "model": "another"},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}]}]},
        ))  # fmt: skip
        status, answer, _ = self.server.ask(CHAT, wrong)
        self.count(f"wrong {status}", None if status in {400, 404, 429, 503} else str(answer))


def memory(process: int) -> int:
    """Bytes that are resident."""
    return psutil.Process(process).memory_info().rss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help="default: a tiny captioner that is built first")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="mean seconds of a client between two requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle or built(Path(folder))
        server = RunningServer(bundle, "--max-batch", "8", "--max-waiting", "8")
        with server:
            load = Load(server, bundle, options.seed, options.pause)
            clients = [
                threading.Thread(target=load.client, args=(number,), daemon=True)
                for number in range(options.clients)
            ]
            for each in clients:
                each.start()
            end, killed = time.monotonic() + 60 * options.minutes, time.monotonic()
            front: list[int] = []
            decoding: list[list[int]] = [[]]
            kills = 0
            while time.monotonic() < end and server.process.poll() is None:
                time.sleep(min(5.0, options.minutes))
                front.append(memory(server.process.pid))
                for process in server.decoding:
                    decoding[-1].append(memory(process))
                if time.monotonic() - killed > KILL and end - time.monotonic() > KILL / 2:
                    killed, kills = time.monotonic(), kills + 1
                    decoding.append([])
                    os.kill(server.decoding[0], signal.SIGKILL)
            load.stopped.set()
            for each in clients:
                each.join(150)
            stuck = sum(each.is_alive() for each in clients)
            running = server.metric("vlmexport:num_requests_running")
            status = server.stop()
    longest = max(decoding, key=len)
    growth = {"server": grown(front), "decoding": grown(longest)}
    result = {
        "script": "tests/integration/soak/serving.py", "minutes": options.minutes, "clients": options.clients,
        "seed": options.seed, "seen": dict(sorted(load.seen.items())), "kills": kills,
        "failures": load.failures[:20], "stuck_clients": stuck, "running_at_the_end": running, "exit_status": status,
        "memory_growth": growth, "memory_mib": {"server": front[-1] >> 20, "decoding": longest[-1] >> 20},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.save:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    bad = load.failures or stuck or running or status or max(growth.values()) > GROWTH
    return 1 if bad else 0


def grown(samples: list[int]) -> float:
    """From the median of the second quarter to that of the last."""
    quarter = max(1, len(samples) // 4)
    return (
        statistics.median(samples[-quarter:]) / statistics.median(samples[quarter : 2 * quarter] or samples)
        - 1
    )


if __name__ == "__main__":
    sys.exit(main())
