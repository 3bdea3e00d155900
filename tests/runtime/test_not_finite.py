"""One NaN or infinity in a weight ends a request with an error that names the graph, on every way to a token."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.checksum import manifest_text
from vlmexport.runtime.errors import NumericsError
from vlmexport.runtime.session import Session

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
    "prompt lookup": {"draft": "prompt-lookup", "draft_length": 3},
    "controller": {},
}
GRAPHS = {
    "t5": ["vision", "encoder", "cross_kv", "segment.0", "segment.1", "head", "imitation.1"],
    "llama": ["segment.0", "segment.1", "head", "imitation.1"],
}
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
    content = bytearray((path / "weights.bin").read_bytes())
    offset = int(place["offset"])
    content[offset : offset + 4] = np.float32(value).tobytes()
    (path / "weights.bin").write_bytes(content)
    document["files"]["weights.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(manifest_text(document), "utf-8")
    return path


def request_for(session: Session) -> dict[str, Any]:
    image = session.bundle.manifest.image
    request: dict[str, Any] = {"prompt": "a red cup a red cup", "max_new_tokens": 12, "ignore_eos": True}
    if image is not None:
        pixels = np.random.default_rng(0).integers(0, 255, (image.height, image.width, 3), np.uint8)
        request["image"] = pixels
    return request


@pytest.mark.parametrize(("family", "graph", "value"), CASES)
def test_a_weight_that_is_not_finite_ends_every_request(
    tiny_bundle: Callable, tmp_path: Path, family: str, graph: str, value: float
) -> None:
    path = damaged(tiny_bundle(family).path, tmp_path / "bundle", graph, value)
    with Session.load(path, max_batch=2, check="sha256") as session:
        request = request_for(session)
        for name, options in WAYS.items():
            drafts = graph != "imitation.1" or name.startswith("imitation")
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
                    assert graph != "imitation.1" or "graph imitation.1 " in str(caught.value), name
                elif name != "controller":  # which may draft with the damaged network, or not
                    assert serve(), name


@pytest.mark.parametrize("family", GRAPHS)
def test_what_one_request_left_does_not_end_the_next(tiny_bundle: Callable, family: str) -> None:
    """A request whose keys and values left the range ends; a session that serves another afterwards is whole."""
    with Session.load(tiny_bundle(family).path) as session:
        request = request_for(session) | PLAIN
        want = session.generate(**request).tokens
        stream, decoder = session.stream(**request | {"max_new_tokens": 40}), session.decoder
        with pytest.raises(NumericsError):
            for _ in stream:
                for view in decoder.arena.view(0):
                    decoder.engine.read(view)[0, :, 0] = np.nan
        assert session.generate(**request).tokens == want
