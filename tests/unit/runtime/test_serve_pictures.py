"""Pictures of a server's requests: data URLs, and hosts that its owner named; nothing else is ever asked."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("msgspec")
from vlmexport.runtime.serving.http.errors import RequestError
from vlmexport.runtime.serving.http.pictures import Pictures, look_up

PICTURE = b"\x89PNG and so on"


class Handler(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
            return
        if self.path.startswith("/large"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 2000)
            return
        self.send_response(200 if self.path == "/picture.png?size=2" else 404)
        self.end_headers()
        self.wfile.write(PICTURE)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    """A server of pictures, NAME:PORT."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Handler.asked.clear()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def refusal(pictures: Pictures, url: str) -> str:
    with pytest.raises(RequestError) as error:
        pictures.get(url)
    assert error.value.status == 400 and error.value.code == "invalid_image_url"
    return error.value.message


def test_data_urls() -> None:
    assert Pictures().get("data:image/png;base64," + base64.b64encode(PICTURE).decode()) == PICTURE
    assert Pictures().get("data:;base64,") == b""
    for wrong in ("data:image/png,abc", "data:image/png;base64", "data:;base64,a*b=", "data:;base64,abc"):
        refusal(Pictures(), wrong)


def test_nothing_is_fetched_unless_a_host_is_named(host: str) -> None:
    assert "--allow-image-host" in refusal(Pictures(), f"http://{host}/picture.png")
    others = Pictures(("127.0.0.1", "127.0.0.1:1", "example.org", "127.0.0.1."))
    assert "is not among" in refusal(others, f"http://{host}/picture.png")  # another port is another host
    assert not Handler.asked


def test_a_named_host_is_asked(host: str) -> None:
    assert Pictures((host,)).get(f"http://{host}/picture.png?size=2#here") == PICTURE
    assert "status 404" in refusal(Pictures((host,)), f"http://{host}/other.png")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://{host}/x", "http://user@{host}/x", "http://user:word@{host}/x", "http:///x", "/etc/passwd",
        "http://{host}\\@example.org/x", "http://example.org\\@{host}/x", "http://{host}@example.org/x", "http://{host}:80/x",
        "http://[{host}/x", "http://{host}/a b", "http://{host}/a\r\nX: y", "gopher://{host}/x", "//{host}/x", "",
    ],
)  # fmt: skip
def test_other_urls_are_refused(host: str, url: str) -> None:
    refusal(Pictures((host,)), url.replace("{host}", host))
    assert not Handler.asked


def test_redirects_are_not_followed(host: str) -> None:
    assert "redirects are not followed" in refusal(Pictures((host,)), f"http://{host}/away")
    assert Handler.asked == ["/away"]


def test_more_bytes_than_allowed(host: str) -> None:
    assert "more than 1,000 bytes" in refusal(Pictures((host,), 1000), f"http://{host}/large")


def found(*addresses: str) -> Any:
    """What a resolver says, one address a question, the last one for ever."""
    answers = list(addresses)
    asked = []

    def getaddrinfo(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    getaddrinfo.asked = asked  # type: ignore[attr-defined]
    return getaddrinfo


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1"]
)  # fmt: skip
def test_a_name_of_an_address_of_this_network_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", found(address))
    assert "no public address" in refusal(Pictures(("example.org",)), "http://example.org/x.png")


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand for another address at the next question (DNS rebinding)."""
    resolver = found("93.184.216.34", "127.0.0.1")
    dial = Mock(side_effect=ConnectionRefusedError("not here"))
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    monkeypatch.setattr(socket, "create_connection", dial)
    assert "not here" in refusal(Pictures(("example.org",)), "https://example.org/x.png")
    assert resolver.asked == ["example.org"]
    assert [call.args[0] for call in dial.call_args_list] == [("93.184.216.34", 443)]


def test_addresses_that_the_owner_named(host: str) -> None:
    assert look_up("127.0.0.1", 80) == "127.0.0.1"
    assert look_up("localhost", 80) in ("127.0.0.1", "::1")
