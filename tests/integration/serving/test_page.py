"""The page at `/` in a browser: its answers are those of `Session.generate`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("uvicorn")
from vlmexport.runtime.session.session import Session

from tests.support.browser import driven_browser
from tests.support.running_server import WAIT, RunningServer, picture, sse, until

pytestmark = pytest.mark.usefixtures("browser")  # first: without one, no bundle is built

CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
INSECURE = "page.test"
"""A name of this machine that is not `localhost`."""
QUESTION = "what is <b>it</b>?"


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[[str], Any]) -> Path:
    return tiny_bundle("gemma3").path


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with driven_browser(*CAMERA, f"--host-resolver-rules=MAP {INSECURE} 127.0.0.1") as browser:
        yield browser


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; a script that fails, or that the page's own policy stops, fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 420, "height": 800}, **options})
        context.set_default_timeout(1e3 * WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    refused = (
        "Failed to load resource: the server responded with a status of 4"  # Chromium's word for a 400 or 401
    )
    assert [each for each in complaints if not each.startswith(refused)] == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scene.png"
    Image.fromarray(picture(3)).save(path)
    return path


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=1e3 * WAIT)
    return expect(locator)


def ask(page: Any) -> list[Any]:
    """Press the button, and the events of the first answer, once all have ended."""
    with page.expect_response("**/v1/chat/completions") as response:
        page.click("#ask")
    expect(page.locator("#status")).to_have_text("Done.")
    return sse(response.value.body())


def text_of(page: Any, place: str) -> str:
    return page.locator(place).evaluate("element => element.textContent")


def figures(page: Any) -> dict[str, list[str]]:
    """Of the table, by the name of the row."""
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#figures tr").all()]
    return {name: values for name, *values in rows}


def test_a_question_about_a_picture(
    server: RunningServer, bundle: Path, opened: Callable[..., Any], file: Path
) -> None:
    page = opened(server.url)
    expect(page.locator("h1")).to_have_text(server.ask("/v1/models")[1]["data"][0]["id"])
    page.set_input_files("#file", file)
    expect(page.locator("#picture")).to_be_visible()
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Most tokens").fill("24")
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    ask(page)
    first, second = asked
    assert second == {**first, "draft": "none"} and "draft" not in first
    content = [{"type": "image", "image": picture(3)}, {"type": "text", "text": QUESTION}]
    with Session.load(bundle) as session:
        want = session.generate(messages=[{"role": "user", "content": content}], max_new_tokens=24)
    assert len(want.text) > 5
    assert text_of(page, "#drafted") == text_of(page, "#plain") == want.text
    assert "Both texts are equal." in text_of(page, "#verdict")
    found = figures(page)
    assert found["Tokens"] == ["24", "24"] and found["Tokens per cycle (τ)"][1] == "1.00"
    for name in ("Tokens per second", "First token after"):
        assert all(re.match(r"\d", value) for value in found[name]), found


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"Temperature": "0.9", "Seed": "7"}])
def test_sampled_or_not_the_text_is_the_session_s(
    server: RunningServer, bundle: Path, opened: Callable[..., Any], sampling: dict[str, str]
) -> None:
    """Text alone, without plain decoding."""
    page = opened(server.url)
    page.get_by_label("Question").fill("hello")
    page.get_by_label("Compare").uncheck()
    for label, value in sampling.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Question").press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done.")
    own = {name.lower(): json.loads(value) for name, value in sampling.items()}
    turn = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    with Session.load(bundle) as session:
        want = session.generate(messages=turn, max_new_tokens=64, **own)
    assert text_of(page, "#drafted") == want.text and text_of(page, "#plain") == ""
    expect(page.locator("#plain-part")).to_be_hidden()


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundled model with a trained draft."""
    path = tmp_path_factory.mktemp("captioner") / "bundle"
    command = [sys.executable, "-m", "vlmexport.runtime.cli", "build", "--model", "tiny-blip2-flant5"]
    subprocess.run([*command, "-o", str(path)], check=True, capture_output=True)
    return path


@pytest.mark.slow
def test_accepted_tokens_are_tinted(captioner: Path, opened: Callable[..., Any]) -> None:
    """A picture that was dropped beside the frame."""
    with RunningServer(captioner) as server:
        page = opened(server.url)
        data = page.evaluate_handle(
            """async (bytes) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], "scene.png", { type: "image/png" }));
                return data;
            }""",
            list((captioner / "example.png").read_bytes()),
        )
        page.dispatch_event("h1", "drop", {"dataTransfer": data})
        expect(page.locator("#picture")).to_be_visible()
        events = ask(page)
        choices = [each["choices"][0] for each in events[:-2]]
        tokens = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert sum(entry["drafted"] for entry in tokens) > 10
        joined = "".join(entry["token"] for entry in tokens if entry["drafted"])
        assert "".join(page.locator("#drafted mark").all_text_contents()) == joined
        assert text_of(page, "#drafted") == "".join(each["delta"].get("content", "") for each in choices)
        assert page.locator("#plain mark").count() == 0
        speculation = events[-2]["metrics"]["speculative_decoding"]
        found = figures(page)
        assert found["Tokens per cycle (τ)"][0] == f"{speculation['mean_acceptance_length']:.2f}"
        accepted = [speculation["num_accepted_draft_tokens"], speculation["num_draft_tokens"]]
        assert found["Accepted of drafted"] == [" of ".join(map(str, accepted)), "–"]


@pytest.mark.slow
def test_errors_are_in_the_server_s_words(bundle: Path, opened: Callable[..., Any], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.png"
    wrong.write_bytes(b"no picture")
    with RunningServer(bundle) as server:
        page = opened(server.url)
        page.set_input_files("#file", wrong)
        expect(page.locator("#picture")).to_be_visible()
        page.click("#ask")
        expect(page.locator("#error")).to_contain_text("image")
        page.click("#remove")
        page.get_by_label("Most tokens").fill("0")
        page.click("#ask")
        turn = [{"role": "user", "content": "hello"}]
        refused = server.ask("/v1/chat/completions", {"messages": turn, "max_tokens": 0})[1]
        expect(page.locator("#error")).to_have_text(refused["error"]["message"])
        page.get_by_label("Most tokens").fill("8")
        page.get_by_label("Question").fill("hello")
        ask(page)
        expect(page.locator("#error")).to_be_hidden()


@pytest.mark.slow
def test_a_key_is_asked_for_where_one_is_needed(
    bundle: Path, opened: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with RunningServer(bundle, "--api-key-file", str(keys)) as server:
        page = opened(server.url)
        expect(page.locator("#error")).to_contain_text("the key is missing or wrong")
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Question").fill("hello")
        expect(page.locator("#error")).to_be_hidden()
        ask(page)
        assert text_of(page, "#drafted") == text_of(page, "#plain") != ""
        assert page.locator("h1").inner_text() != "vlmexport"


@pytest.mark.slow
def test_stop_ends_the_request(bundle: Path, opened: Callable[..., Any]) -> None:
    with RunningServer(bundle) as server:
        page = opened(server.url)
        expect(page.locator("#key-field")).to_be_hidden()
        page.get_by_label("Question").fill("hello")
        (decoding,) = server.decoding
        os.kill(decoding, signal.SIGSTOP)  # so that the request is there when it is stopped
        page.click("#ask")
        until(lambda: server.metric("vlmexport:num_requests_running") == 1)
        page.click("#stop")
        expect(page.locator("#status")).to_have_text("Stopped.")
        os.kill(decoding, signal.SIGCONT)
        until(lambda: server.metric("vlmexport:request_errors_total", status="499") == 1)
        until(lambda: server.metric("vlmexport:num_requests_running") == 0)
        assert text_of(page, "#drafted") == ""
        ask(page)
        assert text_of(page, "#drafted") != ""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_scrolls_sideways(
    server: RunningServer, opened: Callable[..., Any], tmp_path: Path, scheme: str
) -> None:
    wide = tmp_path / "wide.png"
    Image.fromarray(np.zeros((40, 2000, 3), np.uint8)).save(wide)
    page = opened(server.url, color_scheme=scheme)
    page.set_input_files("#file", wide)
    expect(page.locator("#picture")).to_be_visible()
    page.get_by_label("Question").fill("w" * 100)
    page.get_by_label("Most tokens").fill("60")
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(ground.removeprefix("rgb(").split(",")[0]) < 128) == (scheme == "dark")


@pytest.mark.slow
def test_the_webcam_frame_after_frame(server: RunningServer, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.click("#webcam")
    page.get_by_label("Ask about frame").check()
    page.get_by_label("Compare").uncheck()
    page.get_by_label("Most tokens").fill("4")
    page.click("#ask")
    for _ in range(3):
        page.wait_for_event("requestfinished")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.")
    frames = re.findall(r'"url":"(data:image/jpeg;base64,[^"]+)"', "".join(asked))
    assert len(frames) >= 3 and len(set(frames)) > 1
    expect(page.locator("#frame")).to_be_visible()
    page.click("#webcam")
    expect(page.locator("#video")).to_be_hidden()
    assert page.locator("#video").evaluate("video => video.srcObject") is None


@pytest.mark.slow
def test_a_page_without_encryption_says_why_it_has_no_webcam(
    server: RunningServer, opened: Callable[..., Any]
) -> None:
    page = opened(server.url.replace("127.0.0.1", INSECURE))
    expect(page.locator("#camera-note")).to_contain_text("https")
    expect(page.locator("#webcam")).to_be_disabled()
