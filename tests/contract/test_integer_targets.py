"""Integer weights of targets, int8 and int4, as precisions of the suite: parity, fused products, and with every draft the
tokens of plain decoding, with no allowance. With the integers as floats every row of the table compares with transformers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.families.common.matrices import round_weights
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity import check_parity
from vlmexport.exporter.parity.certificate import certify
from vlmexport.exporter.parity.losslessness import sample_requests
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.drafts.adversarial import always_wrong
from vlmexport.runtime.engines.onnxruntime import session_options

from tests.support import lossless
from tests.support.pairs import fast
from tests.support.rig import FLOAT_WEIGHTS, Rig
from tests.support.rows import ROWS
from tests.support.tiny_bundles import BUNDLES, CUT_TWICE, KINDS, WITH_INTEGERS, TinyBundle

FAMILIES = [f"{name}-weights-{kind}" for name in WITH_INTEGERS for kind in KINDS]
TWO_CUTS = [f"{name}-weights-{kind}-two-cuts" for name in CUT_TWICE for kind in KINDS]
ALL = [name for name in BUNDLES if BUNDLES[name].weights is not None]
EVERY_RUN = ("t5-weights-int4", "llama-weights-int8")
"""Bundles of every run, one of each kind and with and without an encoder: what planted errors need."""

CUT_IN_EVERY_RUN = "llama-weights-int4-two-cuts"
COLUMNS = ("onnxruntime", "device", "growing-device", "narrow-rounding", "narrow-rounding-device")
CHAINS = [name for name in lossless.DRAFTS if name not in lossless.SCRIPTED_TREES]
PENALTY = 1.4


def in_every_run(*names: str, all_names: Sequence[str] = ALL) -> pytest.MarkDecorator:
    """All bundles; others than `names` are slow."""
    return fast(("name",), [(name,) for name in all_names], {(name,) for name in names})


def there(name: str, draft: str) -> bool:
    """Whether the bundle has the draft."""
    return lossless.fits(name, draft) and BUNDLES[name].precision == "float32"


BY_BUNDLE = [(name, draft) for name in ALL for draft in CHAINS if there(name, draft)]
DRAFTED = [
    (name, column, draft)
    for turn, (name, draft) in enumerate(BY_BUNDLE)
    for column in (COLUMNS[0], COLUMNS[1 + turn % (len(COLUMNS) - 1)])
]
"""Every draft of every bundle on ONNX Runtime, and on the other engines in turn."""

DRAFTED_ONCE = {
    DRAFTED[2 * place + turn % 2]
    for turn, place in enumerate(
        place for place, (name, _) in enumerate(BY_BUNDLE) if name in (*EVERY_RUN, CUT_IN_EVERY_RUN)
    )
}
"""Every draft of these bundles once."""


def test_the_table_has_every_family_with_both_kinds() -> None:
    assert {BUNDLES[name].weights for name in ALL} == set(KINDS)
    assert set(FAMILIES) | set(TWO_CUTS) < set(ALL)
    assert {column for _, column, _ in DRAFTED_ONCE} == set(COLUMNS)


# --- what is built ---


@in_every_run("llama-weights-int8")
def test_parity(tiny_bundle: Callable[[str], TinyBundle], name: str) -> None:
    """Every graph, and a generation, as a build compares them, at the limits of floats."""
    tiny = tiny_bundle(name)
    checkpoint = open_checkpoint(str(tiny.checkpoint))
    round_weights(checkpoint, family_for(checkpoint), BUNDLES[name].weights, 32)
    layers = tiny.bundle.manifest.decoder.num_layers
    drafts = [draft.fitted(layers) for draft in (*tiny.drafts().values(), open_draft(tiny.skipping))]
    compared = {row["graph"] for row in check_parity(tiny.path, checkpoint, drafts=drafts)}
    manifest = tiny.bundle.manifest
    of_drafts = {graph for draft in manifest.drafts for graph in draft.graphs.values()}
    assert compared >= {*manifest.segments, "head", "embed", "generation", *of_drafts}


def optimized(file: Path, folder: Path) -> onnx.GraphProto:
    """What ONNX Runtime makes of a graph."""
    options = session_options(pooled=False)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath, load_external_data=False).graph


def float_products(graph: onnx.GraphProto) -> list[str]:
    """Weights of a loaded graph that products read as floats."""
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    products = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm")
    read = [name for node in graph.node if node.op_type in products for name in node.input]
    return [name for name in read if name in matrices]


@in_every_run(*EVERY_RUN, "blip2-opt-weights-int4")
def test_every_product_is_fused(tiny_bundle: Callable[[str], TinyBundle], tmp_path: Path, name: str) -> None:
    """Plain, folded, and those that compute in float32: one kernel reads the integers of each matrix, and none is floats.
    (OPT multiplies matrices of rank 2 with a bias and a ReLU; heads of Medusa read one table.)"""
    tiny = tiny_bundle(name)
    tied = tiny.bundle.manifest.tensors.get("embedding_scales") is not None
    graphs, forms = as_float32(tiny.bundle.manifest).graphs, 0
    for info in graphs.values():
        for file in filter(None, (info.file, info.folded)):
            forms += 1
            source = onnx.load(str(tiny.path / file), load_external_data=False).graph
            wanted = sum(node.op_type == "DequantizeLinear" for node in source.node)
            loaded = optimized(tiny.path / file, tmp_path)
            counts = Counter(node.op_type for node in loaded.node)
            assert (counts["MatMulNBits"], counts["DequantizeLinear"]) == (wanted, 0), (file, counts)
            assert bool(wanted) == bool(info.integers), file
            floats = [weight for weight in float_products(loaded) if not weight.startswith("draft.")]
            assert not floats or info.role == "vision", f"{file}: {floats} are no integers"
    language = family_for(open_checkpoint(str(tiny.checkpoint))).language
    assert tied == (language.head.names == language.embedding.names), "a tied table has the head's integers"
    assert forms == len(graphs) + sum(info.folded is not None for info in graphs.values())
    of_target = [*tiny.bundle.manifest.segments, "head", *({"encoder", "cross_kv"} & graphs.keys())]
    assert all(graphs[graph].integers for graph in of_target)


@in_every_run(*EVERY_RUN, all_names=[*FAMILIES, *TWO_CUTS])
def test_plain_tokens_are_those_of_generate(rigs: Callable, name: str) -> None:
    """Of transformers, on matrices that were rounded and made floats again: the engine does the same."""
    rig: Rig = rigs(name, FLOAT_WEIGHTS)
    for seed in (41, 42, 43):
        request = rig.request(seed, 5 + seed % 7)
        tokens = lossless.generate(rig, request, 30).tokens
        assert tokens == rig.oracle.greedy(request, 30) and len(set(tokens)) > 3


ON_TWO_CUTS = ("eagle3", "imitation_attends", "two_cut_points")
"""Rows that ask for a family's bundle with two cuts."""

ROW_CASES = [
    (name, row)
    for name in FAMILIES
    for row in ROWS
    # Behind the last position caches have slots for the rows that pad a pass.
    if row != "last_positions" and (row not in ON_TWO_CUTS or f"{name}-two-cuts" in TWO_CUTS)
]
ROWS_ONCE = {
    (EVERY_RUN[turn % len(EVERY_RUN)], row)
    for turn, row in enumerate(
        ("prefill", "chain", "trunk_and_tail", "drafts", "ragged_batch", "padded_width")
    )
}


@fast(("family", "row"), ROW_CASES, ROWS_ONCE)
def test_rows_of_the_table(rigs: Callable, family: str, row: str) -> None:
    """With the integers as floats, a decoder on these bundles gets right what it does on bundles of floats."""
    ROWS[row](lambda bundle: rigs(bundle, FLOAT_WEIGHTS), family)


# --- tokens ---


@fast(("name", "column", "draft"), DRAFTED, DRAFTED_ONCE)
def test_drafts_change_no_token(rigs: Callable, name: str, column: str, draft: str) -> None:
    rig = rigs(name, column)
    longest = rig.manifest.limits.max_width - 1
    lossless.greedy(rig, draft, (41, 42), (1, 3, longest), (24,))
    rig.settle()


@fast(
    ("name", "column", "together"),
    [*itertools.product([name for name in ALL if there(name, "mixed")], COLUMNS, (1, 3))],
    {(EVERY_RUN[0], "onnxruntime", 3), (EVERY_RUN[1], "device", 3), (CUT_IN_EVERY_RUN, "narrow-rounding", 3)},
)
def test_batches_change_no_token(rigs: Callable, name: str, column: str, together: int) -> None:
    """All drafts of a bundle side by side, ragged prompts, ends and lengths; some requests are sampled."""
    rig = rigs(name, column)
    lossless.batch(rig, "mixed", together, 7)
    rig.settle()


@fast(
    ("name", "draft"),
    [(name, draft) for name in FAMILIES for draft in CHAINS if there(name, draft)],
    {(EVERY_RUN[0], "imitation"), (EVERY_RUN[1], "medusa")},
)
def test_sampled_tokens_are_those_of_plain_sampling(rigs: Callable, name: str, draft: str) -> None:
    lossless.sampled(rigs(name, "onnxruntime"), draft, (1,), (4,))


@fast(
    ("name", "draft"),
    [(name, draft) for name in FAMILIES for draft in CHAINS if there(name, draft)],
    {(EVERY_RUN[0], "early-exit"), (EVERY_RUN[1], "eagle"), (EVERY_RUN[1], "often-right")},
)
def test_a_penalty_changes_plain_and_drafted_tokens_alike(rigs: Callable, name: str, draft: str) -> None:
    rig = rigs(name, "onnxruntime")
    asked = GenerationInfo(repetition_penalty=PENALTY)
    for request in map(rig.request, (44, 45, 46)):  # not every random model says a token again within 24
        plain = lossless.generate(rig, request, 24, asked=asked).tokens
        if plain != rig.oracle.greedy(request, 24):
            break
    else:
        raise AssertionError("the penalty does nothing")
    for length in (1, 3, 8):
        proposer = lossless.DRAFTS[draft](rig, plain)
        run = lossless.generate(rig, request, 24, proposer=proposer, length=length, asked=asked)
        assert run.tokens == plain, f"d = {length}"


@in_every_run("llama-weights-int8")
def test_a_certificate_says_so(tiny_bundle: Callable[[str], TinyBundle], name: str) -> None:
    """From text and pictures, through the public interface: every draft, chains of all lengths, always-wrong ones."""
    certificate = certify(tiny_bundle(name).bundle, 2, 24)
    assert certificate is not None and certificate.first is None and certificate.different == 0
    assert certificate.ways > 12 and certificate.tokens > 12 * 24


@in_every_run("llama-weights-int8")
def test_sessions(tiny_bundle: Callable[[str], TinyBundle], name: str) -> None:
    """Requests of a batch get what each gets alone and plainly, greedy or with a penalty, with drafts and with wrong ones."""
    bundle = tiny_bundle(name).bundle
    drafts = [draft.name for draft in bundle.manifest.drafts]
    prompts = list(sample_requests(bundle.manifest, len(drafts), ()))
    requests: list[dict[str, Any]] = [
        {"image": image, "prompt": prompt, "max_new_tokens": 8 + 3 * number, "ignore_eos": True}
        | ({"repetition_penalty": PENALTY} if number % 2 else {})
        for number, (image, prompt) in enumerate(prompts)
    ]
    with Session.load(bundle) as session:
        plain = [session.generate(**request, draft="none").tokens for request in requests]
    with Session.load(bundle, max_batch=3) as session:
        for wrong in (False, True):
            with always_wrong(session, drafts[0]) if wrong else nullcontext():
                drafting = [
                    request | {"draft": draft, "draft_length": 3}
                    for request, draft in zip(requests, drafts, strict=True)
                ]
                together = session.generate_batch(drafting)
                assert [result.tokens for result in together] == plain
                assert [session.generate(**request).tokens for request in drafting] == plain
