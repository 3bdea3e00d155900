"""The page at `/` without a browser: its files and their headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.support.running_server import RunningServer


@pytest.fixture(scope="module")
def server(tiny_bundle: Callable[[str], Any]) -> Iterator[RunningServer]:
    with RunningServer(tiny_bundle("llama").path) as running:
        yield running


def test_all_of_the_page_comes_from_the_server(server: RunningServer) -> None:
    status, text, headers = server.ask("/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:href|src)="(static/[^"]+)"', text)
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    assert {"static/page.css", "static/page.js"} <= set(files)
    for name in files:  # it grows
        status, code, headers = server.ask(f"/{name}")
        assert (status, headers["content-type"]) == (200, types[name.rpartition(".")[2]]), name
        files += {f"static/{each}" for each in re.findall(r' from "\./([^"]+)"', code)} - set(files)
        assert not re.search(r"//\w|innerHTML|\beval\b|@import", code), name
    assert len(files) == 6 and not re.search(r"//\w|<style|<script>|\son\w+=", text)
    assert server.ask("/static/../page.py")[0] == server.ask("/static/nothing.js")[0] == 404
    assert server.ask("/", {})[0] == 405


def test_headers_keep_the_page_to_itself(server: RunningServer) -> None:
    for address in ("/", "/static/page.js"):
        headers = server.ask(address)[2]
        policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data: blob:"
        assert not [each for each in policy.values() if "*" in each or "unsafe" in each or "http" in each]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-cache"
