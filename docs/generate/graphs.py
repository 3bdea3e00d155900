"""Writes the tables of docs/reference/graph-interfaces.md, draft-graphs.md and device-graphs.md from the roles of graphs:
`python -m docs.generate.graphs`; `--check` only compares.

A role says its inputs and outputs for a manifest. It is asked for several, whose numbers are different ones: each number is
shown as what it stands for. The text between two marks is this script's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmexport.runtime.bundle.draft_info import DraftInfo
from vlmexport.runtime.bundle.draft_options import DraftCache
from vlmexport.runtime.drafts.eagle.layer_role import LayerOptions, PlacedLayerOptions
from vlmexport.runtime.drafts.eagle.vispec_options import VispecOptions
from vlmexport.runtime.drafts.imitation.imitation_kind import ImitationOptions
from vlmexport.runtime.drafts.layer_skip_options import SkipOptions, SkippedInfo
from vlmexport.runtime.drafts.medusa.medusa_options import MedusaOptions
from vlmexport.runtime.graphs import decoding, on_device, reading
from vlmexport.runtime.graphs.registry import draft_kinds, graph_role
from vlmexport.runtime.graphs.role import GraphRole, Shape, Values
from vlmexport.runtime.graphs.text_layout import TextLayout

from docs.generate.markdown import table
from docs.generate.marked import refresh, replace_between

DOCUMENTS = tuple(
    Path(__file__).resolve().parents[1] / "reference" / name
    for name in ("graph-interfaces.md", "draft-graphs.md", "device-graphs.md")
)
BEGIN, END = "<!-- graphs of {}: begin -->", "<!-- graphs of {}: end -->"

LIMITS = SimpleNamespace(max_length=7001, max_width=7013, max_batch=7)
LAYOUT = TextLayout.of(LIMITS)  # type: ignore[arg-type]
DIMENSIONS = {
    50021: "V", 1009: "E", 101: "H", 103: "Hkv", 107: "D", 109: "encoder heads", 113: "kv heads", 127: "head_dim",
    131: "heads", 137: "ranks", 139: "queries", 149: "C", 151: "kernel − 1", 157: "value heads", 163: "Dk", 167: "Dv", 26859: "C",
    LIMITS.max_width + 5: "kernel − 1 + max_width", LIMITS.max_width: "max_width", LAYOUT.places: "places",
    LAYOUT.compared: "places behind the lead",
}  # fmt: skip
"""Numbers of the manifests below → what they stand for."""
TYPES = {"int64": "i64 ", "float32": "f32 ", "bool": "bool ", "compute_dtype": "", "cache_dtype": ""}

CACHE = DraftCache(num_layers=1, num_kv_heads=113, head_dim=127, dtype="float32")
DRAFTS = (
    ("skipped", SkipOptions(skipped=SkippedInfo(attention=[2], mlp=[]))),
    ("imitation", ImitationOptions(cache=CACHE)),
    ("medusa", MedusaOptions(heads=131, ranks=137)),
    ("eagle", PlacedLayerOptions(cache=CACHE, ranks=137)),
    ("eagle3", PlacedLayerOptions(cache=CACHE, ranks=137)),
    ("mtp", PlacedLayerOptions(cache=CACHE, ranks=137)),
    ("vispec", LayerOptions(cache=CACHE, ranks=137)),
    ("adaptor", VispecOptions(queries=139)),
)
"""Role of a draft's graph → what its manifest entry says."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"position": "rotary"},
    {"position": "rotary", "layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
    {
        "position": "rotary",
        "layer_types": ["conv", "full_attention", "full_attention"],
        "layer_caches": {"conv": [SimpleNamespace(name="conv_cache", num_heads=1, head_dim=149)]},
        "conv_kernel": 152,
    },
    {
        "position": "rotary",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_attention": SimpleNamespace(
            num_key_heads=1, num_value_heads=157, key_head_dim=163, value_head_dim=167, conv_kernel=6
        ),
    },
    {"position": "mrope"},
    {"position": "mrope", "deepstack_layers": 1},
    {"position": "learned", "cross_attention": True},
    {"position": "relative_bias", "cross_attention": True, "mask_dtype": "float", "mask_heads": 101},
)
"""How decoders differ."""

BASES = {"eagle3": "eagle", "mtp": "eagle", "vispec": "eagle", "repeats": "penalties", "skipped": "segment"}
"""Graph → the one that it is said to be as."""

SECTIONS = {
    "the model": [*reading.ROLES, *decoding.ROLES],
    "drafts": [role for kind in draft_kinds().values() for role in kind.roles],
    "a device": [*on_device.ROLES],
}

NOTES = {
    "encoder_mask": "relative bias; −inf-like at padding",
    "cross_kv encoder_states": "of the text encoder; without one, image rows",
    "skipped": "over all layers; the caches, and with cross-attention `cross_key.i` and `cross_value.i`, are those of layers "
    "whose attention is not left out; `hidden_out` enters `head`",
    "mtp": "the layer and its norms are those of the model's checkpoint",
    "eagle3": "rows of the target have passed `fusion`",
    "vispec": "with one axis of positions, and three more",
    "repeats": "and one more; `logits` are also those after n-grams and words that must not come",
    "embedding_table": "bound from `weights.bin`, never a copy",
    "updated_key_cache.i": "same address as the input",
    "updated_value_cache.i": "same address as the input",
    "updated_key_cache.0": "same address as the input",
    "updated_value_cache.0": "same address as the input",
    "updated_conv_cache.i": "same address as the input",
    "segment conv_slots": "where a layer has a causal convolution: the slots of the tokens before each token on its way, the nearest "
    "last; −1 before the sequence, for zeros",
    "segment conv_cache.i": "of layers with a causal convolution, in place of keys and values: `decoder.layer_caches` in the manifest",
    "updated_recent_rows.i": "same address as the input",
    "updated_recurrent_state.i": "same address as the input",
    "segment pending": "where a layer has linear attention: rows before the pass that its state does not hold yet",
    "segment folded": "of these, and then of the pass's own rows, how many the updated state holds",
    "segment recent_rows.i": "of layers with linear attention: what their projections made of the rows since the state, and of the "
    "kernel − 1 before those",
    "segment recurrent_state.i": "of layers with linear attention, in place of keys and values: `decoder.linear_attention` in the "
    "manifest",
    "cross_mask": "with cross-attention",
    "segment cross_key.i": "with cross-attention, as from `cross_kv`",
    "segment cross_value.i": "with cross-attention, as from `cross_kv`",
    "cross_kv cross_key.i": "of every decoder layer",
    "cross_kv cross_value.i": "of every decoder layer",
    "deepstack.i": "of the first layers of a model with DeepStack: added to the rows behind layer i; zero where no picture is",
    "segment attn_mask": "float where a bias rides on the mask",
    "segment sliding_mask": "where a layer sees a window of positions, `decoder.layer_types` in the manifest; `attn_mask` where one "
    "sees everything",
    "segment positions": "only in some segments: `positions_shape` in `runtime/graphs/values.py` says which",
    "head row_index": "into the flattened batch × width rows, selected before the final norm and the LM head",
    "commit source_rows": "cache slots",
    "commit updated_key_cache.i": "rows gathered, then written contiguously at `write_indices`",
    "commit updated_value_cache.i": "rows gathered, then written contiguously at `write_indices`",
    "commit updated_conv_cache.i": "rows gathered, then written contiguously at `write_indices`",
    "imitation hidden": "after layer n",
    "imitation hidden_out": "enters `head`",
    "imitation positions": "with attention",
    "imitation write_indices": "with attention",
    "imitation attn_mask": "with attention",
    "imitation key_cache.0": "with attention: `cache` in the draft's manifest entry",
    "imitation value_cache.0": "with attention: `cache` in the draft's manifest entry",
    "imitation updated_key_cache.0": "with attention: same address as the input",
    "imitation updated_value_cache.0": "with attention: same address as the input",
    "medusa row_index": "as for `head`",
    "medusa token_ids": "the best tokens of every head, best first",
    "medusa log_probabilities": "theirs: a few hundred bytes reach the host",
    "eagle hidden": "rows to choose from",
    "eagle feature_index": "the row that each place takes",
    "eagle drafted": "true: the rows are features of the layer's own. False: they are rows of the target before its final "
    "norm",
    "eagle next_ids": "the token behind each place",
    "eagle positions": "three axes where `position` in the draft's manifest entry is `mrope`: the target's own",
    "eagle key_cache.0": "`cache` in the draft's manifest entry",
    "eagle value_cache.0": "`cache` in the draft's manifest entry",
    "eagle row_index": "into the flattened places",
    "eagle hidden_out": "the features of the next positions",
    "eagle token_ids": "behind the places of `row_index`, best first",
    "eagle log_probabilities": "theirs",
    "fusion low": "rows after the first of three cuts",
    "fusion middle": "after the second",
    "fusion high": "after the third",
    "fusion hidden_out": "a stand-in for features",
    "vispec visual": "rows of pictures",
    "vispec visual_index": "the row that each place sees",
    "vispec compressed": "true: the row enters the layer there as it is. False: it is the global feature that is mixed into "
    "the place's own",
    "adaptor image_rows": "of one picture or frame, as `vision` gives them",
    "adaptor visual_rows": "tokens of the layer, then the global feature",
    "mask start": "the valid slots",
    "mask depths": "of the rows",
    "mask ancestors": "whether the node in slot `start` + j is the row's own or above it",
    "mask slots": "0, 1, …",
    "mask first_positions": "where positions are an input: the position of slot `start`",
    "mask slot_depths": "where a bias rides on masks, or a layer sees a window or has a convolution",
    "mask distance_bias": "where a bias rides on masks; its last row hides",
    "mask attn_mask": "as a segment takes it",
    "mask sliding_mask": "as a segment takes it",
    "mask conv_slots": "as a segment takes it",
    "mask positions": "where a segment takes them",
    "raw_logits": "of the nodes of a tree",
    "said": "the text so far ([Text on a device](../explanation/device-cycles.md#text-on-a-device))",
    "recent": "the last tokens of the text, some of which came since the last cycle",
    "end": "the place of the last one, the tree's root",
    "tokens": "the tree's own tokens",
    "token_depths": "their distances behind the root",
    "penalties depths": "of the rows",
    "penalties ancestors": "which tokens are on the way to a row",
    "held": "the depth from which on `ends` may come",
    "penalties logits": "after repetition penalty, suppressed tokens and ends that are held back",
    "said_now": "the text with `recent`",
    "repeats needed": "how many tokens before a place must be a row's last ones for the token there to be forbidden",
}
"""What a value is, by its name, or by role and name."""


def manifests() -> Iterator[Any]:
    """What roles read of manifests, of each variant."""
    shape: dict[str, Any] = {
        "num_layers": 3, "hidden_size": 1009, "num_heads": 101, "num_kv_heads": 103, "head_dim": 107, "mask_dtype": "bool",
        "mask_heads": 1, "cross_attention": False, "deepstack_layers": None, "layer_types": None,
        "layer_caches": None, "conv_kernel": None,
    }  # fmt: skip
    for variant in VARIANTS:
        mrope = variant["position"] == "mrope"
        drafts = [
            DraftInfo(
                name=role,
                kind=role,
                graphs={role: role},
                options=dataclasses.replace(options, position="mrope")
                if mrope and isinstance(options, PlacedLayerOptions)
                else options,
            )
            for role, options in DRAFTS
        ]
        yield SimpleNamespace(
            decoder=SimpleNamespace(**shape | variant),
            encoder=SimpleNamespace(num_heads=109),
            drafts=drafts,
            limits=LIMITS,
            tensors={"embedding_table": SimpleNamespace(dtype="as stored", shape=[50021, 1009])},
            compute_dtype="compute_dtype",
            cache_dtype="cache_dtype",
        )


def interfaces(role: GraphRole) -> tuple[dict[str, str], dict[str, str]]:
    """(inputs, outputs) of a role: name → type and shape, all of them where manifests differ."""
    assert role.interface is not None
    sides: tuple[dict[str, dict[str, None]], ...] = ({}, {})
    for manifest in manifests():
        # Of a role that several graphs may have, one belongs to a draft above, and the other to none.
        for graph in (role.name, f"{role.name}.plain") if role.numbered else (role.name,):
            for side, values in zip(sides, role.interface(manifest, graph, (0, 1)), strict=True):
                for name, text in _texts(role, values):
                    side.setdefault(name, {})[text] = None
    inputs, outputs = ({name: ", or ".join(texts) for name, texts in side.items()} for side in sides)
    return inputs, outputs


def _texts(role: GraphRole, values: Values) -> Iterator[tuple[str, str]]:
    for name, (dtype, shape) in values.items():
        shown = name if role.own_cache else re.sub(r"\.\d+$", ".i", name)
        yield shown, f"{TYPES.get(dtype, f'{dtype} ')}[{_dimensions(shape)}]"


def _dimensions(shape: Shape) -> str:
    return ", ".join(str(each) if isinstance(each, str) or each < 10 else DIMENSIONS[each] for each in shape)


def rows(role: GraphRole) -> Iterator[tuple[str, str, str]]:
    """Of a table: input or `→` output, type and shape, note."""
    if role.interface is None:
        yield "what the family declares", "", "for a fixed size `pixel_values` f32 [batch, 3, height, width]"
        yield (
            "→ `image_rows`",
            "[batch, R, E]",
            "vision tower, connector; with DeepStack [R, (1 + layers) · E]",
        )
        return
    own, usual, base = interfaces(role), ({}, {}), BASES.get(role.name)
    if base is not None:
        usual = interfaces(graph_role(base))
        gone = [f"`{each}`" for side, old in zip(own, usual, strict=True) for each in old if each not in side]
        yield f"as `{base}`" + (f", without {', '.join(gone)}" if gone else ""), "", NOTES.get(role.name, "")
    for sign, side, old in zip(("", "→ "), own, usual, strict=True):
        alike: dict[tuple[str, str], list[str]] = {}
        for value, text in side.items():
            if old.get(value) != text:
                note = NOTES.get(f"{role.name} {value}", NOTES.get(value, ""))
                alike.setdefault((text, note), []).append(f"`{value}`")
        for (text, note), names in alike.items():
            yield sign + ", ".join(names), text, note


def _section(roles: Sequence[GraphRole]) -> str:
    """A table, where a graph's name stands in its first row."""
    cells = []
    for role in roles:
        name = f"`{role.name}.n`" if role.numbered else f"`{role.name}`"
        cells += [(name if n == 0 else "", *row) for n, row in enumerate(rows(role))]
    return table(("graph", "input, or → output", "type and shape", ""), cells)


def written(text: str) -> str:
    """A document with today's tables between its marks."""
    for section, roles in SECTIONS.items():
        begin, end = BEGIN.format(section), END.format(section)
        if begin not in text:
            continue
        text = replace_between(text, begin, end, f"\n\n{_section(roles)}\n\n")
    return text


def main() -> None:
    """See the module."""
    refresh(DOCUMENTS, written, "docs.generate.graphs")


if __name__ == "__main__":
    main()
