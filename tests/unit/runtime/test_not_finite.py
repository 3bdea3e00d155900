"""One NaN or infinity in a weight ends a request with an error that names the graph, on every way to a token, and no
other request that is decoded beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.seal import manifest_text
from vlmexport.runtime.common.errors import NumericsError
from vlmexport.runtime.session.session import Session

onnx = pytest.importorskip("onnx", reason="finding a weight in a graph needs [export]")

PLAIN: dict[str, Any] = {"speculative": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "plain, sampling": {**PLAIN, "temperature": 0.8, "seed": 1},
    "plain, top-k and top-p": {**PLAIN, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 1},
    "early exit": {"draft": "early-exit", "draft_length": 3},
    "imitation": {"draft": "imitation", "draft_length": 3},
    "imitation, sampling": {"draft": "imitation", "draft_length": 3, "temperature": 0.8, "seed": 1},
    "imitation, confidence": {"draft": "imitation", "confidence_threshold": 0.1},
    "medusa": {"draft": "medusa", "draft_length": 3},
    "medusa, tree": {"draft": "medusa", "draft_nodes": 7},
    "prompt lookup": {"draft": "prompt-lookup", "draft_length": 3},
    "controller": {},
}
GRAPHS = {
    "t5": ["vision", "encoder", "cross_kv", "segment.0", "segment.1", "head", "imitation.1", "medusa"],
    "llama": ["segment.0", "segment.1", "head", "imitation.1", "medusa"],
}
OF_DRAFTS = {"imitation.1": "imitation", "medusa": "medusa"}
"""Graph → what the names of the ways begin with that run it."""
CASES = [(family, graph, float("nan")) for family, graphs in GRAPHS.items() for graph in graphs]
CASES += [("llama", "head", float("inf")), ("t5", "segment.0", float("inf"))]


def damaged(bundle: Path, folder: Path, graph: str, value: float) -> Path:
    """A copy of a bundle of which the first number of the largest weight of a graph is `value`; its checksums fit."""
    path = Path(shutil.copytree(bundle, folder))
    document = json.loads((path / "manifest.json").read_text("utf-8"))
    model = onnx.load(str(path / document["graphs"][graph]["file"]), load_external_data=False)
    stored = [
        {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.external_data and tensor.data_type == onnx.TensorProto.FLOAT
    ]
    place = max(stored, key=lambda entry: int(entry["length"]))
    write_number(path, int(place["offset"]), value)
    return path


def without_token(bundle: Path, folder: Path, token: int) -> Path:
    """A copy of a bundle whose embedding of `token` is NaN; its checksums fit."""
    path = Path(shutil.copytree(bundle, folder))
    table = json.loads((path / "manifest.json").read_text("utf-8"))["tensors"]["embedding_table"]
    write_number(path, table["offset"] + token * table["bytes"] // table["shape"][0], float("nan"))
    return path


def write_number(path: Path, offset: int, value: float) -> None:
    """Write a float32 into a bundle's weights, and the checksums anew."""
    document = json.loads((path / "manifest.json").read_text("utf-8"))
    content = bytearray((path / "weights.bin").read_bytes())
    content[offset : offset + 4] = np.float32(value).tobytes()
    (path / "weights.bin").write_bytes(content)
    document["files"]["weights.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(manifest_text(document), "utf-8")


def request_for(session: Session) -> dict[str, Any]:
    image = session.bundle.manifest.image
    request: dict[str, Any] = {"prompt": "a red cup a red cup", "max_new_tokens": 12, "ignore_eos": True}
    if image is not None:
        pixels = np.random.default_rng(0).integers(0, 255, (image.height, image.width, 3), np.uint8)
        request["image"] = pixels
    return request


@pytest.mark.parametrize(("family", "graph", "value"), CASES)
def test_non_finite_weight_ends_every_request(
    tiny_bundle: Callable, tmp_path: Path, family: str, graph: str, value: float
) -> None:
    path = damaged(tiny_bundle(family).path, tmp_path / "bundle", graph, value)
    with Session.load(path, max_batch=2, check="sha256") as session:
        request = request_for(session)
        for name, options in WAYS.items():
            drafts = name.startswith(OF_DRAFTS.get(graph, ""))
            for many in (False, True):
                asked = request | options

                def serve(asked: dict[str, Any] = asked, many: bool = many) -> Any:
                    if many:
                        return session.generate_batch([asked, asked | {"prompt": "the robot"}, asked])
                    return session.generate(**asked)

                if drafts:
                    with pytest.raises(
                        NumericsError, match=r"graph [a-z_.0-9]+ gave logits that are not"
                    ) as caught:
                        serve()
                    assert "\n" not in str(caught.value), name
                    assert graph not in OF_DRAFTS or f"graph {graph} " in str(caught.value), name
                elif name != "controller":  # which may draft with the damaged network, or not
                    assert serve(), name


@pytest.mark.parametrize("family", GRAPHS)
def test_non_finite_request_does_not_affect_the_next(tiny_bundle: Callable, family: str) -> None:
    """A request whose keys and values left the range ends; a session that serves another afterwards is whole."""
    with Session.load(tiny_bundle(family).path) as session:
        request = request_for(session) | PLAIN
        want = session.generate(**request).tokens
        stream, decoder = session.stream(**request | {"max_new_tokens": 40}), session.decoder
        with pytest.raises(NumericsError):
            for _ in stream:
                for view in decoder.arena.views(0).values():
                    decoder.engine.read(view)[0, :, 0] = np.nan
        assert session.generate(**request).tokens == want


PROMPTS = ("a red cup a red cup", "the robot", "what is on the table", "a blue ball", "describe the scene")
LIMITS = (14, 30, 9, 20, 12)


@pytest.mark.parametrize("family", GRAPHS)
def test_non_finite_sequence_ends_alone(tiny_bundle: Callable, tmp_path: Path, family: str) -> None:
    """The embedding of one token is NaN: of what one request of a batch says after a while, or of its prompt."""
    bundle = tiny_bundle(family).path
    with Session.load(bundle, max_batch=3) as whole:
        asked = [
            request_for(whole) | {"prompt": prompt, "max_new_tokens": limit}
            for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
        ]
        want = [whole.generate(**request, **PLAIN).tokens for request in asked]
        prompts = [set(map(int, whole.bundle.tokenizer.encode(prompt))) for prompt in PROMPTS]
    said = next(token for token in want[1][3:-1] if not any(token in want[n] for n in (0, 2, 3, 4)))
    asks = min(prompts[2].difference(*want, *prompts[:2], *prompts[3:]))
    for victim, token in ((1, said), (2, asks)):
        with Session.load(without_token(bundle, tmp_path / f"{victim}", token), max_batch=3) as session:
            for name, options in WAYS.items():
                requests = [request | options for request in asked]
                outcomes = dict(session.generate_many(requests))
                assert sorted(outcomes) == [0, 1, 2, 3, 4]
                for number, outcome in outcomes.items():
                    if name == "imitation, confidence":  # what it drafts depends on who drafts beside it
                        continue
                    if name in ("plain", "prompt lookup", "controller"):
                        assert isinstance(outcome, NumericsError) == (number == victim), (name, number)
                        assert number == victim or outcome.tokens == want[number], (name, number)
                        continue
                    try:  # other tokens, or drafts that propose the damaged one: what each request meets alone
                        alone = session.generate(**requests[number]).tokens
                    except NumericsError as error:
                        assert str(outcome) == str(error), (name, number)
                    else:
                        assert outcome.tokens == alone, (name, number)
                if name == "plain":
                    with pytest.raises(NumericsError, match=rf"requests\[{victim}\]: graph head gave logits"):
                        session.generate_batch(requests)
                assert session.generate(**asked[0], **PLAIN).tokens == want[0], "the session is whole"


def test_batch_padding_affects_no_other_token(tiny_bundle: Callable, tmp_path: Path) -> None:
    """Sequences that draft less than the widest of a batch are padded: not with a token that nobody asked for."""
    bundle = tiny_bundle("t5").path
    with Session.load(bundle) as whole:
        draft = {"draft": "prompt-lookup", "draft_length": 5, "max_new_tokens": 12}
        asked = [request_for(whole) | {"prompt": "the robot"} | PLAIN, request_for(whole) | draft]
        want = [whole.generate(**request).tokens for request in asked]
        assert whole.generate(**asked[1]).stats.proposed > 0
    assert not any(0 in tokens for tokens in want)
    with Session.load(without_token(bundle, tmp_path / "bundle", 0), max_batch=2) as session:
        assert [session.generate(**request).tokens for request in asked[:1]] == want[:1]
        assert [result.tokens for result in session.generate_batch(asked)] == want
