"""A least width: on an engine whose numbers differ in passes of few rows, speculative decoding gives what plain decoding
gives, because every pass is padded up to the width that the probe finds, and none is capped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.stored_costs import stored_least_width
from vlmexport.runtime.bundle.target_weights import TargetWeights
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder import masks
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.forward_passes import ForwardPasses
from vlmexport.runtime.decoder.least_width import probe_least_width
from vlmexport.runtime.measure.benchmark import measured_costs
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.session.widths import kernels_of, open_decoder
from vlmexport.runtime.speedup.cost_model import CostTable, Curve
from vlmexport.runtime.tuning.survey import budgets

from tests.support.engines.narrow_rounding import NarrowRounding
from tests.support.engines.recording_device import GrowingDevice, RecordingDevice
from tests.support.foreseen import LONG, WAYS, foreseen, plainly, prompt
from tests.support.pairs import each_value
from tests.support.tiny_bundles import TinyBundle
from tests.support.unpadded import unpadded

FAMILIES = ("t5-two-cuts", "llama-two-cuts", "qwen2.5-vl")
"""Relative bias and cross-attention, rotary and two cuts, positions with axes."""

DEVICES = {"device": RecordingDevice, "growing-device": GrowingDevice}
COLUMNS = ("cpu", *DEVICES)
LEAST = 3
"""Of the engine: wider than the pass of a plain token, narrower than drafted ones."""


def quantized(tiny: TinyBundle) -> Bundle:
    """The bundle as one whose matrices are integers."""
    bundle = copy(tiny.bundle)
    bundle.manifest = replace(bundle.manifest, target_weights=TargetWeights(dtype="int4", block=32))
    return bundle


@contextmanager
def opened(
    tiny: TinyBundle,
    column: str = "cpu",
    batch: int = 1,
    probe: bool = True,
    least: int = LEAST,
    way: str = "",
) -> Iterator[Session]:
    """`way` "tree": a bundle of floats, which alone verifies trees, with the width that the probe found of integers."""
    bundle = quantized(tiny)
    engine: Any = NarrowRounding(tiny.path, bundle.manifest, least=least)
    if column in DEVICES:
        engine = DEVICES[column](bundle.manifest, engine)
    if way == "tree":
        bundle = tiny.bundle
        decoder = Decoder(engine, bundle.manifest, bundle.tensor, max_batch=batch)
        if probe:
            decoder.set_least_width(probe_least_width(decoder) or 0)
    elif probe:
        bundle, decoder = open_decoder(bundle, engine, None, batch)
    else:
        decoder = Decoder(engine, bundle.manifest, bundle.tensor, max_batch=batch)
    assert not probe or decoder.passes.least_width >= least
    with Session(bundle, decoder, None) as session:
        yield session
        if column in DEVICES:
            engine.settle()


# --- the probe ---


@pytest.mark.parametrize(("least", "found"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, None), (99, None)])
def test_probe(tiny_bundle: Callable[[str], TinyBundle], least: int, found: int | None) -> None:
    bundle = quantized(tiny_bundle("llama-two-cuts"))
    engine = NarrowRounding(bundle.path, bundle.manifest, least=least)
    assert probe_least_width(Decoder(engine, bundle.manifest, bundle.tensor)) == found


def test_probe_sees_the_head_and_batches(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    tiny = tiny_bundle("llama-two-cuts")
    manifest = quantized(tiny).manifest

    def probed(least: int, least_rows: int, batch: int) -> int | None:
        engine = NarrowRounding(tiny.path, manifest, least=least, least_rows=least_rows)
        decoder = Decoder(engine, manifest, tiny.bundle.tensor, max_batch=batch)
        found = probe_least_width(decoder)
        assert decoder.passes.least_width == 1 and decoder.arena.length == 0, "nothing is left behind"
        return found

    assert probed(1, 4, 1) == 4
    assert probed(2, 1, 3) == 2
    assert probed(1, 1, 3) == 1


def test_without_a_least_width_every_pass_is_as_wide_as_the_widest(
    tiny_bundle: Callable[[str], TinyBundle],
) -> None:
    tiny = tiny_bundle("llama")
    bundle = quantized(tiny)
    engine = NarrowRounding(tiny.path, bundle.manifest, least=bundle.manifest.limits.max_width)
    bundle, decoder = open_decoder(bundle, engine, None, 1)
    widest = bundle.manifest.limits.max_width
    assert (bundle.manifest.verify_width, decoder.passes.least_width) == (widest, 1)
    with Session(bundle, decoder, None) as session:
        assert f"every pass has {widest} rows" in str(session.note)
        plain = plainly(session, prompt())
        assert foreseen(session, "all segments", plain, prompt()) == plain


def test_float_bundles_are_not_probed(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    tiny = tiny_bundle("llama")
    _, decoder = open_decoder(tiny.bundle, NarrowRounding(tiny.path, tiny.bundle.manifest), None, 1)
    assert decoder.passes.least_width == 1
    limits = tiny.bundle.manifest.limits
    assert decoder.arena.capacity == limits.max_length + limits.max_width


def test_pass_times_are_stored_with_it(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    table = CostTable(Curve({1: 1.0}))
    with opened(tiny_bundle("llama")) as session:
        session.decoder.engine.threads = session.threads = 1
        entry = measured_costs(session, table, 64)
        assert (entry.least_width, entry.kernels) == (LEAST, f"narrow-rounding {ort.__version__}")
        manifest = replace(session.bundle.manifest, costs=[entry.to_json()])
        assert stored_least_width(manifest, entry.machine, 1, kernels_of(session.decoder.engine)) == LEAST
    with opened(tiny_bundle("llama"), batch=2) as session:
        assert measured_costs(session, table, 64).least_width is None, "of one sequence alone"


def test_what_is_stored_is_taken(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    tiny = tiny_bundle("llama")
    bundle = quantized(tiny)
    engine = NarrowRounding(tiny.path, bundle.manifest, least=4)
    entry = {
        "machine": engine.machine, "threads": 1, "plain": {"1": 1.0}, "least_width": 2, "kernels": kernels_of(engine),
    }  # fmt: skip
    bundle.manifest = replace(bundle.manifest, costs=[entry])
    assert open_decoder(bundle, engine, None, 1)[1].passes.least_width == 2
    assert open_decoder(bundle, engine, None, 2)[1].passes.least_width == 4, "it is of one sequence"
    for change in ({"kernels": "narrow-rounding 0"}, {"threads": 3}, {"machine": "another"}):
        bundle.manifest = replace(bundle.manifest, costs=[{**entry, **change}])
        assert stored_least_width(bundle.manifest, engine.machine, 1, kernels_of(engine)) is None
        assert open_decoder(bundle, engine, None, 1)[1].passes.least_width == 4


# --- tokens ---


@each_value(family=FAMILIES, column=COLUMNS, way=tuple(WAYS))
def test_drafts_change_no_token(
    tiny_bundle: Callable[[str], TinyBundle], family: str, column: str, way: str
) -> None:
    with opened(tiny_bundle(family), column, way=way) as session:
        plain = plainly(session, prompt())
        assert foreseen(session, way, plain, prompt()) == plain
        assert session.bundle.manifest.verify_width is None, "nothing is capped"


@pytest.mark.parametrize("way", WAYS)
def test_without_least_width_tokens_differ(tiny_bundle: Callable[[str], TinyBundle], way: str) -> None:
    """The engine is what the tests need."""
    with opened(tiny_bundle("llama-two-cuts"), probe=False, way=way) as session:
        plain = plainly(session, prompt())
        assert foreseen(session, way, plain, prompt()) != plain


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("t5-two-cuts", {"draft": "imitation@1"}),
        ("t5-two-cuts", {"draft": "imitation@2", "draft_length": 1}),
        ("llama-two-cuts", {"draft": "early-exit", "repetition_penalty": 1.3}),
        ("llama-two-cuts", {"draft": "early-exit", "temperature": 0.8, "seed": 5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
@pytest.mark.parametrize("column", ["cpu", "device"])
def test_drafts_of_the_bundle(
    tiny_bundle: Callable[[str], TinyBundle], family: str, options: dict[str, Any], column: str
) -> None:
    """Trunk and tail; on a device whole cycles, token feedback included."""
    target: dict[str, Any] = {name: options[name] for name in options if not name.startswith("draft")}
    drafting: dict[str, Any] = {"draft_length": 4} | options
    proposed = 0
    with opened(tiny_bundle(family), column) as session:
        for first in range(3):
            drafted = session.generate_tokens(prompt(first=first), **LONG, **drafting)
            assert drafted.tokens == plainly(session, prompt(first=first), **target)
            proposed += drafted.stats.proposed
    assert proposed > 0


@pytest.mark.parametrize("batch", [2, 3])
def test_requests_of_a_batch(tiny_bundle: Callable[[str], TinyBundle], batch: int) -> None:
    """Sequences of other lengths, with drafts of every way to propose, get what they get alone."""
    kinds = ("early-exit", "none", "prompt-lookup", "medusa", "imitation@1", "imitation@2")
    requests: list[dict[str, Any]] = [
        {"prompt": f"a{'b' * number}", "max_new_tokens": 6 + 5 * number, "ignore_eos": True, "draft": draft}
        | ({} if draft == "none" else {"draft_length": 3})
        for number, draft in enumerate(kinds)
    ]
    with opened(tiny_bundle("llama-two-cuts"), batch=batch) as session:
        together = session.generate_batch(requests)
        plain = session.generate_batch([{**request, "draft": "none"} for request in requests])
        alone = [session.generate(**request).tokens for request in requests]
    assert [result.tokens for result in together] == [result.tokens for result in plain] == alone


def test_up_to_the_last_position(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    """The rows of a least width have slots behind the widest tree at the longest length; so have steps of the trunk."""
    tiny = tiny_bundle("llama-two-cuts")
    limits = tiny.bundle.manifest.limits
    with opened(tiny) as session:
        assert session.max_length == limits.max_length
        length = limits.max_length - limits.max_width
        options: dict[str, Any] = {"max_new_tokens": limits.max_length, "ignore_eos": True}
        plain = session.generate_tokens(prompt(length), **options, draft="none").tokens
        drafted = session.generate_tokens(
            prompt(length), **options, draft="early-exit", draft_length=limits.max_width - 1
        )
        assert drafted.tokens == plain and len(plain) == limits.max_width + 1
        decoder = session.decoder
        decoder.reset()
        decoder.prefill(decoder.embed(np.array(prompt(limits.max_length))))
        decoder.begin_cycle(limits.max_width)
    bundle = tiny.bundle
    device = RecordingDevice(bundle.manifest, NarrowRounding(tiny.path, bundle.manifest))
    decoder = Decoder(device, quantized(tiny).manifest, bundle.tensor)
    decoder.set_least_width(4)
    assert decoder.max_length == limits.max_length - 3, "a plan's cache cannot be longer"


def test_trees_of_integers_become_chains(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    """A node behind a sibling lies in another slot than in plain decoding: attention gives other bits there."""
    with opened(tiny_bundle("llama-two-cuts"), least=1) as session:
        trees: list[dict[str, Any]] = [{"draft_nodes": 7}, {"draft_nodes": 7, "draft_length": 3}]
        for options in trees:
            with pytest.raises(OptionError, match="draft_nodes: 7 asks for trees"):
                session.generate_tokens(prompt(), draft="medusa", **options)
        decoder, verified = session.decoder, []
        full = decoder.full
        decoder.full = lambda *trees: (verified.extend(trees), full(*trees))[1]  # type: ignore[method-assign]
        policy = FixedLength(3, None, 7)
        session.generate_tokens(prompt(), draft="medusa", policy=policy, max_new_tokens=12, ignore_eos=True)
        assert max(len(tree.tokens) for tree in verified) > 2 and all(tree.is_chain for tree in verified)
        assert budgets(session.bundle.manifest.drafts[0], 19, exact_trees=False) == [
            budgets(session.bundle.manifest.drafts[0], 19)[0]
        ]


def test_reused_prompts(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    """One new token of a prompt is a pass of one row, which is padded, too."""
    with opened(tiny_bundle("llama-two-cuts")) as session:
        anew = session.generate_tokens(prompt(13), **LONG).tokens
        session.generate_tokens(prompt(12), max_new_tokens=1, reuse_prompt=True)
        again = session.generate_tokens(prompt(13), **LONG, reuse_prompt=True)
        assert again.stats.reused_tokens > 0 and again.tokens == anew


def test_limits(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    with opened(tiny_bundle("llama")) as session:
        for width in (0, 21, True):
            with pytest.raises(OptionError, match=f"least_width.*{width}"):
                session.decoder.set_least_width(width)
        assert "padded to 3" in str(session.note)
        controller = session._controller("session", None)
        assert controller._costs.least == LEAST  # type: ignore[attr-defined]


# --- seeded errors ---


def padding_is_visible(patch: pytest.MonkeyPatch) -> None:
    """A token sees the rows that pad the pass of its trunk step."""
    chain_step = ForwardPasses._chain_step

    def wrong(self: Any, forward_pass: Any) -> Any:
        def shown() -> None:
            if forward_pass.width == self.least_width:
                start = forward_pass.indices[0]
                forward_pass.masks["attn_mask"][0, :, 0, start : start + forward_pass.width] = True

        calls = forward_pass.calls
        forward_pass.calls = [SimpleNamespace(run=shown), *calls]
        step = chain_step(self, forward_pass)
        forward_pass.calls = calls
        return step

    patch.setattr(ForwardPasses, "_chain_step", wrong)


def padding_state_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The exit state of a step is that of the row behind its token."""
    from vlmexport.runtime.decoder.exit_states import ExitStates

    copies = ExitStates.copies_of_nodes
    patch.setattr(
        ExitStates, "copies_of_nodes", lambda self, cut, step, states, node: copies(self, cut, step, states, node + 1)
    )  # fmt: skip


MUTANTS = {
    "plain and verifying passes not padded": (unpadded("full", "least_width", 1), "all segments", LEAST),
    "trunk not padded": (unpadded("trunk", "least_width", 1), "trunk and tail", LEAST),
    "tail not padded": (unpadded("tail", "least_width", 1), "trunk and tail", 6),
    "rows of the head not padded": (unpadded("head_of", "least_width", 1), "all segments", LEAST),
    "padding of the trunk is visible": (padding_is_visible, "trunk and tail", LEAST),
    "exit state of the padding": (padding_state_is_kept, "trunk and tail", LEAST),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_seeded_errors_are_detected(
    tiny_bundle: Callable[[str], TinyBundle], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    plant, way, least = MUTANTS[mutant]
    for planted in (False, True):
        with opened(tiny_bundle("llama-two-cuts"), least=least) as session:
            if planted:
                plant(monkeypatch)
                session.decoder.set_least_width(session.decoder.passes.least_width)
            plain = plainly(session, prompt())
            assert (foreseen(session, way, plain, prompt()) != plain) is planted


def test_masks_of_padded_nodes(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    """Rows that pad a trunk step over a node of a tree see what the node sees."""
    from numpy import bool_, dtype, ones
    from vlmexport.runtime.decoder.token_tree import TokenTree

    mask = masks.CausalMask(12, 1, dtype(bool_))
    tree = TokenTree([5, 6, 7], [-1, 0, 0])
    out = ones((1, 1, 3, 12), bool_)
    mask.node(out, 0, 4, tree, 2)
    assert out[0, 0].tolist() == [[slot < 5 or slot == 6 for slot in range(12)]] * 3
