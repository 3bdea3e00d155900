"""What every graph must look like from outside, derived from the rest of a manifest (docs/architecture.md).

The decoder binds buffers by these names, dtypes and shapes; a bundle whose graphs say anything else is refused
before it is loaded. Symbolic dimensions may have any name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..errors import BundleError

if TYPE_CHECKING:
    from .manifest import GraphInfo, Manifest, ValueInfo

Shape: TypeAlias = "tuple[int | str, ...]"
Values: TypeAlias = "dict[str, tuple[str, Shape]]"
"""Name → (dtype, shape)."""

FLOATS = ("float32", "float16", "bfloat16")


def check_interfaces(manifest: Manifest) -> None:
    """Raise `BundleError` at the first graph whose inputs or outputs are not those that the manifest implies."""
    rows = _float_dtype(manifest.graphs["head"])
    for name, graph in manifest.graphs.items():
        # Rows pass from graph to graph without a conversion; only the vision tower may compute in another type.
        dtype = _float_dtype(graph) if graph.role == "vision" else rows
        inputs, outputs = interface(manifest, name, graph, dtype)
        for side, expected, found in (
            ("inputs", inputs, graph.inputs),
            ("outputs", outputs, graph.outputs),
        ):
            _compare(f"graphs.{name}.{side}", expected, found)


def interface(
    manifest: Manifest, name: str, graph: GraphInfo, dtype: str = "float32"
) -> tuple[Values, Values]:
    """(inputs, outputs) of the graph called `name`; `dtype` is that of its rows."""
    decoder, text = manifest.decoder, manifest.text
    width = decoder.hidden_size
    hidden: Shape = ("batch", "width", width)
    rows: Shape = ("batch", "source", width)
    table = manifest.tensors["embedding_table"]
    if graph.role == "vision":
        image = manifest.image
        if image is None or not text.image_rows:
            raise BundleError(
                "manifest fields 'image' and 'text.image_rows' must be set for a bundle with a graph 'vision'; "
                "build it again"
            )
        return (
            {"pixel_values": (dtype, ("batch", 3, image.height, image.width))},
            {"image_rows": (dtype, ("batch", text.image_rows, width))},
        )
    if graph.role == "encoder":
        heads = decoder.num_heads if manifest.encoder is None else manifest.encoder.num_heads
        mask: Shape = ("batch", heads, "source", "source")
        return {"encoder_rows": (dtype, rows), "encoder_mask": (dtype, mask)}, {
            "encoder_states": (dtype, rows)
        }
    if graph.role == "cross_kv":
        return {"encoder_states": (dtype, rows)}, _cross(manifest, (0, decoder.num_layers), dtype)
    if graph.role == "embed":
        tokens = {"token_ids": ("int64", ("batch", "width"))}
        return (
            {**tokens, "embedding_table": (table.dtype, tuple(table.shape))},
            {"hidden": (dtype, hidden)},
        )
    if graph.role == "head":
        return (
            {"hidden": (dtype, hidden), "row_index": ("int64", ("rows",))},
            {"logits": ("float32", ("rows", table.shape[0]))},
        )
    if graph.role == "imitation":
        return {"hidden": (dtype, hidden)}, {"hidden_out": (dtype, hidden)}
    first, end = graph.layers or (0, decoder.num_layers)
    inputs: Values = {"write_indices": ("int64", ("batch",)), **_caches(manifest, (first, end), "")}
    outputs = _caches(manifest, (first, end), "updated_")
    if graph.role == "commit":
        return inputs | {"source_rows": ("int64", ("batch", "width"))}, outputs
    inputs["hidden"] = (dtype, hidden)
    inputs["attn_mask"] = (decoder.mask_dtype, ("batch", decoder.mask_heads, "width", "cache"))
    if decoder.position == "rotary":
        inputs["positions"] = ("int64", ("batch", "width"))
    if decoder.cross_attention:
        inputs["cross_mask"] = ("bool", ("batch", 1, "width", "source"))
        inputs |= _cross(manifest, (first, end), dtype)
    return inputs, outputs | {"hidden_out": (dtype, hidden)}


def _caches(manifest: Manifest, layers: Sequence[int], prefix: str) -> Values:
    decoder = manifest.decoder
    shape: Shape = ("batch", decoder.num_kv_heads, "cache", decoder.head_dim)
    return {
        f"{prefix}{kind}_cache.{layer}": (decoder.cache_dtype, shape)
        for kind in ("key", "value")
        for layer in range(*layers)
    }


def _cross(manifest: Manifest, layers: Sequence[int], dtype: str) -> Values:
    decoder = manifest.decoder
    shape: Shape = ("batch", decoder.num_heads, "source", decoder.head_dim)
    return {f"cross_{kind}.{layer}": (dtype, shape) for kind in ("key", "value") for layer in range(*layers)}


def _float_dtype(graph: GraphInfo) -> str:
    """The dtype of a graph's first floating-point input: the manifest has no field of its own for it."""
    return next((value.dtype for value in graph.inputs if value.dtype in FLOATS), "float32")


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
