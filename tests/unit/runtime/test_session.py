"""Sessions on real bundles of tiny random models: losslessness, stops, streams, guards, memory."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="sessions on a CPU need [onnxruntime]")

from vlmexport.runtime.common.errors import (
    BundleError,
    BusyError,
    CapacityError,
    OptionError,
    PromptError,
    VlmexportError,
)
from vlmexport.runtime.decoder.prefill import Prefill
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.adversarial import always_wrong
from vlmexport.runtime.engines.onnxruntime import _BoundCall
from vlmexport.runtime.measure.forced_acceptance import forced_acceptance
from vlmexport.runtime.session.request import resolve
from vlmexport.runtime.session.request_options import RequestOptions
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.sequence import Sequence
from vlmexport.runtime.speedup.budget import Budget

FAMILIES = ("t5", "llama")


@pytest.fixture(scope="module")
def sessions(tiny_bundle: Callable[[str], Any]) -> Iterator[Callable[[str], Session]]:
    opened: dict[str, Session] = {}

    def get(name: str) -> Session:
        if name not in opened:
            opened[name] = Session.load(tiny_bundle(name).path)
        return opened[name]

    yield get
    for session in opened.values():
        session.close()


def test_unknown_option_is_reported(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    for call in (session.stream, session.generate_tokens):
        with pytest.raises(OptionError, match="no option unknown; there are max_new_tokens, stop"):
            call([1], unknown=1)  # type: ignore[operator]


def test_opencv_color_order(sessions: Callable[[str], Session]) -> None:
    session = sessions("t5")
    request = request_for(session) | {"max_new_tokens": 12, "ignore_eos": True}
    want = session.generate(**request)
    turned = request | {"image": request["image"][:, :, ::-1]}
    right = turned | {"channels": "bgr"}
    assert session.generate(**right).text == want.text
    stream = session.stream(**right)
    assert "".join(stream) == want.text
    assert [r.tokens for r in session.generate_batch([right, request])] == [want.tokens] * 2
    seen: list[np.ndarray] = []
    prepare = session._family.prepare
    session._family.prepare = lambda *given: seen.append(prepare(*given)) or seen[-1]  # type: ignore
    try:
        for asked in (request, right, turned):
            session.generate(**asked)
    finally:
        session._family.prepare = prepare  # type: ignore
    pixels = [prepared.vision[0]["pixel_values"] for prepared in seen]  # type: ignore[attr-defined]
    assert np.array_equal(pixels[0], pixels[1]) and not np.array_equal(pixels[0], pixels[2])
    for bad in ("BGR", None, 3):
        with pytest.raises(OptionError, match=r"channels: .* is not one of rgb, bgr"):
            session.generate(**turned, channels=bad)  # type: ignore[arg-type]


def request_for(session: Session, seed: int = 0) -> dict[str, Any]:
    image = session.bundle.manifest.image
    if image is None:
        return {"prompt": "a red cup"}
    pixels = np.random.default_rng(seed).integers(0, 255, (image.height, image.width, 3), np.uint8)
    return {"image": pixels, "prompt": "a red cup"}


@pytest.mark.parametrize("name", [*FAMILIES, "t5-two-cuts", "llama-two-cuts"])
def test_every_draft_gives_the_plain_tokens(sessions: Callable[[str], Session], name: str) -> None:
    session = sessions(name)
    for seed in range(2):
        request = request_for(session, seed) | {"max_new_tokens": 60, "ignore_eos": True}
        plain = session.generate(**request, speculative=False)
        assert len(plain.tokens) == 60
        assert plain.stats.cycles == 59
        for draft in session.bundle.manifest.drafts:
            for length in (1, 2, 5, 16):
                result = session.generate(**request, draft=draft.name, draft_length=length)
                assert result.tokens == plain.tokens, (draft.name, length)
                assert result.text == plain.text
                assert result.stats.proposed > 0
            for threshold in (0.5, 1.0):
                result = session.generate(**request, draft=draft.name, confidence_threshold=threshold)
                assert result.tokens == plain.tokens
            assert result.stats.proposed <= result.stats.cycles, "one draft a cycle: none is certain"
            with always_wrong(session, draft.name):
                result = session.generate(**request, draft=draft.name, draft_length=4)
            assert result.tokens == plain.tokens
            assert result.stats.accepted <= result.stats.evaluated * 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_sampling_is_a_function_of_the_seed(sessions: Callable[[str], Session], name: str) -> None:
    session = sessions(name)
    request = request_for(session) | {
        "max_new_tokens": 40,
        "temperature": 0.9,
        "top_k": 20,
        "ignore_eos": True,
    }
    first = session.generate(**request, seed=5, speculative=False)
    assert session.generate(**request, seed=5, draft="early-exit", draft_length=3).tokens == first.tokens
    assert session.generate(**request, seed=6, speculative=False).tokens != first.tokens
    assert session.generate(**request).tokens != session.generate(**request).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_limits_and_end_token(sessions: Callable[[str], Session], name: str, monkeypatch) -> None:
    session = sessions(name)
    request = request_for(session) | {"draft": "early-exit"}
    endless = session.generate(**request, max_new_tokens=30, ignore_eos=True).tokens
    for limit in (1, 2, 3):
        result = session.generate(**request, max_new_tokens=limit, ignore_eos=True)
        assert (result.tokens, result.finish_reason) == (endless[:limit], "length")
    at = next(i for i, token in enumerate(endless) if i > 2 and endless.index(token) == i)
    monkeypatch.setattr(session.bundle.manifest.text, "eos_token_ids", [endless[at]])
    for speculative in (True, False):
        result = session.generate(**request, max_new_tokens=30, speculative=speculative)
        assert (result.tokens, result.finish_reason) == (endless[: at + 1], "eos")


@pytest.mark.parametrize("name", FAMILIES)
def test_runs_to_the_end_of_the_cache(sessions: Callable[[str], Session], name: str) -> None:
    session = sessions(name)
    request = request_for(session) | {"max_new_tokens": 10_000, "ignore_eos": True}
    plain = session.generate(**request, speculative=False)
    assert plain.finish_reason == "length"
    assert session.decoder.arena.lengths[0] == session.max_length
    assert session.generate(**request, draft="early-exit", draft_length=16).tokens == plain.tokens


class RealTree(Proposer):
    """A tree proposer without a trunk: the plain tokens it was told, on branches that are never the first child."""

    name = "real-tree"

    def __init__(self, truth: list[int], vocabulary: int):
        self.truth, self.vocabulary = truth, vocabulary

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        emitted = sequence.tokens
        tokens, parents, node = [emitted[-1]], [-1], 0
        for step, token in enumerate(self.truth[len(emitted) : len(emitted) + budget.nodes // 3]):
            tokens += [(token + 1) % self.vocabulary, token]
            parents += [node, node]
            node = len(tokens) - 1
            if step == 1:  # a deeper wrong branch
                tokens.append((token + 2) % self.vocabulary)
                parents.append(node - 1)
        return TokenTree(tokens, parents)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_proposer_needs_no_change_elsewhere(
    sessions: Callable[[str], Session], name: str, request: pytest.FixtureRequest
) -> None:
    session = sessions(name)
    asked = request_for(session) | {"max_new_tokens": 50, "ignore_eos": True}
    plain = session.generate(**asked, speculative=False)
    draft = next(d.name for d in session.bundle.manifest.drafts if d.kind == "early-exit")
    before = session.proposer(draft)
    request.addfinalizer(lambda: session.replace_proposer(draft, before))
    session.replace_proposer(draft, RealTree(plain.tokens, session.bundle.manifest.text.vocab_size))
    result = session.generate(**asked, draft=draft, draft_length=12)
    assert result.tokens == plain.tokens
    assert result.stats.tau > 3, "tree paths were committed, not thrown away"
    with forced_acceptance(session, 0.7):
        forced = session.generate(**asked, draft=draft, draft_length=12)
    assert len(forced.tokens) == 50 and forced.stats.accepted > 0


def test_seconds_inside_the_engine_are_a_part_of_the_cycles(
    sessions: Callable[[str], Session], monkeypatch
) -> None:
    """A clock that only a call's run moves forward: all of a cycle's time is then the engine's."""
    now = [0.0]
    monkeypatch.setattr("vlmexport.runtime.engines.onnxruntime.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("vlmexport.runtime.speculative.cycle.perf_counter", lambda: now[0])
    whole = _BoundCall.run

    def run(call: _BoundCall) -> None:
        inner, call._run = call._run, lambda *given: (now.__setitem__(0, now[0] + 1.0), inner(*given))
        try:
            whole(call)
        finally:
            call._run = inner

    monkeypatch.setattr(_BoundCall, "run", run)
    stats = sessions("llama").generate_tokens(list(range(5, 12)), max_new_tokens=9, ignore_eos=True).stats
    seconds = stats.seconds
    assert stats.engine_seconds == seconds.draft + seconds.verify + seconds.head >= stats.cycles > 0


def test_missing_figures_are_none_not_zero(sessions: Callable[[str], Session]) -> None:
    """No cycle ran: its seconds are not known. A controller decides: there is no length."""
    session = sessions("llama")
    request = request_for(session) | {"ignore_eos": True}

    def stats(tokens: int, **options: Any) -> dict[str, Any]:
        return session.generate(**request, max_new_tokens=tokens, **options).stats.to_dict()

    one, some = stats(1), stats(9)
    assert one["cycles"] == 0 and one["engine_seconds"] is None and one["seconds"]["prefill"] > 0
    assert some["cycles"] > 0 and 0 < some["engine_seconds"] <= some["decode_seconds"]
    lengths = [
        stats(9, **options)["draft_length"] for options in ({}, {"draft_length": 3}, {"draft": "none"})
    ]
    assert lengths == [None, 3, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_stream_pieces_join_to_the_text(sessions: Callable[[str], Session], name: str) -> None:
    session = sessions(name)
    request = request_for(session) | {"max_new_tokens": 40, "ignore_eos": True}
    whole = session.generate(**request)
    pieces: list[str] = []
    assert session.generate(**request, on_text=pieces.append).text == "".join(pieces) == whole.text
    stream = session.stream(**request)
    assert "".join(stream) == whole.text
    assert stream.result.tokens == whole.tokens
    assert whole.to_dict()["stats"]["tokens"] == 40


def test_stop_string_cuts_the_text(sessions: Callable[[str], Session]) -> None:
    session = sessions("t5")
    request = request_for(session) | {"max_new_tokens": 40, "ignore_eos": True}
    whole = session.generate(**request)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    for speculative in (False, True):
        result = session.generate(**request, stop=stop, speculative=speculative, draft="early-exit")
        assert result.finish_reason == "stop"
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.tokens == whole.tokens[: len(result.tokens)]


def test_a_special_token_stops_every_kind_of_request(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    special = session.bundle.tokenizer.special_tokens

    def asked(seed: int) -> dict[str, Any]:
        return {"prompt": "x", "temperature": 60.0, "seed": seed, "max_new_tokens": 60, "ignore_eos": True}

    for seed in range(100):
        whole = session.generate(**asked(seed)).tokens
        at = next((n for n, token in enumerate(whole) if token in special and n), 60)
        if at < 50:
            break
    request = asked(seed) | {"stop": [special[whole[at]]]}
    results = [session.generate(**request), *session.generate_batch([request, asked(seed)])]
    stream = session.stream(**request)
    text = "".join(stream)
    for result in (results[0], results[1], stream.result):
        assert (result.finish_reason, result.tokens) == ("stop", whole[: at + 1])
        assert result.text == text == session.bundle.tokenizer.decode(whole[:at])
    assert results[2].tokens == whole


def test_a_stop_string_may_be_complete_only_at_the_end(sessions: Callable[[str], Session]) -> None:
    """An unfinished character is held back until no token can finish it."""
    session, unknown = sessions("llama"), "\N{REPLACEMENT CHARACTER}"
    request = request_for(session) | {"ignore_eos": True}
    tokens = session.generate(**request, max_new_tokens=60).tokens
    texts = [session.bundle.tokenizer.decode(tokens[: n + 1]) for n in range(60)]
    at = next(n for n, text in enumerate(texts) if unknown in text)
    result = session.generate(**request, max_new_tokens=at + 1, stop=unknown)
    assert (result.finish_reason, len(result.tokens)) == ("stop", at + 1)
    assert result.text == texts[at].partition(unknown)[0]


def test_one_request_at_a_time(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    request = request_for(session) | {"max_new_tokens": 20, "ignore_eos": True}
    stream = session.stream(**request)
    first = next(piece for piece in stream if piece)
    with pytest.raises(BusyError, match="busy"):
        session.generate(**request)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            session.generate(**request)
        except BusyError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "busy" in str(errors[0])
    with pytest.raises(VlmexportError, match="not finished"):
        _ = stream.result
    session.cancel()
    rest = "".join(stream)
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text == first + rest
    abandoned = session.stream(**request)
    next(abandoned)
    abandoned.close()
    assert abandoned.result.finish_reason == "cancelled"
    assert session.generate(**request).finish_reason == "length", "the session works on"


def test_deadline(sessions: Callable[[str], Session], monkeypatch) -> None:
    session = sessions("llama")
    step = Prefill.step
    monkeypatch.setattr(Prefill, "step", lambda self: (time.sleep(0.05), step(self))[1])
    result = session.generate(**request_for(session), max_new_tokens=10_000, ignore_eos=True, deadline=0.05)
    assert (result.finish_reason, len(result.tokens)) == ("deadline", 1), "counted from the call"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"draft": "phantom"}, "phantom"),
        ({"draft": "early-exit", "draft_length": 20}, "draft_length: 20 is above 19"),
        ({"draft": "early-exit", "draft_length": -1}, "draft_length"),
        ({"temperature": -0.1}, "temperature"),
        ({"deadline": 0.0}, "deadline"),
    ],
)
def test_bad_options_name_themselves(sessions: Callable[[str], Session], options: dict, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        sessions("llama").generate(prompt="a", **options)


def test_bad_requests_and_loads(
    tiny_bundle: Callable[[str], Any], sessions: Callable[[str], Session]
) -> None:
    session = sessions("llama")
    with pytest.raises(PromptError, match="vocabulary"):
        session.generate_tokens([0, 10**6])
    with pytest.raises(PromptError, match="empty"):
        session.generate_tokens([])
    with pytest.raises(PromptError, match="161"):
        session.generate_tokens([5] * 161)
    path = tiny_bundle("llama").path
    for options in (
        {"max_length": 0},
        {"max_length": 161},
        {"max_batch": 17},
        {"device": "tpu"},
        {"threads": 10**6},
        {"threads": True},
    ):
        with pytest.raises(OptionError, match=next(iter(options))):
            Session.load(path, **options)
    closed = Session.load(path)
    closed.close()
    with pytest.raises(VlmexportError, match="closed"):
        closed.generate(prompt="a")


def test_graph_unlike_the_manifest_is_refused(tiny_bundle: Callable[[str], Any], monkeypatch) -> None:
    bundle = tiny_bundle("llama").bundle
    with Session.load(bundle) as session:
        engine = session.decoder.engine
        with pytest.raises(CapacityError, match=r"no memory for 'x' \(.*smaller max_length"):
            engine.allocate("x", 1 << 52)
        rows = engine.allocate("rows", 12).view((1, 1, 3), "float32")
        index = engine.allocate("index", 8).view((1,), "int64")
        call = engine.bind("head", {"hidden": rows, "row_index": index}, {})
        with pytest.raises(BundleError, match=r"cannot run head\.onnx"):
            call.run()
    logits = bundle.manifest.graphs["head"].outputs[0]
    for field, value in (("shape", ["rows", 7]), ("dtype", "float16")):
        with monkeypatch.context() as patch:
            patch.setattr(logits, field, value)
            with pytest.raises(
                BundleError, match=r"head\.onnx: outputs differ .*'graphs\.head\.outputs': logits"
            ):
                Session.load(bundle)


def test_generate_tokens_equals_generate(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    prepared = session._family.prepare(session.bundle, None, "a red cup")
    options = {"max_new_tokens": 20, "ignore_eos": True}
    by_text = session.generate(prompt="a red cup", **options)
    assert session.generate_tokens(prepared.token_ids.tolist(), **options).tokens == by_text.tokens


_GROWTH = """
import re, sys
import numpy as np
from vlmexport.runtime import Session
def anonymous():
    return int(re.search(r"Pss_Anon: +(\\d+)", open("/proc/self/smaps_rollup").read()).group(1))
session = Session.load(sys.argv[1], threads=1)
image = session.bundle.manifest.image
rng = np.random.default_rng(0)
def request(index):
    pixels = rng.integers(0, 255, (image.height, image.width, 3), np.uint8) if image else None
    options = dict(max_new_tokens=20 + index % 90, ignore_eos=True)
    session.generate(pixels, "a red cup" * (1 + index % 2), draft="early-exit", draft_length=1 + index % 6, **options)
for index in range(30): request(index)
before = anonymous()
for index in range(120): request(index)
print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
@pytest.mark.parametrize("name", FAMILIES)
def test_memory_does_not_grow(tiny_bundle: Callable[[str], Any], name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, str(tiny_bundle(name).path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(re.fullmatch(r"(-?\d+)\s*", done.stdout).group(1)) < 1024, "KiB more after 120 requests"


def test_a_dropped_stream_and_a_close_end_their_requests(tiny_bundle: Callable[[str], Any]) -> None:
    """Without the garbage collector: leaving a loop must free the session at once; closing is safe at any time."""
    gc.disable()
    try:
        session = Session.load(tiny_bundle("llama").path)
        for _ in session.stream(prompt="a red cup", ignore_eos=True, max_new_tokens=40):
            break
        stream = session.stream(prompt="a red cup", ignore_eos=True, max_new_tokens=40)
        next(stream)
        session.close()
        session.close()
        stream.close()
        assert stream.result.finish_reason == "cancelled" and session.decoder is None
    finally:
        gc.enable()


def test_a_stream_is_read_by_one_thread(sessions: Callable[[str], Session], monkeypatch) -> None:
    """A second one is refused with what to do instead, and disturbs nothing."""
    session = sessions("llama")
    request = request_for(session) | {"max_new_tokens": 4, "ignore_eos": True}
    want = session.generate(**request).text
    inside, go_on, prefill = threading.Event(), threading.Event(), Prefill.step

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return prefill(*arguments)

    monkeypatch.setattr(Prefill, "step", slow)
    stream, heard = session.stream(**request), []
    reader = threading.Thread(target=lambda: heard.extend(stream))
    reader.start()
    assert inside.wait(30)
    for refused in (lambda: next(stream), stream.close):
        with pytest.raises(VlmexportError, match=r"end the request with Session\.cancel"):
            refused()
    go_on.set()
    reader.join()
    assert "".join(heard) == want == stream.result.text
    stream.close()


def test_a_stream_without_a_result_says_why(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    unread = session.stream(**request_for(session))
    with pytest.raises(VlmexportError, match="not finished"):
        _ = unread.result
    unread.close()
    failing = session.stream(prompt="a red cup " * 3000)
    with pytest.raises(PromptError):
        next(failing)
    for stream in (unread, failing):
        with pytest.raises(VlmexportError, match="it failed, or was closed before it began"):
            _ = stream.result


def test_closed_session_is_reported(tiny_bundle: Callable[[str], Any]) -> None:
    session = Session.load(tiny_bundle("llama").path)
    note = session.note
    session.close()
    assert session.note == note
    for call in (
        lambda: session.generate(prompt="a red cup"),
        lambda: session.proposer("early-exit"),
        lambda: list(session.generate_many([{"prompt": "a red cup"}])),
    ):
        with pytest.raises(VlmexportError, match="this session is closed; load the bundle again"):
            call()


def test_session_survives_a_change_of_working_directory(
    tiny_bundle: Callable[[str], Any], monkeypatch
) -> None:
    """Graphs of other drafts and the tokenizer are read at their first use."""
    path = tiny_bundle("llama").path
    monkeypatch.chdir(path.parent)
    with Session.load(Path(path.name)) as session:
        monkeypatch.chdir("/")
        plain = session.generate(prompt="a red cup", max_new_tokens=8, draft="none")
        for draft in session.bundle.manifest.drafts:
            assert (
                session.generate(prompt="a red cup", max_new_tokens=8, draft=draft.name).tokens
                == plain.tokens
            )


def test_confidence_threshold_excludes_trees(sessions: Callable[[str], Session]) -> None:
    session = sessions("llama")
    with pytest.raises(OptionError, match="draft_nodes: 4 asks for trees"):
        session.generate(**request_for(session), draft="early-exit", adaptive="confidence", draft_nodes=4)


def test_bundle_of_width_1_decodes_plainly(tiny_bundle: Callable[[str], Any]) -> None:
    """`build` makes none; a manifest may say so all the same."""
    bundle = copy.copy(tiny_bundle("llama").bundle)
    bundle.manifest = replace(bundle.manifest, limits=replace(bundle.manifest.limits, max_width=1))
    with Session.load(tiny_bundle("llama").path) as session:
        want = session.generate(prompt="a red cup", max_new_tokens=8, draft="none").tokens
    options = RequestOptions(max_new_tokens=8)
    for adaptive in ("session", "request", "off", "confidence"):
        found = resolve(replace(options, adaptive=adaptive), bundle.manifest, lambda *_: 1 / 0)
        assert found.draft is None and found.policy is None
    assert len(want) == 8


def test_error_in_on_text_frees_the_session(tiny_bundle: Callable[[str], Any]) -> None:
    session = Session.load(tiny_bundle("llama").path)
    with pytest.raises(ZeroDivisionError):
        session.generate(prompt="a red cup", max_new_tokens=8, on_text=lambda _: 1 // 0)
    assert session.generate(prompt="a red cup", max_new_tokens=2).tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": True}, {"draft_length": 1.5}, {"draft_length": "3"}, {"temperature": "1"}, {"top_k": None},
        {"seed": 0.5}, {"stop": 3}, {"stop": [1]}, {"deadline": "1"}, {"deadline": 0},
        {"policy": 3}, {"speculative": "no"}, {"ignore_eos": 1}, {"draft": 3}, {"on_text": 3},
        {"confidence_threshold": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_wrong_type_are_named(tiny_bundle: Callable[[str], Any], options: dict) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        with pytest.raises(OptionError, match=next(iter(options))):
            session.generate(prompt="a red cup", **options)
        assert session.generate(prompt="a red cup", max_new_tokens=1).tokens


@pytest.mark.parametrize("ids", ["12", 5, [1.5], [True], [10**30], [-1], None, np.array(3)])
def test_token_ids_of_the_wrong_type_are_named(tiny_bundle: Callable[[str], Any], ids: Any) -> None:
    with Session.load(tiny_bundle("llama").path) as session, pytest.raises(PromptError, match="token_ids"):
        session.generate_tokens(ids)
