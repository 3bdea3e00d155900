"""The modules of the server's page, alone in a browser: events however they are cut, and which characters are tinted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from vlmexport.runtime.serving.http.page import STATIC, TYPES

from tests.support.browser import driven_browser

SITE = "http://page.test"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """An empty page beside the modules: no server is asked."""
    with driven_browser() as browser:
        page = browser.new_page()

        def fulfill(route: Any) -> None:
            file = STATIC / Path(route.request.url).name
            if file.is_file():
                route.fulfill(body=file.read_text("utf-8"), content_type=TYPES[file.suffix])
            else:
                route.fulfill(body="<p id=answer></p>", content_type="text/html")

        page.route("**/*", fulfill)
        page.goto(SITE)
        yield page


def entry(token: str | bytes, drafted: bool = True) -> dict[str, Any]:
    data = token if isinstance(token, bytes) else token.encode()
    return {"bytes": list(data), "drafted": drafted}


CASES = {
    "the beginning has no white space": (
        [("a red", [entry(" a", False), entry(" red")])],
        [("a", False), (" red", True)],
    ),
    "special tokens are not in the text": (
        [("a cup", [entry("<s>"), entry("a", False), entry("<pad>"), entry(" cup", False), entry("</s>")])],
        [("a cup", False)],
    ),
    "behind a special token": (
        [("a cup on", [entry("a", False), entry("<x>", False), entry(" cup", False), entry(" on")])],
        [("a cup", False), (" on", True)],
    ),
    "of several tokens that share a character the last one counts": (
        [("é", [entry(b"\xc3", False), entry(b"\xa9")]), ("ü.", [entry(b"\xc3"), entry(b"\xbc.", False)])],
        [("é", True), ("ü.", False)],
    ),
    "a character of four bytes": (
        [("😀!", [entry("😀"), entry("!", False)])],
        [("😀", True), ("!", False)],
    ),
    "text that was held back": (
        [("", [entry("a", False), entry(" table")]), ("a ta", []), ("ble", [])],
        [("a", False), (" ta", True), ("ble", True)],
    ),
    "bytes that are no character": (
        [("\ufffd\ufffda", [entry(b"\xc3"), entry(b"\xff"), entry("a")])],
        [("\ufffd\ufffd", False), ("a", True)],
    ),
    "without log-probabilities": ([("a cup", [])], [("a cup", False)]),
    "tokens of another text": ([("a cup", [entry("xyz"), entry("zyx")])], [("a cup", False)]),
    "mark-up is text": (
        [("<b>&amp;", [entry("<b>"), entry("&amp;", False)])],
        [("<b>", True), ("&amp;", False)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_tint_the_text_and_never_change_it(page: Any, case: str) -> None:
    pieces, want = CASES[case]
    runs = page.evaluate(
        """async (pieces) => {
            const { Tinter } = await import("/static/tint.js");
            const tinter = new Tinter();
            return pieces.flatMap(([text, entries]) => tinter.split(text, entries));
        }""",
        pieces,
    )
    assert [(run["text"], run["drafted"]) for run in runs] == want
    assert "".join(run["text"] for run in runs) == "".join(text for text, _ in pieces)


@pytest.mark.slow
def test_an_answer_is_text_and_no_html(page: Any) -> None:
    text = "<img src=x onerror=alert(1)> <script>"
    shown = page.evaluate(
        """async ([text, entries]) => {
            const { showAnswer } = await import("/static/answer.js");
            const element = document.getElementById("answer");
            async function* events() {
                yield { choices: [{ delta: { content: text }, logprobs: { content: entries } }] };
            }
            const { text: read } = await showAnswer(element, events());
            const names = [...element.querySelectorAll("*")].map((each) => each.localName);
            return [element.textContent, read, names];
        }""",
        [text, [entry(text)]],
    )
    assert shown == [text, text, ["mark"]]


STREAM = 'data: {"a": "é\\n"}\n\ndata: {"a": "😀"}\n\ndata: [DONE]\n\n'

READ = """async ([bytes, size]) => {
    const { streamEvents } = await import("/static/stream.js");
    const before = window.fetch;
    window.fetch = async () => new Response(new ReadableStream({
        start(controller) {
            for (let at = 0; at < bytes.length; at += size) {
                controller.enqueue(new Uint8Array(bytes.slice(at, at + size)));
            }
            controller.close();
        },
    }));
    const found = [];
    try {
        for await (const event of streamEvents({}, "", null)) found.push(event);
    } catch (error) {
        found.push(error.message);
    } finally {
        window.fetch = before;
    }
    return found;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_however_they_are_cut(page: Any, size: int) -> None:
    assert page.evaluate(READ, [list(STREAM.encode()), size]) == [{"a": "é\n"}, {"a": "😀"}]


@pytest.mark.slow
def test_a_stream_that_breaks_off_is_an_error(page: Any) -> None:
    found = page.evaluate(READ, [list(STREAM.partition("data: [")[0].encode()), 5])
    assert found == [{"a": "é\n"}, {"a": "😀"}, "The connection ended before the answer did."]
    error = b'data: {"error": {"message": "the server ends"}}\n\ndata: [DONE]\n\n'
    assert page.evaluate(READ, [list(error), 5]) == ["the server ends"]
