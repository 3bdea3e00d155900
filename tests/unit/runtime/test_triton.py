"""A model of Triton's python backend: the repository that is written, what a request means, how it is answered."""

from __future__ import annotations

import io
import json
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime.common.errors import (
    BundleError,
    BusyError,
    ClosedError,
    GrammarError,
    ImageError,
    NumericsError,
    OptionError,
    PromptError,
    QueueFullError,
)
from vlmexport.runtime.serving.ticket import Ticket
from vlmexport.runtime.serving.triton import delivery as triton_delivery
from vlmexport.runtime.serving.triton.delivery import code_of
from vlmexport.runtime.serving.triton.model import TritonModel
from vlmexport.runtime.serving.triton.repository import write_repository
from vlmexport.runtime.serving.triton.request import read_request
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speculative.cycle import Cycle

from tests.support import handmade_bundle
from tests.support import triton_stand_in as triton
from tests.support.gated_cycles import WAIT, Gate
from tests.support.triton_stand_in import Request

LONG: dict[str, Any] = {
    "prompt": "a red cup",
    "options": json.dumps({"ignore_eos": True, "speculative": False}),
    "max_new_tokens": 60,
}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def start(tiny_bundle: Callable[[str], Any], tmp_path: Path) -> Iterator[Callable[..., TritonModel]]:
    """`start(name, …)`: the model that `write_repository` writes for a tiny bundle, as Triton starts it."""
    started: list[TritonModel] = []

    def model(name: str, **options: Any) -> TritonModel:
        written = write_repository(tiny_bundle(name).path, tmp_path, f"model-{len(started)}", **options)
        one = model_class(written)()
        one.initialize({"model_config": triton.model_config(written)})
        started.append(one)
        return one

    triton.faults.clear()
    yield model
    for one in started:
        one.finalize()
    assert triton.faults == []


def model_class(written: Path) -> type[TritonModel]:
    """What Triton takes from 1/model.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", triton)  # type: ignore[arg-type]
        return runpy.run_path(str(written / "1" / "model.py"))["TritonPythonModel"]


def picture(seed: int) -> bytes:
    """Of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


# --- the repository ---


def handmade(folder: Path) -> Path:
    return handmade_bundle.write_bundle(folder)


def test_the_repository_holds_one_folder_per_model(tmp_path: Path) -> None:
    bundle = handmade(tmp_path / "cups")
    repository = tmp_path / "not" / "there"
    first = write_repository(bundle, repository)
    second = write_repository(
        bundle, repository, "more.cups-2", max_batch=1, max_waiting=3, threads=2, instances=4
    )
    assert (first, second) == (repository / "cups", repository / "more.cups-2")
    assert sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()) == [
        "cups/1/model.py",
        "cups/config.pbtxt",
        "more.cups-2/1/model.py",
        "more.cups-2/config.pbtxt",
    ]
    given = json.loads(triton.model_config(second))["parameters"]
    assert {name: value["string_value"] for name, value in given.items()} == {
        "bundle": str(bundle), "device": "cpu", "max_batch": "1", "max_waiting": "3", "threads": "2",
    }  # fmt: skip
    assert json.loads(triton.model_config(first))["parameters"].keys() == {"bundle", "device", "max_waiting"}
    text = (second / "config.pbtxt").read_text("ascii")
    for line in (
        'name: "more.cups-2"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { kind: KIND_CPU count: 4 } ]",
        '  { name: "image" data_type: TYPE_STRING dims: [ -1 ] optional: true },',
        '  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }',
        '  { name: "accepted" data_type: TYPE_INT32 dims: [ 1 ] }',
    ):
        assert line in text.splitlines()
    assert issubclass(model_class(first), TritonModel)


def test_a_relative_or_odd_path_arrives_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = handmade(tmp_path / 'a "b"\\n ü\n')
    monkeypatch.chdir(tmp_path)
    model = write_repository(Path(bundle.name), Path("models"), "odd")
    given = json.loads(triton.model_config(tmp_path / model))["parameters"]
    assert given["bundle"]["string_value"] == str(bundle)


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    bundle = handmade(tmp_path / "cups")
    models = tmp_path / "models"
    config = write_repository(bundle, models) / "config.pbtxt"
    config.write_text("changed")
    with pytest.raises(
        OptionError, match=r"models/cups: the repository has a model of that name; remove it, or"
    ):
        write_repository(bundle, models)
    assert config.read_text() == "changed"
    (models / "own" / "1").mkdir(parents=True)
    (models / "own" / "1" / "model.py").write_text("# my own\n")
    (models / "file").write_text("a file")
    (models / "kept" / "2").mkdir(parents=True)
    for name in ("own", "file", "kept"):
        with pytest.raises(OptionError, match="has a model of that name"):
            write_repository(bundle, models, name)
    assert (models / "own" / "1" / "model.py").read_text() == "# my own\n"


def test_what_a_kill_left_is_written_anew(tmp_path: Path) -> None:
    bundle = handmade(tmp_path / "cups")
    whole = write_repository(bundle, tmp_path / "models")
    (whole / "config.pbtxt").rename(whole / ".config.pbtxt.0123abcd.new")
    assert write_repository(bundle, tmp_path / "models") == whole
    assert sorted(path.name for path in whole.iterdir()) == ["1", "config.pbtxt"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a slash": (
        {"name": "../cups"},
        r"name: '\.\./cups' is no name of a model; give one of letters",
    ),
    "an empty name": ({"name": ""}, "name: '' is no name"),
    "another device": ({"device": "tpu"}, "unknown device 'tpu'; choose one of: cpu, cuda, tensorrt"),
    "threads of a GPU": ({"device": "cuda", "threads": 2}, "computes on a GPU; leave it out"),
    "no threads": ({"threads": 0}, "threads: 0 is not an integer ≥ 1"),
    "more than the bundle has": (
        {"max_batch": 17},
        r"max_batch \(of this bundle\): 17 is not an integer in 1\.\.",
    ),
    "a negative queue": ({"max_waiting": -1}, "max_waiting: -1 is not an integer ≥ 0"),
    "no instance": ({"instances": 0}, "instances: 0 is not an integer ≥ 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_repository_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    bundle = handmade(tmp_path / "cups")
    options, message = REFUSED[case]
    with pytest.raises(OptionError, match=message):
        write_repository(bundle, tmp_path / "models", **options)
    assert not (tmp_path / "models").exists()


def test_places_that_cannot_be_a_repository_are_refused(tmp_path: Path) -> None:
    bundle = handmade(tmp_path / "cups")
    with pytest.raises(OptionError, match="lies in the bundle, which may hold nothing else"):
        write_repository(bundle, bundle / "models")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="file: is not a folder"):
        write_repository(bundle, tmp_path / "file")
    with pytest.raises(BundleError, match="does not exist"):
        write_repository(tmp_path / "nothing", tmp_path / "models")
    assert not (tmp_path / "models").exists()


# --- loading ---


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, 'the parameter "bundle" is missing'),
        ({"bundle": "/nowhere"}, "/nowhere: does not exist"),
        ({"bundle": "/nowhere", "max_wating": "3"}, "no parameter 'max_wating'; there are bundle, device"),
        ({"bundle": "/nowhere", "max_batch": "many"}, "the parameter max_batch: 'many' is not an integer"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why_in_one_line(parameters: dict[str, str], message: str) -> None:
    given = {name: {"string_value": value} for name, value in (parameters | {"FORCE_CPU": "yes"}).items()}
    with pytest.raises(triton.TritonModelException, match=message) as raised:
        TritonModel(triton).initialize({"model_config": json.dumps({"parameters": given})})
    assert "\n" not in str(raised.value)


def test_an_instance_takes_as_many_requests_as_its_bundle(start: Callable[..., TritonModel]) -> None:
    for options, want in (({}, (16, 64, 0)), ({"max_batch": 3, "max_waiting": 5, "threads": 1}, (3, 5, 1))):
        model = start("t5", **options)
        scheduler = model._scheduler
        assert (scheduler.session.max_batch, scheduler.max_waiting) == want[:2]
        assert want[2] == 0 or scheduler.session.threads == want[2]


# --- requests ---


def test_inputs_become_a_request_of_the_scheduler() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    asked, streamed = read_request(
        triton,
        Request(
            image=[b"one", b"two"],
            messages=json.dumps(messages),
            options=json.dumps({"stop": ["."], "top_k": 5}),
            max_new_tokens=9,
            temperature=0.7,
            seed=2**64 - 1,
            stream=True,
        ),
    )
    assert streamed and asked == {
        "images": [b"one", b"two"],
        "messages": messages,
        "stop": ["."],
        "top_k": 5,
        "max_new_tokens": 9,
        "temperature": 0.7,  # and not float32's 0.699999988079071
        "seed": 2**64 - 1,
    }
    assert {type(asked[name]) for name in ("max_new_tokens", "seed")} == {int}
    assert read_request(triton, Request(prompt="A cup", image=[])) == ({"prompt": b"A cup"}, False)
    assert read_request(triton, Request()) == ({}, False)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"image": b"no picture"}, "the image: not an image of a known format"),
    "an empty picture": ({"image": [b""]}, "the image: is empty"),
    "no picture at all": ({"prompt": "a cup"}, "image"),
    "an option": ({"image": picture(0), "max_new_tokens": 0}, "max_new_tokens: 0 is not an integer ≥ 1"),
    "no number": ({"image": picture(0), "temperature": float("nan")}, "temperature: nan is not a number ≥ 0"),
    "a name": ({"options": '{"max_tokens": 3}'}, "options: no option 'max_tokens'; there are max_new_tokens"),
    "a deprecated name": ({"options": '{"force_acceptance": 1}'}, "options: no option 'force_acceptance'"),
    "a file of the server's": ({"options": '{"image": "/etc/hostname"}'}, "options: no option 'image'"),
    "no object": ({"options": "[3]"}, "options: [3] is not a JSON object of options by name"),
    "no JSON": ({"options": "{"}, "options is not JSON: Expecting property name"),
    "deep JSON": ({"messages": "[" * 100_000}, "messages is not JSON: it is nested too deep"),
    "no list": ({"messages": '{"role": "user"}'}, "messages: {'role': 'user'} is not a JSON list of messages"),
    "twice": ({"options": '{"seed": 1}', "seed": 2}, "seed is given twice, in options and as an input"),
    "two values": ({"seed": [1, 2]}, "seed: 2 values; give one, or leave the input out"),
    "two prompts": ({"prompt": "a", "messages": "[]"}, "prompt and messages are two words for the same argument"),
    "no text": ({"image": picture(0), "prompt": b"\xff"}, "prompt"),
    "a policy": ({"image": picture(0), "options": '{"policy": "mine"}'}, "policy"),
}  # fmt: skip


def test_what_cannot_be_served_is_an_invalid_argument(start: Callable[..., TritonModel]) -> None:
    model = start("t5", max_batch=2)
    requests = {case: Request(**inputs) for case, (inputs, _) in WRONG.items()}
    model.execute(list(requests.values()))
    for case, request in requests.items():
        code, message = request.error()
        assert (code, WRONG[case][1] in message, "\n" in message) == ("invalid argument", True, False), (
            case,
            message,
        )
    served = Request(image=picture(0), prompt="a cup", max_new_tokens=3)
    model.execute([served])
    assert served.wait()[-1].values["tokens"] <= 3


@pytest.mark.parametrize("place", ["image", "url", "path"])
def test_a_client_names_no_file_of_the_server(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(picture(0))
    content = [{"type": "text", "text": "?"}, {"type": "image", place: str(tmp_path / "secret.png")}]
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
    with pytest.raises(
        PromptError, match=r'message 1, part 1: its image is given .* write \{"type": "image"\}'
    ):
        read_request(triton, Request(messages=messages))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind, "invalid argument") for kind in (ImageError, PromptError, GrammarError, OptionError)),
        *((kind, "unavailable") for kind in (QueueFullError, BusyError, ClosedError)),
        *((kind, "internal") for kind in (NumericsError, RuntimeError)),
    ],
)
def test_errors_have_codes(error: type[Exception], code: str) -> None:
    assert code_of(triton.TritonError, error("x")) == code


# --- answers ---


def test_streamed_and_whole_text_are_those_of_generate(
    start: Callable[..., TritonModel], tiny_bundle: Callable[[str], Any]
) -> None:
    asked = [
        {
            "image": picture(seed),
            "prompt": "a red cup " * (1 + seed % 3),
            "max_new_tokens": 4 + 5 * (seed % 4),
            "temperature": (0.0, 0.7)[seed % 2],
            "seed": seed,
        }
        for seed in range(12)
    ]
    with Session.load(tiny_bundle("t5").path) as session:
        alone = [session.generate(**request) for request in asked]
    model = start("t5", max_batch=3)
    streamed = [Request(**request, stream=True) for request in asked]
    whole = [Request(**request, stream=False) for request in asked]
    model.execute([each for pair in zip(streamed, whole, strict=True) for each in pair])
    for want, parts, one in zip(alone, streamed, whole, strict=True):
        assert parts.text() == one.text() == want.text
        assert len(one.responses) == 1
        for last in (parts.responses[-1], one.responses[0]):
            values = last.values
            assert values["finish_reason"].decode() == want.finish_reason
            assert values["tokens"] == len(want.tokens) and 0 <= values["accepted"] <= len(want.tokens)
        for values in (response.values for response in parts.responses[:-1]):
            assert (values["text"] == b"", values["finish_reason"], values["tokens"]) == (False, b"", 0)


def test_the_last_response_counts_tokens(
    start: Callable[..., TritonModel], tiny_bundle: Callable[[str], Any]
) -> None:
    """A second answer accepts what a memory of the first one drafts; what an untrained draft proposes is rejected."""
    memory = {"memory": "cups", "draft_length": 4, "ignore_eos": True}
    asked = [memory, memory, {"draft": "early-exit", "draft_length": 3, "ignore_eos": True}]
    with Session.load(tiny_bundle("t5").path) as session:
        results = [session.generate(picture(1), "a cup", max_new_tokens=40, **options) for options in asked]
    model = start("t5", max_batch=2)
    for options, want in zip(asked, results, strict=True):
        request = Request(image=picture(1), prompt="a cup", max_new_tokens=40, options=json.dumps(options))
        model.execute([request])
        values = request.wait()[-1].values
        assert (values["tokens"], values["accepted"]) == (40, want.stats.accepted)
    assert results[1].stats.accepted > 20
    assert results[2].stats.accepted < results[2].stats.proposed


def test_text_goes_out_while_it_is_decoded(start: Callable[..., TritonModel], gate: Gate) -> None:
    model = start("t5", max_batch=2)
    sent = threading.Semaphore(0)
    streamed = Request(sent.release, **LONG, image=picture(1), stream=True)
    whole = Request(**LONG, image=picture(1))
    model.execute([streamed])
    gate.wait()
    model.execute([whole])
    for _ in range(8):
        gate.cycle()
    assert sent.acquire(timeout=WAIT) and not streamed._ended.is_set()
    assert not whole.responses
    gate.open()
    assert streamed.text() == whole.text()


def test_conversations_have_several_pictures(
    start: Callable[..., TritonModel], tiny_bundle: Callable[[str], Any]
) -> None:
    images = [picture(1), picture(2)]
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "a cup"}]}
    ]
    with Session.load(tiny_bundle("qwen2.5-vl").path) as session:
        want = session.generate(images=images, messages=messages, max_new_tokens=8)
        other = session.generate(images=images[::-1], messages=messages, max_new_tokens=8)
    request = Request(image=images, messages=json.dumps(messages), max_new_tokens=8)
    start("qwen2.5-vl").execute([request])
    assert request.text() == want.text != other.text


def test_a_full_queue_is_unavailable(start: Callable[..., TritonModel], gate: Gate) -> None:
    model = start("t5", max_batch=1, max_waiting=1)
    accepted = [Request(**LONG, image=picture(1)) for _ in range(2)]
    refused = Request(**LONG, image=picture(1))
    model.execute([*accepted, refused])
    assert refused.error() == (
        "unavailable",
        "1 requests wait already; ask again later, or raise max_waiting",
    )
    gate.open()
    assert accepted[0].text() == accepted[1].text() != ""
    again = Request(**LONG, image=picture(1))
    model.execute([again])
    assert again.text() == accepted[0].text()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_cancels_ends_within_a_cycle(
    start: Callable[..., TritonModel], gate: Gate, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    seen = threading.Semaphore(0)
    cancel = Ticket.cancel
    monkeypatch.setattr(Ticket, "cancel", lambda ticket: (cancel(ticket), seen.release()))
    model = start("t5", max_batch=1, max_waiting=2)
    running, waiting, last = (Request(**LONG, image=picture(1), stream=stream) for _ in range(3))
    model.execute([running])
    gate.wait()  # it has the place
    model.execute([waiting, last])
    for _ in range(3):
        gate.cycle()
    for request in (running, waiting):
        request.cancelled = True
        assert seen.acquire(timeout=WAIT), "while a cycle runs"
    before = len(running.responses)
    gate.cycle()  # that of the last one: the others have ended
    for request in (running, waiting):
        response = request.wait()[-1]
        assert response.error is not None and not response.values
        assert (response.error.code, response.error.message) == ("cancelled", "the request was cancelled")
    assert len(running.responses) == before + 1, "nobody reads more text"
    assert len(waiting.responses) == 1 and not last._ended.is_set()
    gate.open()
    assert last.wait()[-1].values["tokens"] == 60


def test_a_client_is_looked_for_before_each_response(
    start: Callable[..., TritonModel], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_delivery, "LOOK", 1e6)  # not because of the time
    sent = threading.Semaphore(0)
    request = Request(sent.release, **LONG, image=picture(1), stream=True)
    start("t5", max_batch=2).execute([request])
    gate.wait()
    for _ in range(3):
        for _ in range(8):
            gate.cycle()
        assert sent.acquire(timeout=WAIT)
    gate.open()
    pieces = request.wait()[:-1]
    assert request.looks >= len(pieces) >= 3


def test_a_client_that_cannot_be_reached_ends_its_own_request(
    start: Callable[..., TritonModel], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the client is gone")

    model = start("t5", max_batch=2)
    gone, there = (Request(send, **LONG, image=picture(1), stream=True) for send in (fail, lambda: None))
    model.execute([gone, there])
    assert there.wait()[-1].values["tokens"] == 60
    model.finalize()
    assert not gone.responses and "RuntimeError: the client is gone" in caplog.text


def test_an_error_of_the_engine_is_internal(
    start: Callable[..., TritonModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(cycle: Cycle) -> Any:
        raise RuntimeError("the device is lost")

    model = start("t5", max_batch=2)
    monkeypatch.setattr(Cycle, "run", lost)
    request = Request(**LONG, image=picture(1))
    model.execute([request])
    assert request.error() == ("internal", "the scheduler ended: the device is lost")
    later = Request(**LONG, image=picture(1))
    model.execute([later])
    assert later.error() == ("internal", "the scheduler ended: the device is lost")


def test_an_error_of_ours_ends_one_request(
    start: Callable[..., TritonModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = start("t5", max_batch=2)
    broken, good = Request(**LONG, image=picture(1)), Request(**LONG, image=picture(1))
    monkeypatch.setattr(broken.tensors["image"], "as_numpy", lambda: 1 // 0, raising=True)
    model.execute([broken, good])
    assert broken.error() == ("internal", "ZeroDivisionError: integer division or modulo by zero")
    assert good.wait()[-1].values["tokens"] == 60


def test_unloading_lets_requests_end(start: Callable[..., TritonModel]) -> None:
    model = start("t5", max_batch=2)
    requests = [Request(**LONG, image=picture(1), stream=True) for _ in range(5)]
    model.execute(requests)
    model.finalize()
    assert all(request._ended.is_set() for request in requests)
    assert {int(request.responses[-1].values["tokens"]) for request in requests} == {60}
    assert model._scheduler.session.decoder is None
    late = Request(**LONG, image=picture(1))
    model.execute([late])
    assert late.error() == ("unavailable", "the scheduler is closed; ask another one")
