"""Losslessness as a table: drafts × engines × families; the whole grid on ONNX Runtime, its corners elsewhere.

One test has every combination in every run, the others each family, engine and draft; `make test-all` has the product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoProcessor
from vlmexport.runtime.session.session import Session

from tests.support import lossless
from tests.support.oracle import Oracle, Request
from tests.support.pairs import each_value, fast
from tests.support.rig import ENGINES, FAMILIES, Rig
from tests.support.tiny_bundles import TinyBundle

WHOLE = {"seeds": (41, 42), "lengths": lossless.LENGTHS, "limits": lossless.LIMITS}
CORNERS = {"seeds": (43,), "lengths": (1, 5, 16), "limits": (2, 24)}
GRID = {"onnxruntime": WHOLE}


def there(case: dict[str, Any]) -> bool:
    """Whether there is the draft of a case for its family."""
    family, draft = case["family"], case["draft"]
    return lossless.runs_on(case.get("engine", ""), draft) and lossless.fits(
        lossless.bundle_of(family, draft), draft
    )


SIDE_BY_SIDE = [*itertools.product(FAMILIES, ENGINES, ("mixed", "imitation-attending"))]
ATTENDING = ("t5", "llama", "qwen2.5-vl", "lfm2")
"""Families whose network with attention has its rows in every run: cross-attention, positions by slot and by section, and
layers without attention. It is in a bundle of its own, with two cuts."""


@fast(
    ("family", "engine", "draft"),
    SIDE_BY_SIDE,
    {(family, engine, "mixed") for family, engine in itertools.product(FAMILIES, ENGINES)}
    | {
        (ATTENDING[number % len(ATTENDING)], engine, "imitation-attending")
        for number, engine in enumerate(ENGINES)
    },
)
def test_every_draft_on_every_engine(rigs: Callable, family: str, engine: str, draft: str) -> None:
    """All drafts of a bundle side by side in a batch: in every run each family × engine has this row."""
    lossless.batch(rigs(lossless.bundle_of(family, draft), engine), draft, 3, 7)


@each_value(there, family=FAMILIES, engine=ENGINES, draft=lossless.DRAFTS)
def test_greedy_equals_generate(rigs: Callable, family: str, engine: str, draft: str) -> None:
    rig = rigs(lossless.bundle_of(family, draft), engine)
    lossless.greedy(rig, draft, **GRID.get(engine, CORNERS))


@each_value(there, family=FAMILIES, engine=ENGINES, draft=lossless.GRAMMAR_DRAFTS, together=(1, 3))
def test_a_grammar_bars_the_same_tokens_with_every_draft(
    rigs: Callable, family: str, engine: str, draft: str, together: int
) -> None:
    lossless.in_a_grammar(rigs(lossless.bundle_of(family, draft), engine), draft, together)


@each_value(there, family=FAMILIES, engine=ENGINES, draft=lossless.DRAFTS)
def test_end_token(rigs: Callable, family: str, engine: str, draft: str) -> None:
    some = engine == "onnxruntime"
    rig = rigs(lossless.bundle_of(family, draft), engine)
    lossless.early_end(rig, draft, 44, (1, 3, 8) if some else (5,), (0, 1, 2, 5, 11) if some else (3,))


@each_value(there, family=FAMILIES, draft=lossless.DRAFTS, length=(1, 4, 16))
def test_sampling_equals_plain_sampling(rigs: Callable, family: str, draft: str, length: int) -> None:
    rig = rigs(lossless.bundle_of(family, draft), "onnxruntime")
    lossless.sampled(rig, draft, (1, 2**63 - 1), (length,))


@each_value(
    there, family=FAMILIES, engine=ENGINES, draft=[*lossless.DRAFTS, *lossless.MIXED], together=(3, 16)
)
def test_batch_equals_generate(rigs: Callable, family: str, engine: str, draft: str, together: int) -> None:
    """Ragged prompts, limits, end tokens, lengths, seeds and drafts, more requests than are decoded together."""
    rig = rigs(lossless.bundle_of(family, draft), engine)
    lossless.batch(rig, draft, together, 20 if engine == "onnxruntime" and together == 16 else 7)


def test_rows_move_by_calls_bound_once(rigs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings of every layer's cache take longer than the move; where caches lie elsewhere they are made anew."""
    rig: Rig = rigs("llama", "onnxruntime")
    request = rig.request(46)
    truth = rig.oracle.greedy(request, 60)
    bound: list[tuple[int, ...]] = []
    bind = rig.engine.bind

    def counted(graph: str, inputs: Any, outputs: Any) -> Any:
        if graph == "commit":
            caches = next(view for name, view in inputs.items() if name.startswith("key_cache"))
            bound.append((*inputs["source_rows"].shape, caches.shape[2]))
        return bind(graph, inputs, outputs)

    monkeypatch.setattr(rig.engine, "bind", counted)
    for _ in range(2):  # the second request finds the first one's calls, or other caches
        run = lossless.generate(rig, request, 60, proposer=lossless.DRAFTS["tree"](rig, truth), length=6)
        assert run.tokens == truth
        assert run.stats.cycles > len(bound) > 0
    assert len(bound) <= 2 * len(set(bound)), f"widths and lengths of caches, bound: {bound}"


@each_value(
    there,
    groups=[("draft", "shape"), ("end", "together", "temperature")],
    family=FAMILIES,
    draft=lossless.MATRIX_DRAFTS,
    shape=lossless.SHAPES,
    end=("eos", "limit", "stop"),
    together=(1, 3, 16),
    temperature=(0.0, 1.0),
)
def test_the_matrix(
    rigs: Callable,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    draft: str,
    shape: str,
    end: str,
    together: int,
    temperature: float,
) -> None:
    """Drafts × shapes × families × ends × batches × temperatures: in every run all drafts × shapes and all ends × batches ×
    temperatures, the product in `make test-all`."""
    rig = rigs(lossless.bundle_of(family, draft), "onnxruntime")
    monkeypatch.setattr(rig.manifest.limits, "max_width", 32)
    lossless.matrix(rig.fresh(), draft, shape, end, together, temperature)


@each_value(
    there,
    family=FAMILIES,
    engine=ENGINES,
    draft=("early-exit", "imitation-attending", "prompt-lookup", "eagle", "vispec", "tree"),
)
def test_non_finite_sequence_fails_alone(rigs: Callable, family: str, engine: str, draft: str) -> None:
    lossless.one_ends(rigs(lossless.bundle_of(family, draft), engine), draft)


@each_value(family=FAMILIES, threshold=(0.0, 0.3, 1.0))
def test_confidence_threshold(rigs: Callable, family: str, threshold: float) -> None:
    rig = rigs(family, "onnxruntime")
    request = rig.request(45)
    proposer = lossless.DRAFTS["early-exit"](rig, ())
    run = lossless.generate(rig, request, 30, proposer=proposer, length=8, threshold=threshold)
    assert run.tokens == rig.oracle.greedy(request, 30)


@pytest.mark.parametrize("name", ("t5-two-cuts", "llama-two-cuts", "llama-tied"))
def test_every_draft_of_a_bundle(rigs: Callable, name: str) -> None:
    rig = rigs(name, "onnxruntime")
    request = rig.request(46)
    truth = rig.oracle.greedy(request, 30)
    for draft in rig.manifest.drafts:
        proposer = lossless.proposers.create(draft, rig.decoder)
        run = lossless.generate(rig, request, 30, proposer=proposer, length=4)
        assert run.tokens == truth, draft.name


def test_the_token_with_id_0_is_real(rigs: Callable) -> None:
    """Id 0 is often right in the Llama bundle, so that treating it as padding would show (tests/support/tiny_models.py)."""
    rig = rigs("llama", "onnxruntime")
    lossless.greedy(rig, "tree", (41, 42, 47), (4, 6, 9), (40,))
    assert sum(rig.oracle.greedy(rig.request(seed), 40).count(0) for seed in (41, 42, 47)) >= 5


def test_a_prompt_fills_a_session_of_small_width(
    tiny_bundle: Callable[..., TinyBundle], oracle_for: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill widths are rounded up, but not beyond the buffers: 299 rows of 299, and 4 to verify in."""
    bundle = tiny_bundle("llama").bundle
    monkeypatch.setattr(bundle.manifest.limits, "max_width", 4)
    monkeypatch.setattr(bundle.manifest.limits, "max_length", 299)
    request = Request(tuple(3 + i * i % 200 for i in range(299)))
    with Session.load(bundle) as session:
        result = session.generate_tokens(request.token_ids)
    assert tuple(result.tokens) == oracle_for("llama").greedy(request, 1)


def test_session_captions_as_transformers_does(
    tiny_bundle: Callable[..., TinyBundle], oracle_for: Callable
) -> None:
    """From pixels and text to text, through the public interface."""
    tiny = tiny_bundle("t5")
    oracle: Oracle = oracle_for("t5")
    processor = AutoProcessor.from_pretrained(tiny.checkpoint, backend="pil")
    with Session.load(tiny.path) as session:
        for seed, prompt in (
            (1, "describe the scene"),
            (2, "what is on the table"),
            (3, "how many red cups"),
        ):
            image = lossless.image_array(seed)
            inputs = processor(images=image, text=prompt, return_tensors="pt")
            with torch.inference_mode():
                want = oracle.model.generate(**inputs, do_sample=False, max_new_tokens=30)[0].tolist()[1:]
            for draft in ("none", "imitation", "early-exit"):
                result = session.generate(image, prompt, max_new_tokens=30, draft=draft, draft_length=4)
                assert result.tokens == want, (prompt, draft)
                assert result.text == processor.tokenizer.decode(want, skip_special_tokens=True)


def test_session_continues_text_as_transformers_does(
    tiny_bundle: Callable[..., TinyBundle], oracle_for: Callable
) -> None:
    tiny = tiny_bundle("llama")
    oracle: Oracle = oracle_for("llama")
    with Session.load(tiny.path) as session:
        ids = [11, 70, 200, 41, 5]
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            out = oracle.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=40
            )
        for draft in ("none", "imitation", "early-exit"):
            result = session.generate_tokens(ids, max_new_tokens=40, draft=draft, draft_length=5)
            assert result.tokens == out[0].tolist()[len(ids) :]
