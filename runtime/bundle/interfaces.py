"""What every graph must look like from outside, derived from the rest of a manifest (docs/reference/graph-interfaces.md).

The decoder binds buffers by these names, dtypes and shapes; a bundle whose graphs say anything else is refused
before it is loaded. Symbolic dimensions may have any name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..common.errors import BundleError
from ..graphs.text_layout import TextLayout

if TYPE_CHECKING:
    from .manifest import DraftCache, DraftInfo, GraphInfo, Manifest, ValueInfo

Shape: TypeAlias = "tuple[int | str, ...]"
Values: TypeAlias = "dict[str, tuple[str, Shape]]"
"""Name → (dtype, shape)."""

ROLES = (
    "vision",
    "encoder",
    "cross_kv",
    "embed",
    "segment",
    "skipped",
    "head",
    "imitation",
    "medusa",
    "eagle",
    "eagle3",
    "fusion",
    "vispec",
    "adaptor",
    "commit",
    "mask",
    "penalties",
    "repeats",
)
"""Graphs whose interface is known here. Graphs of other roles belong to drafts of later versions."""

DRAFT_LAYERS = ("eagle", "eagle3", "vispec")
"""Roles of drafts' own layers over pairs of a feature and a token, with keys and values of their own."""

CHANGING = ("penalties", "repeats")
"""Roles of graphs that change logits where they lie."""

TAPPED = ("low", "middle", "high")
"""Inputs of the graph `fusion`: rows after three of the cuts, as the draft's `taps` name them."""


def check_interfaces(manifest: Manifest) -> None:
    """Raise `BundleError` at the first graph whose inputs or outputs are not those that the manifest implies."""
    for name, graph in manifest.graphs.items():
        if graph.role == "vision":
            _check_vision(manifest, name, graph)
        elif graph.role in ROLES:
            inputs, outputs = interface(manifest, graph.role, graph.layers, name)
            _compare(f"graphs.{name}.inputs", inputs, graph.inputs)
            _compare(f"graphs.{name}.outputs", outputs, graph.outputs)


def positions_shape(position: str, first_layer: int) -> Shape | None:
    """Shape of a segment's input `positions` (int64), or None where it takes none.

    Rotary angles are computed in every segment, from one position per row or, with M-RoPE, from three; a table of
    learned positions is added to the rows once, by the segment that starts at layer 0.
    """
    if position == "rotary" or (position == "learned" and first_layer == 0):
        return ("batch", "width")
    return (3, "batch", "width") if position == "mrope" else None


def reads_prompts(graph: GraphInfo) -> bool:
    """Whether a draft's graph sees a prompt and every width after it: those with keys and values of their own do."""
    attends = any(value.name == "key_cache.0" for value in graph.inputs)
    return graph.role in DRAFT_LAYERS or (graph.role == "imitation" and attends)


def interface(
    manifest: Manifest, role: str, layers: Sequence[int] | None = None, name: str | None = None
) -> tuple[Values, Values]:
    """(inputs, outputs) of a graph of `role`, but `vision`; `layers` is [first, end) of a segment, `name` that of the graph,
    where a bundle may have several of a draft's role."""
    decoder, dtype = manifest.decoder, manifest.compute_dtype
    width = decoder.hidden_size
    hidden: Shape = ("batch", "width", width)
    rows: Shape = ("batch", "source", width)
    table = manifest.tensors["embedding_table"]
    if role == "encoder":
        heads = decoder.num_heads if manifest.encoder is None else manifest.encoder.num_heads
        mask: Shape = ("batch", heads, "source", "source")
        kind = dtype if decoder.mask_dtype == "bool" else decoder.mask_dtype
        return {"encoder_rows": (dtype, rows), "encoder_mask": (kind, mask)}, {
            "encoder_states": (dtype, rows)
        }
    if role == "cross_kv":
        return {"encoder_states": (dtype, rows)}, _cross(manifest, range(decoder.num_layers))
    if role == "embed":
        tokens = {"token_ids": ("int64", ("batch", "width"))}
        return (
            {**tokens, "embedding_table": (table.dtype, tuple(table.shape))},
            {"hidden": (dtype, hidden)},
        )
    if role == "head":
        return (
            {"hidden": (dtype, hidden), "row_index": ("int64", ("rows",))},
            {"logits": ("float32", ("rows", table.shape[0]))},
        )
    if role == "skipped":
        return _rows_of(manifest, 0, kept_attention(manifest))
    if role == "medusa":
        draft = _draft_with(manifest, role)
        if draft is None or draft.heads is None or draft.ranks is None:
            raise BundleError("manifest field 'drafts': no draft names heads and ranks of the graph 'medusa'")
        found: Shape = ("rows", draft.heads, draft.ranks)
        return (
            {"hidden": (dtype, hidden), "row_index": ("int64", ("rows",))},
            {"token_ids": ("int64", found), "log_probabilities": ("float32", found)},
        )
    if role in DRAFT_LAYERS:
        return _draft_layer(manifest, role)
    if role == "adaptor":
        draft = _draft_with(manifest, role)
        if draft is None or draft.queries is None:
            raise BundleError("manifest field 'drafts': no draft names the queries of the graph 'adaptor'")
        return (
            {"image_rows": (dtype, ("image_rows", width))},
            {"visual_rows": (dtype, (draft.queries, width))},
        )
    if role == "fusion":
        return dict.fromkeys(TAPPED, (dtype, hidden)), {"hidden_out": (dtype, hidden)}
    if role == "mask":
        return _mask(manifest)
    if role in CHANGING:
        return _process(manifest, role)
    if role == "imitation":
        draft = None if name is None else _draft_with(manifest, role, name)
        inputs, outputs = {}, {}
        if draft is not None and draft.cache is not None:
            if draft.cache.num_layers != 1:
                raise BundleError(
                    f"manifest field 'drafts': the cache of {draft.name!r} has {draft.cache.num_layers} layers, the graph {name!r} "
                    "has one; build the bundle again"
                )
            inputs, outputs = _own_layer(manifest, draft.cache)
        return inputs | {"hidden": (dtype, hidden)}, outputs | {"hidden_out": (dtype, hidden)}
    own = range(*(layers or (0, decoder.num_layers)))
    if role == "commit":
        moves: Values = {
            "write_indices": ("int64", ("batch",)),
            "source_rows": ("int64", ("batch", "width")),
        }
        return moves | _caches(manifest, own, ""), _caches(manifest, own, "updated_")
    return _rows_of(manifest, own[0], own)


def _rows_of(manifest: Manifest, first: int, attention: Iterable[int]) -> tuple[Values, Values]:
    """Of a graph that computes rows from layer `first` on, with keys and values of the layers `attention`."""
    decoder, attention = manifest.decoder, list(attention)
    hidden = (manifest.compute_dtype, ("batch", "width", decoder.hidden_size))
    inputs: Values = {
        "hidden": hidden,
        "write_indices": ("int64", ("batch",)),
        "attn_mask": (decoder.mask_dtype, ("batch", decoder.mask_heads, "width", "cache")),
        **_caches(manifest, attention, ""),
    }
    positions = positions_shape(decoder.position, first)
    if positions is not None:
        inputs["positions"] = ("int64", positions)
    if decoder.cross_attention:
        inputs["cross_mask"] = ("bool", ("batch", 1, "width", "source"))
        inputs |= _cross(manifest, attention)
    return inputs, _caches(manifest, attention, "updated_") | {"hidden_out": hidden}


def kept_attention(manifest: Manifest) -> list[int]:
    """Layers whose attention the graph `skipped` has. Raises `BundleError` where no draft says which it has not."""
    draft = _draft_with(manifest, "skipped")
    if draft is None or draft.skipped is None:
        raise BundleError("manifest field 'drafts': no draft names what the graph 'skipped' leaves out")
    return [layer for layer in range(manifest.decoder.num_layers) if layer not in draft.skipped.attention]


def _draft_with(manifest: Manifest, role: str, name: str | None = None) -> DraftInfo | None:
    """The draft that has a graph of this role, and, if given, of this name."""
    found = (draft for draft in manifest.drafts if role in draft.graphs)
    return next((draft for draft in found if name is None or draft.graphs[role] == name), None)


def _own_layer(manifest: Manifest, cache: DraftCache) -> tuple[Values, Values]:
    """What every graph takes and gives that is one layer with keys and values of its own: where its rows stand, what they
    see, and the cache."""
    shape: Shape = ("batch", cache.num_kv_heads, "cache", cache.head_dim)
    caches = dict.fromkeys(("key_cache.0", "value_cache.0"), (manifest.cache_dtype, shape))
    inputs: Values = {
        "positions": ("int64", ("batch", "width")),
        "write_indices": ("int64", ("batch",)),
        "attn_mask": ("bool", ("batch", 1, "width", "cache")),
        **caches,
    }
    return inputs, {f"updated_{name}": value for name, value in caches.items()}


def _draft_layer(manifest: Manifest, role: str) -> tuple[Values, Values]:
    """Of a draft's own layer over embeddings and features (docs/reference/graph-interfaces.md)."""
    draft = _draft_with(manifest, role)
    if draft is None or draft.cache is None or draft.cache.num_layers != 1 or draft.ranks is None:
        raise BundleError(
            f"manifest field 'drafts': no draft names ranks and the cache of one layer of the graph {role!r}"
        )
    dtype, width, table = (
        manifest.compute_dtype,
        manifest.decoder.hidden_size,
        manifest.tensors["embedding_table"],
    )
    placed, updated = _own_layer(manifest, draft.cache)
    inputs: Values = {
        "hidden": (dtype, ("sources", width)),
        "feature_index": ("int64", ("batch", "width")),
        "drafted": ("bool", (1,)),
        "next_ids": ("int64", ("batch", "width")),
        "embedding_table": (table.dtype, tuple(table.shape)),
        **placed,
        "row_index": ("int64", ("rows",)),
    }
    if role == "eagle3":
        del inputs["drafted"]  # what it gets of the target passed the graph `fusion`
    if role == "vispec":
        inputs |= {
            "visual": (dtype, ("visual", width)),
            "visual_index": ("int64", ("batch", "width")),
            "compressed": ("bool", ("batch", "width")),
        }
    outputs: Values = {
        "hidden_out": (dtype, ("batch", "width", width)),
        "token_ids": ("int64", ("rows", draft.ranks)),
        "log_probabilities": ("float32", ("rows", draft.ranks)),
    }
    return inputs, outputs | updated


def _process(manifest: Manifest, role: str) -> tuple[Values, Values]:
    """Of the graphs that change logits on a device (docs/reference/graph-interfaces.md)."""
    vocabulary, layout = manifest.tensors["embedding_table"].shape[0], TextLayout.of(manifest.limits)
    logits: tuple[str, Shape] = ("float32", ("rows", vocabulary))
    inputs: Values = {
        "raw_logits": logits,
        "said": ("int64", (layout.places,)),
        "recent": ("int64", (manifest.limits.max_width,)),
        "end": ("int64", (1,)),
        "tokens": ("int64", ("span",)),
        "token_depths": ("int64", ("span",)),
        "ancestors": ("bool", ("rows", "span")),
        "depths": ("int64", ("rows",)),
        "held": ("int64", (1,)),
        "ends": ("bool", (vocabulary,)),
        "banned": ("bool", (vocabulary,)),
        "penalty": ("float32", (1,)),
    }
    if role == "repeats":
        inputs["needed"] = ("int64", (layout.compared,))
    return inputs, {"said_now": inputs["said"], "logits": logits}


def _mask(manifest: Manifest) -> tuple[Values, Values]:
    """Of the graph that makes masks and positions on a device (docs/reference/graph-interfaces.md)."""
    decoder = manifest.decoder
    inputs: Values = {
        "start": ("int64", ("batch",)),
        "depths": ("int64", ("batch", "width")),
        "ancestors": ("bool", ("batch", "width", "span")),
        "slots": ("int64", ("cache",)),
    }
    outputs: Values = {"attn_mask": (decoder.mask_dtype, ("batch", decoder.mask_heads, "width", "cache"))}
    if decoder.mask_dtype != "bool":
        inputs["slot_depths"] = ("int64", ("batch", "span"))
        inputs["distance_bias"] = (decoder.mask_dtype, ("distances", decoder.mask_heads))
    positions = positions_shape(decoder.position, 0)
    if positions is not None:
        inputs["first_positions"] = ("int64", ("batch",))
        outputs["positions"] = ("int64", positions)
    return inputs, outputs


def _check_vision(manifest: Manifest, name: str, graph: GraphInfo) -> None:
    """A vision graph takes what its family declares; it gives rows for the decoder (or its cross-attention)."""
    if manifest.image is None:
        raise BundleError(
            "manifest field 'image' must be set for a bundle with a graph 'vision'; build it again"
        )
    side, image = [manifest.image.height, manifest.image.width], manifest.image
    for value in graph.inputs:
        if value.name == "pixel_values" and image.height is not None and value.shape[-2:] != side:
            raise BundleError(
                f"manifest field 'graphs.{name}.inputs': pixel_values {value.shape!r:.120} does not fit the image size "
                f"{side}; build the bundle again"
            )
    shape = graph.outputs[0].shape if len(graph.outputs) == 1 else []
    fits = (
        len(shape) >= 2
        and shape[-1] == manifest.decoder.hidden_size
        and graph.outputs[0].name == "image_rows"
        and graph.outputs[0].dtype == manifest.compute_dtype
        and (manifest.text.image_rows is None or shape[-2] == manifest.text.image_rows)
    )
    if not fits:
        raise BundleError(
            f"manifest field 'graphs.{name}.outputs' does not fit the rest of the manifest: image_rows "
            f"{manifest.compute_dtype} [..., {manifest.text.image_rows or 'rows'}, {manifest.decoder.hidden_size}] is "
            "implied; build the bundle again"
        )


def _caches(manifest: Manifest, layers: Iterable[int], prefix: str) -> Values:
    decoder = manifest.decoder
    shape: Shape = ("batch", decoder.num_kv_heads, "cache", decoder.head_dim)
    return {
        f"{prefix}{kind}_cache.{layer}": (manifest.cache_dtype, shape)
        for kind in ("key", "value")
        for layer in layers
    }


def _cross(manifest: Manifest, layers: Iterable[int]) -> Values:
    decoder = manifest.decoder
    shape: Shape = ("batch", decoder.num_heads, "source", decoder.head_dim)
    return {
        f"cross_{kind}.{layer}": (manifest.cache_dtype, shape)
        for kind in ("key", "value")
        for layer in layers
    }


def _compare(where: str, expected: Values, found: Sequence[ValueInfo]) -> None:
    names = [value.name for value in found]
    odd = sorted(set(expected) ^ set(names)) or sorted(name for name in names if names.count(name) > 1)
    if odd:
        listed = ", ".join(odd[:4]) + (", …" if len(odd) > 4 else "")
        raise BundleError(
            f"manifest field {where!r} does not fit the rest of the manifest ({listed:.200}); build the bundle again"
        )
    for index, value in enumerate(found):
        dtype, shape = expected[value.name]
        fits = len(value.shape) == len(shape) and all(
            isinstance(have, str) if isinstance(want, str) else have == want
            for have, want in zip(value.shape, shape, strict=True)
        )
        if value.dtype != dtype or not fits:
            raise BundleError(
                f"manifest field '{where}[{index}]': {value.name} is {value.dtype} {value.shape!r:.120}, the rest "
                f"of the manifest implies {dtype} {list(shape)}; build the bundle again"
            )
