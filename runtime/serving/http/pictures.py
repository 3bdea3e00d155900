"""Pictures of a request: data URLs, and addresses of hosts that the server's owner named."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ...common.foreign_errors import raise_if_foreign
from .errors import RequestError

SECONDS = 10.0
"""For all of a picture that is fetched."""


def _invalid(message: str) -> RequestError:
    return RequestError(f"image_url: {message}", param="messages", code="invalid_image_url")


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:…;base64,…` URL. Raises `RequestError`."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _invalid(f"{head!r:.60} is no data URL with ;base64, before the data")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise_if_foreign(error)
        raise _invalid(f"the data is not base64 ({error})") from None


@dataclass(frozen=True)
class Pictures:
    """Where pictures may come from. `hosts`: names, or NAME:PORT, as URLs have them; empty: data URLs alone.

    A host is asked at an address that is looked up once and must be a public one, unless the owner named an address or
    `localhost`. No redirect is followed: it could lead anywhere.
    """

    hosts: Collection[str] = field(default_factory=tuple)
    max_bytes: int = 32 << 20

    def get(self, url: str) -> bytes:
        """Blocks while it fetches. Raises `RequestError`."""
        if url.startswith("data:"):
            return decode_data_url(url)
        if not self.hosts:
            raise _invalid(
                f"{url!r:.60}: only data: URLs are read; start with --allow-image-host HOST to fetch"
            )
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError as error:
            raise_if_foreign(error)
            raise _invalid(f"{url!r:.60}: {error}") from None
        if scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise _invalid(f"{url!r:.60} is no http or https URL without a user")
        named = host if port is None else f"{host}:{port}"
        if named.lower() not in {each.lower() for each in self.hosts}:
            raise _invalid(f"the host {named!r:.60} is not among those that --allow-image-host names")
        port = port or (443 if scheme == "https" else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if any(ord(character) <= 32 or ord(character) > 126 for character in path):
            raise _invalid(f"{url!r:.60} has characters that a URL writes as %XX")
        return self._fetch(scheme == "https", host, port, path, named)

    def _fetch(self, secure: bool, host: str, port: int, path: str, named: str) -> bytes:
        deadline = time.monotonic() + SECONDS
        connection = _Pinned(host, port, look_up(host, port), secure)
        try:
            connection.request(
                "GET", path, headers={"Host": named, "Accept": "image/*", "User-Agent": "vlmexport"}
            )
            response = connection.getresponse()
            if response.status != 200:
                extra = "; redirects are not followed" if 300 <= response.status < 400 else ""
                raise _invalid(f"{named} answered with status {response.status}{extra}")
            data = bytearray()
            while chunk := response.read1(1 << 16):
                data += chunk
                if len(data) > self.max_bytes:
                    raise _invalid(f"the picture of {named} has more than {self.max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise _invalid(f"{named} took more than {SECONDS:g} s")
            return bytes(data)
        except (OSError, http.client.HTTPException) as error:
            raise_if_foreign(error)
            raise _invalid(f"{named} cannot be read ({error or type(error).__name__})") from None
        finally:
            connection.close()


def look_up(host: str, port: int) -> str:
    """An address of a host. Raises `RequestError` unless all of its addresses are public ones: one that names an address
    of this network could be told to any. Names that say so themselves, `localhost` and addresses, are what the owner named."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise_if_foreign(error)
        raise _invalid(f"the host {host!r:.60} is not found ({error})") from None
    addresses = [entry[4][0] for entry in found]
    if not _is_address(host) and host != "localhost":
        for address in addresses:
            if not ipaddress.ip_address(str(address).partition("%")[0]).is_global:
                raise _invalid(f"the host {host!r:.60} stands for {address}, which is no public address")
    return str(addresses[0])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise_if_foreign(error)
        return False
    return True


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that is known, whatever its name stands for by now."""

    def __init__(self, host: str, port: int, address: str, secure: bool):
        super().__init__(host, port, timeout=SECONDS)
        self._address, self._secure = address, secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)
