"""Bundles of float16 on an engine that computes them as they are: narrow weights, rows and caches, float32 islands.

No such engine runs on a CPU in earnest; here ONNX Runtime computes the source form of the graphs behind the recording
device, which checks every address, dtype and alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.drafts.adversarial import always_wrong
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.session.session import Session

from tests.support.engines.recording_device import GrowingDevice, RecordingDevice
from tests.support.oracle import Oracle
from tests.support.rig import Rig
from tests.support.tiny_bundles import IN_FLOAT16, TinyBundle

NAMES = ("t5-float16", "llama-float16")
TOKENS = 40
ULPS = 8
"""Plain decoding is undecided where its two best logits are this many steps of float16 apart; another width adds up in
another order, and rounds after each layer."""


FAR, SAME, MARGIN, REQUESTS = 1e-2, 0.999, 0.05, 70
"""What float16 may cost: a part of the largest logit, and the share of tokens that stay where the two best logits of float32
are further apart than the margin."""


class AsStored(OnnxRuntimeCpu):
    """ONNX Runtime on the graphs that other engines take: it rounds to float16 between operators."""

    name = "as-stored"

    def __init__(self, folder: Path, manifest: Any) -> None:
        super().__init__(folder, manifest)
        self.graphs, self.note = manifest.graphs, None


@pytest.fixture(scope="module", params=NAMES)
def tiny(tiny_bundle: Callable[..., TinyBundle], request: pytest.FixtureRequest) -> TinyBundle:
    return tiny_bundle(request.param)


@pytest.fixture(params=[RecordingDevice, GrowingDevice])
def session(tiny: TinyBundle, request: pytest.FixtureRequest) -> Iterator[Session]:
    manifest = tiny.bundle.manifest
    device = request.param(manifest, AsStored(tiny.path, manifest))
    with closing(
        Session(tiny.bundle, Decoder(device, manifest, tiny.bundle.tensor, max_batch=4), None)
    ) as made:
        yield made


def requests(tiny: TinyBundle, count: int) -> list[dict[str, Any]]:
    words = ["the", "red", "cup", "and", "a", "small", "robot", "arm", "on", "table"]
    sizes = [(40 + 7 * i, 60, 3) for i in range(count)]
    pictures = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    prompts = [" ".join(words[i:] + words[:i]) for i in range(count)]
    has_image = tiny.bundle.manifest.image is not None
    return [
        {"prompt": p, **({"image": i} if has_image else {})} for p, i in zip(prompts, pictures, strict=True)
    ]


def test_bound_buffers_are_narrow(session: Session) -> None:
    engine, manifest = session.decoder.engine, session.bundle.manifest
    assert engine.dtype("segment.0", "key_cache.0") == manifest.cache_dtype == "float16"
    assert engine.dtype("embed", "embedding_table") == "float16"
    assert session.decoder.dtype == manifest.compute_dtype
    item = 2 * 2 * manifest.decoder.num_kv_heads * manifest.decoder.head_dim * manifest.decoder.num_layers
    assert session.decoder.arena.nbytes == 4 * session.decoder.arena.capacity * item
    assert session.note is None


def test_speculative_tokens_are_those_of_plain_decoding(tiny: TinyBundle, session: Session) -> None:
    asked, drafts = requests(tiny, 3), [draft.name for draft in tiny.bundle.manifest.drafts]
    plain, rounding = [], []
    for request in asked:
        result = session.generate(**request, max_new_tokens=TOKENS, speculative=False, ignore_eos=True)
        assert len(set(result.tokens)) > 8
        plain.append(result.tokens)
    for draft in [*drafts, f"{drafts[0]} (wrong)"]:
        name, _, wrong = draft.partition(" ")
        with always_wrong(session, name) if wrong else nullcontext():
            for request, expected in zip(asked, plain, strict=True):
                found = session.generate(**request, max_new_tokens=TOKENS, draft=name, ignore_eos=True).tokens
                if found != expected:
                    rounding.append(_undecided(session, request, found, expected))
    assert len(rounding) <= 2, f"{len(rounding)} of {3 * (len(drafts) + 1)} requests met a near-tie"


def _undecided(session: Session, request: dict[str, Any], found: list[int], expected: list[int]) -> int:
    """Where plain decoding left a near-tie; asserts that it did."""
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    session.generate(**request, max_new_tokens=at + 1, speculative=False, ignore_eos=True)
    second, best = np.partition(session.decoder.heads.last_logits(), -2)[-2:]
    assert best - second <= ULPS * np.spacing(np.float16(abs(best))), f"token {at}: {best - second} apart"
    return at


def test_a_batch_gives_the_same_tokens(tiny: TinyBundle, session: Session) -> None:
    asked = [
        dict(request, max_new_tokens=12 + i, ignore_eos=True) for i, request in enumerate(requests(tiny, 5))
    ]
    for request, result in zip(asked, session.generate_batch(asked), strict=True):
        expected = session.generate(**request, speculative=False).tokens
        if result.tokens != expected:
            _undecided(
                session,
                {k: request[k] for k in request.keys() & {"image", "prompt"}},
                result.tokens,
                expected,
            )


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(f"{name}-float16", marks=pytest.mark.slow) for name in IN_FLOAT16)]
)
def test_logits_are_those_of_float32_but_for_rounding(
    tiny_bundle: Callable[..., TinyBundle], oracle_for: Callable[[str], Oracle], name: str
) -> None:
    tiny = tiny_bundle(name)
    rig = Rig(tiny, "onnxruntime", oracle_for(tiny.name))
    manifest = tiny.bundle.manifest
    narrow = Rig(tiny, "onnxruntime", oracle_for(tiny.name))
    narrow.engine = RecordingDevice(manifest, AsStored(tiny.path, manifest))
    narrow.fresh()
    far, tested, agreed = 0.0, 0, 0
    for seed in range(REQUESTS):
        request = rig.request(seed)
        tokens = np.random.default_rng(seed).integers(3, manifest.text.vocab_size - 4, 16).tolist()
        found = []
        for each in (rig, narrow):
            each.start(request)
            found.append(each.chain(tokens))
        wide, rounded = found
        far = max(far, float(np.abs(wide - rounded).max() / np.abs(wide).max()))
        second, best = np.partition(wide, -2, axis=-1)[:, -2:].T
        clear = best - second > MARGIN
        tested += int(clear.sum())
        agreed += int((wide.argmax(-1) == rounded.argmax(-1))[clear].sum())
    print(
        f"{name}: {100 * far:.2f} % of the largest logit, {tested - agreed} of {tested} clear tokens differ"
    )
    assert 0 < far <= FAR
    assert tested > 500 and agreed >= SAME * tested, f"{tested - agreed} of {tested} other tokens"
