"""Checks between the fields of a manifest: every name that points to something must be found."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ..common.errors import BundleError
from ..graphs.registry import graph_roles
from ..graphs.values import CONV_CACHE, KEY_VALUE, LINEAR, MASKS, vocabulary
from .interfaces import check_interfaces
from .schema import FLOATS, ITEM_SIZES, failure

if TYPE_CHECKING:
    from .decoder_info import DecoderInfo
    from .manifest import Manifest, TextInfo


def check_references(manifest: Manifest) -> None:
    """All checks between fields of a manifest as it is read from a bundle."""
    check_description(manifest)
    check_listed(manifest)


def check_listed(manifest: Manifest) -> None:
    """Every file that a field names is listed under `files`."""
    for name, graph in manifest.graphs.items():
        if graph.file not in manifest.files:
            raise failure(f"graphs.{name}.file", graph.file, "listed under 'files'")
        for form in ("float32", "folded", "float32_folded"):
            file = getattr(graph, form)
            if file is not None and file not in manifest.files:
                raise failure(f"graphs.{name}.{form}", file, "listed under 'files'")
    for where in (manifest.weights.file, *manifest.weights.linked, manifest.text.tokenizer):
        if where not in manifest.files:
            raise BundleError(f"manifest field 'files' does not list {where!r}")


def check_description(manifest: Manifest) -> None:
    """What does not depend on `files`: a build checks it before it writes any."""
    decoder, graphs = manifest.decoder, manifest.graphs
    cuts = decoder.cuts
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != decoder.num_layers or cuts != sorted(set(cuts)):
        raise failure("decoder.cuts", cuts, f"a rising list from 0 to num_layers ({decoder.num_layers})")
    if decoder.num_heads % decoder.num_kv_heads:
        raise failure(
            "decoder.num_kv_heads", decoder.num_kv_heads, f"a divisor of num_heads ({decoder.num_heads})"
        )
    if decoder.mask_heads not in (1, decoder.num_heads):
        raise failure("decoder.mask_heads", decoder.mask_heads, f"1 or num_heads ({decoder.num_heads})")
    if decoder.position == "relative_bias" and decoder.relative_bias is None:
        raise BundleError(
            "manifest field 'decoder.relative_bias' is null although decoder.position is relative_bias"
        )
    _check_visibility(decoder)
    _check_caches(decoder)
    _check_states(decoder, manifest.limits.max_width)
    widest = manifest.limits.max_width
    if manifest.verify_width is not None and manifest.verify_width > widest:
        raise failure("verify_width", manifest.verify_width, f"at most limits.max_width ({widest})")
    roles = graph_roles()
    for name, graph in graphs.items():
        base, _, number = name.partition(".")
        numbered = graph.role in roles and roles[graph.role].numbered
        if (graph.role in roles or base in roles) and (
            base != graph.role or numbered != number.isdigit() or (not numbered and number)
        ):
            expected = f"{graph.role}.NUMBER" if numbered else graph.role
            raise BundleError(
                f"manifest field 'graphs.{name}.role': {graph.role!r} needs the graph name {expected}"
            )
    for index, name in enumerate(manifest.segments):
        if name not in graphs:
            raise BundleError(f"manifest field 'graphs.{name}' is missing although decoder.cuts is {cuts}")
        expected_layers = [cuts[index], cuts[index + 1]]
        if graphs[name].layers != expected_layers:
            raise failure(
                f"graphs.{name}.layers", graphs[name].layers, f"{expected_layers}, as decoder.cuts says"
            )
    if len([graph for graph in graphs.values() if graph.role == "segment"]) != len(cuts) - 1:
        raise BundleError(f"manifest field 'graphs' holds other segments than decoder.cuts {cuts} names")
    needed = ["embed", "head"]
    needed += ["cross_kv"] if decoder.cross_attention else []
    needed += ["encoder"] if manifest.encoder is not None else []
    needed += ["vision"] if manifest.image is not None else []
    for name in needed:
        if name not in graphs:
            raise BundleError(f"manifest field 'graphs.{name}' is missing; build the bundle again")
    if decoder.cross_attention and manifest.encoder is None and manifest.image is None:
        raise BundleError(
            "manifest fields 'encoder' and 'image' are null although decoder.cross_attention is true"
        )
    if decoder.position == "learned" and decoder.max_positions is None:
        raise BundleError(
            "manifest field 'decoder.max_positions' is null although decoder.position is learned"
        )
    if "encoder" in graphs and manifest.encoder is None:
        raise BundleError("manifest field 'encoder' is null although there is a graph 'graphs.encoder'")
    if manifest.image is not None and not manifest.text.image_rows and manifest.limits.max_image_rows is None:
        raise BundleError(
            "manifest field 'limits.max_image_rows' is null although 'text.image_rows' is not set"
        )
    _check_tensors(manifest)
    check_tokens(manifest.text, vocabulary(manifest))
    names = [draft.name for draft in manifest.drafts]
    for index, draft in enumerate(manifest.drafts):
        if names.count(draft.name) > 1:
            raise failure(f"drafts[{index}].name", draft.name, "unique")
        where = f"drafts[{index}]"
        for role, graph in draft.graphs.items():
            if graph not in graphs or graphs[graph].role != role:
                raise failure(f"{where}.graphs.{role}", graph, f"a graph of role {role} of this bundle")
        if draft.layer is not None and draft.layer not in cuts[1:-1]:
            raise failure(f"{where}.layer", draft.layer, f"one of the cuts {cuts[1:-1]}")
        draft.options.check(where, draft, manifest)
    if manifest.policy.draft is not None and manifest.policy.draft not in names:
        raise failure("policy.draft", manifest.policy.draft, f"one of the drafts {names}")
    check_interfaces(manifest)


def _check_visibility(decoder: DecoderInfo) -> None:
    """What the masks of layers follow from."""
    kinds, window = decoder.layer_types, decoder.sliding_window
    if kinds is not None and len(kinds) != decoder.num_layers:
        raise failure("decoder.layer_types", kinds, f"one for each of num_layers ({decoder.num_layers})")
    if ("sliding_attention" in (kinds or ())) != (window is not None):
        raise failure("decoder.sliding_window", window, "set where layer_types has sliding_attention")
    causal = {"decoder.sliding_window": window, "decoder.max_block": decoder.max_block}
    for name, value in causal.items():
        if value is not None and (decoder.mask_dtype != "bool" or decoder.cross_attention):
            raise failure(name, value, "null with a float mask or cross-attention")


def _check_caches(decoder: DecoderInfo) -> None:
    """What layers keep of the tokens before follows from their kinds."""
    kinds, named = {*(decoder.layer_types or ())} - {LINEAR}, decoder.layer_caches or {}
    if odd := sorted(named.keys() - (kinds - MASKS.keys())):
        raise failure("decoder.layer_caches", odd, "kinds of layer_types that are no attention")
    if missing := sorted(kinds - MASKS.keys() - named.keys()):
        raise failure("decoder.layer_caches", [*named], f"with the caches of {missing[0]} layers")
    for kind, own in named.items():
        names = [cache.name for cache in own]
        odd = [
            name for name in names if not re.fullmatch("[a-z]+(_[a-z]+)*_cache", name) or name in KEY_VALUE
        ]
        if CONV_CACHE not in names or len({*names}) < len(names) or odd:
            raise failure(
                f"decoder.layer_caches.{kind}", names, f"{CONV_CACHE} and other NAME_cache, each once"
            )
    if bool(named) != (decoder.conv_kernel is not None):
        raise failure("decoder.conv_kernel", decoder.conv_kernel, "set where layer_caches is")
    if named and (decoder.mask_dtype != "bool" or decoder.cross_attention):
        raise failure("decoder.layer_caches", [*named], "null with a float mask or cross-attention")
    if decoder.layer_types is not None and not kinds & MASKS.keys():
        raise failure("decoder.layer_types", decoder.layer_types, "at least one kind with attention")


def _check_states(decoder: DecoderInfo, max_width: int) -> None:
    """What layers with linear attention keep."""
    linear, kinds = decoder.linear_attention, decoder.layer_types or []
    if (LINEAR in kinds) != (linear is not None):
        sizes = None if linear is None else linear.to_dict()
        raise failure("decoder.linear_attention", sizes, f"set where layer_types has {LINEAR}")
    if linear is None:
        return
    if linear.num_value_heads % linear.num_key_heads:
        heads = linear.num_key_heads
        raise failure(
            "decoder.linear_attention.num_value_heads", linear.num_value_heads, f"a multiple of {heads}"
        )
    if linear.window < 2 * max_width:
        raise failure("limits.max_width", max_width, f"at most {linear.window // 2} with linear attention")
    if decoder.mask_dtype != "bool" or decoder.cross_attention:
        raise failure("decoder.layer_types", kinds, f"without {LINEAR} for a float mask or cross-attention")


def check_tokens(text: TextInfo, rows: int) -> None:
    """Every token id has a row in the embedding table, which has `rows`."""
    if text.vocab_size != rows:
        raise failure("text.vocab_size", text.vocab_size, f"{rows}, the rows of the embedding table")
    names = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "image_token_id")
    tokens = {name: getattr(text, name) for name in names}
    tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(text.eos_token_ids)}
    for name, token in tokens.items():
        if token is not None and token >= text.vocab_size:
            raise failure(f"text.{name}", token, f"below vocab_size ({text.vocab_size})")


def _check_tensors(manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        expected = math.prod(tensor.shape) * ITEM_SIZES[tensor.dtype]
        if tensor.bytes != expected:
            raise failure(
                f"tensors.{name}.bytes", tensor.bytes, f"{expected}, which its shape and dtype need"
            )
        size, aligned = manifest.weights.bytes, 64
        if tensor.file is not None:
            if tensor.file not in manifest.weights.linked:
                raise failure(f"tensors.{name}.file", tensor.file, "one of 'weights.linked'")
            size, aligned = manifest.weights.linked[tensor.file], ITEM_SIZES[tensor.dtype]
        if tensor.offset + tensor.bytes > size:
            raise failure(f"tensors.{name}.offset", tensor.offset, f"inside weights of {size} bytes")
        if tensor.offset % aligned:
            raise failure(f"tensors.{name}.offset", tensor.offset, f"a multiple of {aligned}")
    table = manifest.tensors.get("embedding_table")
    if table is None:
        raise BundleError("manifest field 'tensors.embedding_table' is missing; build the bundle again")
    width = manifest.decoder.hidden_size
    scales = manifest.tensors.get("embedding_scales")
    if scales is None and (len(table.shape) != 2 or table.shape[1] != width):
        raise failure("tensors.embedding_table.shape", table.shape, f"[vocabulary, {width}]")
    if scales is not None:
        if len(table.shape) != 2 or table.shape[0] != width or table.dtype != "int8":
            raise failure(
                "tensors.embedding_table", [table.dtype, table.shape], f"int8 [{width}, vocabulary]"
            )
        blocks = scales.shape[0] if scales.shape else 0
        fits = len(scales.shape) == 2 and scales.shape[1] == table.shape[1] and scales.dtype in FLOATS
        if not fits or blocks < 1 or width % blocks:
            raise failure(
                "tensors.embedding_scales",
                [scales.dtype, scales.shape],
                f"floats [blocks of {width}, {table.shape[1]}]",
            )
    sides = {"decoder": (manifest.decoder.relative_bias, manifest.decoder.num_heads)}
    if manifest.encoder is not None:
        sides["encoder"] = (manifest.encoder.relative_bias, manifest.encoder.num_heads)
    for side, (bias, heads) in sides.items():
        if bias is None:
            continue
        if bias.max_distance <= bias.num_buckets // 2:
            expected = f"above half of num_buckets ({bias.num_buckets})"
            raise failure(f"{side}.relative_bias.max_distance", bias.max_distance, expected)
        if bias.tensor not in manifest.tensors:
            raise failure(f"{side}.relative_bias.tensor", bias.tensor, "listed under 'tensors'")
        if manifest.tensors[bias.tensor].shape != [bias.num_buckets, heads]:
            shape = manifest.tensors[bias.tensor].shape
            raise failure(
                f"tensors.{bias.tensor}.shape", shape, f"[{bias.num_buckets}, {heads}] (buckets, heads)"
            )
