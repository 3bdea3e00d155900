"""What a server and its decoding processes say to each other: frames of msgpack over a socket.

A frame is its length (4 bytes, big-endian) and a list of messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

LENGTH = struct.Struct(">I")


class Load(msgspec.Struct, tag=True):
    """The first word to a process: the bundle that it serves, and what `Session.load` and `Scheduler` take."""

    bundle: str
    loading: dict[str, Any]
    max_waiting: int
    prefills_per_cycle: int


class Ask(msgspec.Struct, tag=True):
    """A request: what `Scheduler.submit` takes, by name. `raw`: its prompt is not laid out by a chat template. `top`: how many
    of the likeliest tokens are noted for each token; None: no log-probabilities."""

    id: int
    request: dict[str, Any]
    raw: bool = False
    streamed: bool = False
    top: int | None = None


class Cancel(msgspec.Struct, tag=True):
    """End this request."""

    id: int


class Close(msgspec.Struct, tag=True):
    """The last word to a process: end what was accepted, after `drain` seconds at once."""

    drain: float


class Loaded(msgspec.Struct, tag=True):
    """The first word of a process."""

    model: str
    fingerprint: str
    has_chat_template: bool
    max_batch: int
    max_length: int
    note: str | None


class Failure(msgspec.Struct, tag=True):
    """An error by the name of its class, and its message. As the first word: the bundle could not be loaded."""

    kind: str
    message: str


Token = tuple[str, bytes, float]
"""Text, bytes, log-probability."""


class Entry(msgspec.Struct, array_like=True):
    """A token with the likeliest tokens of its place."""

    token: Token
    top: list[Token]
    drafted: bool = False


class Text(msgspec.Struct, tag=True):
    """A piece of a request's text, and the log-probabilities of the tokens that it came with."""

    id: int
    text: str
    entries: list[Entry] = []


class Counts(msgspec.Struct):
    """Counters and seconds of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    accepted: int = 0
    proposed: int = 0
    drafting_cycles: int = 0
    deepest: int = 0
    accepted_by_depth: list[int] = []
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """From its arrival."""
    total_seconds: float = 0.0


class Answer(msgspec.Struct, tag=True):
    """A request's result. `text`: all of it, and `entries` those that no piece brought."""

    text: str
    finish_reason: str
    counts: Counts
    entries: list[Entry] = []


class Ended(msgspec.Struct, tag=True):
    """A request is over."""

    id: int
    outcome: Answer | Failure


ToProcess: TypeAlias = Load | Ask | Cancel | Close
FromProcess: TypeAlias = Loaded | Failure | Text | Ended

TO_PROCESS = msgspec.msgpack.Decoder(list[ToProcess])
FROM_PROCESS = msgspec.msgpack.Decoder(list[FromProcess])
_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[ToProcess | FromProcess]) -> bytes:
    """As it goes over the socket."""
    body = _encoder.encode(messages)
    return LENGTH.pack(len(body)) + body


class Unframer:
    """Takes bytes as they come, and gives the messages that are whole."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]):
        """`decoder`: `TO_PROCESS` or `FROM_PROCESS`."""
        self._decode = decoder.decode
        self._buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Raises `msgspec.DecodeError` for what is no message of the kind."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(buffer, at)[0]
            if end > len(buffer):
                break
            yield from self._decode(bytes(buffer[at + LENGTH.size : end]))
            at = end
        del buffer[:at]
