"""`--draft-precision`: which drafts it is about, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vlmexport.exporter.cli.tables import draft_names, quantization_notes
from vlmexport.exporter.drafts import draft_kind
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.medusa.medusa_network import MedusaConfig, MedusaHeads
from vlmexport.exporter.drafts.selection import DraftSelection, set_precisions
from vlmexport.exporter.tensorrt.options import NATIVE, PORTABLE, check_integers
from vlmexport.runtime.bundle.target_weights import TargetWeights
from vlmexport.runtime.common.errors import OptionError


def selection(width: int = 64, lookup_only: bool = False) -> DraftSelection:
    heads = MedusaDraft(network=MedusaHeads(MedusaConfig(width, 50, 2)), target={})
    network = ImitationDraft(network=ImitationNetwork(width), layer=3, target={})
    lookup = draft_kind("prompt-lookup").at(None)
    drafts = [lookup] if lookup_only else [network, heads, lookup]
    return DraftSelection(drafts=drafts, default=drafts[0], speculative=True)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([], {}),
        (["int4"], {"imitation@3": "int4", "medusa": "int4"}),
        (["medusa=int8"], {"medusa": "int8"}),
        (["int4", "medusa=int8"], {"imitation@3": "int4", "medusa": "int8"}),
        (["imitation@3=int8", "int4"], {"imitation@3": "int8", "medusa": "int4"}),
    ],
)
def test_all_drafts_or_the_one_that_is_named(wanted: list[str], found: dict[str, str]) -> None:
    chosen = selection()
    set_precisions(chosen, wanted)
    assert chosen.precisions == found
    assert [draft.name for draft in chosen.drafts] == ["imitation@3", "medusa", "prompt-lookup"]
    assert chosen.default is chosen.drafts[0], "the default is the draft that is written"
    entries = {draft.name: draft.entry("float16")["weights_dtype"] for draft in chosen.drafts}
    usual = {"imitation@3": "float16", "medusa": "float16", "prompt-lookup": None}
    assert entries == usual | found


@pytest.mark.parametrize(
    ("wanted", "message", "options"),
    [
        (["int2"], "'int2' is unknown; choose int8 or int4", {}),
        (["medusa=fp8"], "'medusa=fp8' is unknown; choose int8 or int4", {}),
        (["eagle=int4"], "names no draft with weights of its own (imitation@3, medusa)", {}),
        (["prompt-lookup=int4"], "names no draft with weights of its own (imitation@3, medusa)", {}),
        (["=int4"], "names no draft with weights of its own", {}),
        (["int4", "int8"], "given twice for imitation@3", {}),
        (["medusa=int4", "medusa=int8"], "given twice for medusa", {}),
        (["int4"], "no draft of this bundle has weights of its own; leave it out", {"lookup_only": True}),
        (["int8"], "imitation@3 has no matrix whose rows are whole blocks of 32 numbers", {"width": 40}),
    ],
)
def test_unsuitable_values_are_named(wanted: list[str], message: str, options: dict[str, Any]) -> None:
    chosen = selection(**options)
    before = list(chosen.drafts)
    with pytest.raises(OptionError) as caught:
        set_precisions(chosen, wanted)
    assert message in str(caught.value) and "--draft-precision" in str(caught.value)
    assert chosen.drafts == before and "\n" not in str(caught.value)


def test_portable_plans_are_refused_before_any_is_built() -> None:
    made: Any = SimpleNamespace(lowering=PORTABLE)
    with pytest.raises(
        OptionError, match=r"medusa \(int4\); use --lowering native.*without --draft-precision"
    ):
        check_integers(made, {"medusa": "int4", "prompt-lookup": None, "eagle": "float16"})
    check_integers(made, {"medusa": "bfloat16", "prompt-lookup": None})
    check_integers(SimpleNamespace(lowering=NATIVE), {"medusa": "int4"})  # type: ignore[arg-type]
    target = TargetWeights(dtype="int4", block=32)
    with pytest.raises(OptionError, match=r"model's integer weights \(int4\).*without --weights"):
        check_integers(made, {}, target)
    check_integers(SimpleNamespace(lowering=NATIVE), {}, target)  # type: ignore[arg-type]


def test_draft_precision_is_logged() -> None:
    line = draft_names(["medusa", "prompt-lookup"], {"medusa": "int4"}, True)
    assert line == "medusa (int4), prompt-lookup"
    rows = [{"graph": "head"}, {"graph": "medusa", "quantization_difference": 0.0123}]
    assert quantization_notes(rows) == [
        "medusa: its integers change what it computes by up to 0.012 of the largest value; the table compares it with the network "
        "of the same integers"
    ]
