"""What every graph must look like from outside, derived from the rest of a manifest (docs/reference/graph-interfaces.md).

The decoder binds buffers by these names, dtypes and shapes; a bundle whose graphs say anything else is refused
before it is loaded. Symbolic dimensions may have any name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.errors import BundleError
from ..graphs.registry import UNKNOWN, graph_role
from ..graphs.role import Values
from ..graphs.values import image_width

if TYPE_CHECKING:
    from .manifest import GraphInfo, Manifest, ValueInfo


def check_interfaces(manifest: Manifest) -> None:
    """Raise `BundleError` at the first graph whose inputs or outputs are not those that the manifest implies."""
    for name, graph in manifest.graphs.items():
        role = graph_role(graph.role)
        if role is UNKNOWN:
            continue
        if role.interface is None:
            _check_vision(manifest, name, graph)
        else:
            inputs, outputs = interface(manifest, graph.role, graph.layers, name)
            _compare(f"graphs.{name}.inputs", inputs, graph.inputs)
            _compare(f"graphs.{name}.outputs", outputs, graph.outputs)


def interface(
    manifest: Manifest, role: str, layers: Sequence[int] | None = None, name: str | None = None
) -> tuple[Values, Values]:
    """(inputs, outputs) of a graph of `role`, one that says them; `layers` is [first, end) of a segment, `name` that of the
    graph, where a bundle may have several of a draft's role. Raises `BundleError` where the manifest does not say what they
    follow from."""
    declared = graph_role(role).interface
    assert declared is not None, f"graphs of role {role} have no interface"
    return declared(manifest, name or role, layers)


def _check_vision(manifest: Manifest, name: str, graph: GraphInfo) -> None:
    """A vision graph takes what its family declares; it gives hidden states for the decoder (or its cross-attention)."""
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
        and shape[-1] == image_width(manifest.decoder)
        and graph.outputs[0].name == "image_rows"
        and graph.outputs[0].dtype == manifest.compute_dtype
        and (manifest.text.image_rows is None or shape[-2] == manifest.text.image_rows)
    )
    if not fits:
        raise BundleError(
            f"manifest field 'graphs.{name}.outputs' does not fit the rest of the manifest: image_rows "
            f"{manifest.compute_dtype} [..., {manifest.text.image_rows or 'rows'}, {image_width(manifest.decoder)}] is "
            "implied; build the bundle again"
        )


def _compare(where: str, expected: Values, values: Sequence[ValueInfo]) -> None:
    names = [value.name for value in values]
    odd = sorted(set(expected) ^ set(names)) or sorted(name for name in names if names.count(name) > 1)
    if odd:
        listed = ", ".join(odd[:4]) + (", …" if len(odd) > 4 else "")
        raise BundleError(
            f"manifest field {where!r} does not fit the rest of the manifest ({listed:.200}); build the bundle again"
        )
    for index, value in enumerate(values):
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
