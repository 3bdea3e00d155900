"""The manifest of a bundle: everything the runtime knows about a model, as checked dataclasses.

`Manifest.from_dict` trusts nothing: every field has a type and a range, every name that points to something
else is looked up, and the first violation raises `BundleError` naming the field and the value. Fields that
this version does not know are kept in `extra` and written back by `to_dict` (later schema versions only add
optional fields). The format is described in docs/architecture.md.
"""

# ruff: noqa: RUF009 - `_checked` returns a dataclass field

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BundleError
from .interfaces import check_interfaces

FORMAT = "vlmexport-bundle"
SCHEMA_VERSION = 1

ITEM_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype name that a manifest may contain."""

ROLES = ("vision", "encoder", "cross_kv", "embed", "segment", "head", "imitation", "commit")
"""Roles of graphs; `segment` and `imitation` graphs are named `role.number`, the others by their role."""

DRAFT_KINDS = ("early-exit", "imitation")
"""Draft kinds this runtime can run; bundles may list others, which are ignored with their graphs."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,199}")
_GIB = 1 << 30

Check = Callable[[Any, str], Any]


def _fail(path: str, value: Any, expected: str) -> BundleError:
    text = repr(value)
    return BundleError(
        f"manifest field {path!r}: {text if len(text) <= 120 else text[:117] + '...'} is not {expected}"
    )


# --- checks of single values: each takes (value, path) and returns the value or raises BundleError ---


def _integer(low: int, high: int) -> Check:
    def check(value: Any, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _fail(path, value, f"an integer in {low}..{high}")
        return value

    return check


def _number(low: float, high: float) -> Check:
    def check(value: Any, path: str) -> float:
        # The comparison refuses NaN and infinity too, and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise _fail(path, value, f"a finite number in {low}..{high}")
        return value

    return check


def _string(longest: int = 300, choices: tuple[str, ...] | None = None) -> Check:
    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise _fail(path, value, f"a string of at most {longest} characters")
        if choices is not None and value not in choices:
            raise _fail(path, value, "one of " + ", ".join(choices))
        return value

    return check


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _fail(path, value, "true or false")
    return value


def _file_name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise _fail(path, value, "a plain file name (no folders, no leading dot)")
    return value


def _bundle_path(value: Any, path: str) -> str:
    """A plain file name, or a path below `plans/`; never one that leaves the bundle."""
    parts = value.split("/") if isinstance(value, str) else []
    if not all(_FILE_NAME.fullmatch(part) for part in parts) or not 1 <= len(parts) <= 4:
        raise _fail(path, value, "a path inside the bundle")
    if len(parts) > 1 and parts[0] != "plans":
        raise _fail(path, value, "a file in the bundle's folder or below plans/")
    return value


def _optional(check: Check) -> Check:
    return lambda value, path: None if value is None else check(value, path)


def _list(item: Check, longest: int, exactly: int | None = None) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) > longest:
            raise _fail(path, value, f"a list of at most {longest} entries")
        if exactly is not None and len(value) != exactly:
            raise _fail(path, value, f"a list of {exactly} entries")
        return [item(entry, f"{path}[{index}]") for index, entry in enumerate(value)]

    return check


def _mapping(item: Check, key: Check, longest: int = 10_000) -> Check:
    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping) or len(value) > longest:
            raise _fail(path, value, f"an object of at most {longest} entries")
        return {key(name, path): item(entry, f"{path}.{name}") for name, entry in value.items()}

    return check


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _fail(path, value, "an object")
    return dict(value)


def _dimension(value: Any, path: str) -> int | str:
    if isinstance(value, str):
        return _string(40)(value, path)
    return _integer(0, 1 << 31)(value, path)


def _checked(check: Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


class _Part:
    """Mixin of the manifest's dataclasses: checked construction from JSON objects and back."""

    extra: dict[str, Any]

    @classmethod
    def _parse(cls, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise _fail(path, value, "an object")
        known = {part.name: part for part in dataclasses.fields(cls) if part.name != "extra"}  # type: ignore[arg-type]
        found: dict[str, Any] = {}
        for name, part in known.items():
            where = f"{path}.{name}" if path else name
            if name in value:
                found[name] = part.metadata["check"](value[name], where)
            elif part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING:
                raise BundleError(f"manifest field {where!r} is missing; build the bundle again")
        extra = {name: entry for name, entry in value.items() if name not in known}
        return cls(**found, extra=extra)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object this part was read from, unknown fields included."""
        out: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            if part.name != "extra":
                out[part.name] = _plain(getattr(self, part.name))
        return out | self.extra


def _plain(value: Any) -> Any:
    if isinstance(value, _Part):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


_TOKEN = _integer(0, 10_000_000)
_LAYERS = _integer(1, 1024)
_WIDTH = _integer(1, 1 << 20)
_HEADS = _integer(1, 1024)
_DTYPE = _string(20, tuple(ITEM_SIZES))


@dataclass(kw_only=True)
class ModelInfo(_Part):
    """Where the model came from."""

    source: str = _checked(_string(4096))
    family: str = _checked(_string(64))
    architecture: str = _checked(_string(200))
    decoder: str = _checked(_string(64))
    fingerprint: str = _checked(_string(200))
    parameters: int = _checked(_integer(0, 10**13))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Limits(_Part):
    """Largest request: positions per sequence, sequences, new positions per pass, encoder rows."""

    max_length: int = _checked(_integer(1, 1 << 21))
    max_batch: int = _checked(_integer(1, 4096))
    max_width: int = _checked(_integer(1, 4096))
    max_source: int | None = _checked(_optional(_integer(0, 1 << 21)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TextInfo(_Part):
    """Tokenizer file, special tokens and prompt layout."""

    tokenizer: str = _checked(_file_name)
    vocab_size: int = _checked(_integer(1, 10_000_000))
    eos_token_ids: list[int] = _checked(_list(_TOKEN, 64))
    pad_token_id: int | None = _checked(_optional(_TOKEN), default=None)
    bos_token_id: int | None = _checked(_optional(_TOKEN), default=None)
    decoder_start_token_id: int | None = _checked(_optional(_TOKEN), default=None)
    image_token_id: int | None = _checked(_optional(_TOKEN), default=None)
    image_rows: int | None = _checked(_optional(_integer(0, 1 << 20)), default=None)
    chat_template: str | None = _checked(_optional(_string(1 << 20)), default=None)
    default_prompt: str | None = _checked(_optional(_string(1 << 16)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ImageInfo(_Part):
    """Image processor settings and the reference implementation they were compared with."""

    processor: str = _checked(_string(100))
    height: int = _checked(_integer(1, 16384))
    width: int = _checked(_integer(1, 16384))
    resample: str = _checked(_string(40))
    rescale_factor: float = _checked(_number(1e-9, 1e3))
    mean: list[float] = _checked(_list(_number(-1e3, 1e3), 3, exactly=3))
    std: list[float] = _checked(_list(_number(1e-6, 1e3), 3, exactly=3))
    reference: str | None = _checked(_optional(_string(200)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RelativeBias(_Part):
    """T5 relative-position bias: a [num_buckets, heads] tensor of the bundle."""

    tensor: str = _checked(_string(200))
    num_buckets: int = _checked(_integer(2, 65536))
    max_distance: int = _checked(_integer(2, 1 << 21))
    extra: dict[str, Any] = field(default_factory=dict)


_RELATIVE_BIAS = _optional(RelativeBias._parse)


@dataclass(kw_only=True)
class DecoderInfo(_Part):
    """Shape of the decoder and how it is cut: segment k holds layers cuts[k]..cuts[k + 1] − 1."""

    num_layers: int = _checked(_LAYERS)
    hidden_size: int = _checked(_WIDTH)
    num_heads: int = _checked(_HEADS)
    num_kv_heads: int = _checked(_HEADS)
    head_dim: int = _checked(_integer(1, 8192))
    position: str = _checked(_string(40, ("relative_bias", "rotary")))
    mask_dtype: str = _checked(_string(20, ("bool", "float32", "float16", "bfloat16")))
    mask_heads: int = _checked(_HEADS)
    cross_attention: bool = _checked(_boolean)
    cuts: list[int] = _checked(_list(_integer(0, 1024), 1025))
    cache_dtype: str = _checked(_string(20, ("float32", "float16", "bfloat16")))
    relative_bias: RelativeBias | None = _checked(_RELATIVE_BIAS, default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class EncoderInfo(_Part):
    """The text encoder of an encoder-decoder model; heads and bias of its float mask."""

    num_heads: int = _checked(_HEADS)
    relative_bias: RelativeBias | None = _checked(_RELATIVE_BIAS, default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ValueInfo(_Part):
    """One graph input or output; symbolic dimensions are strings."""

    name: str = _checked(_string(200))
    dtype: str = _checked(_DTYPE)
    shape: list[int | str] = _checked(_list(_dimension, 8))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class GraphInfo(_Part):
    """One ONNX file; `layers` is [first, end) for segments."""

    file: str = _checked(_file_name)
    role: str = _checked(_string(40, ROLES))
    inputs: list[ValueInfo] = _checked(_list(ValueInfo._parse, 10_000))
    outputs: list[ValueInfo] = _checked(_list(ValueInfo._parse, 10_000))
    layers: list[int] | None = _checked(_optional(_list(_integer(0, 1024), 2, exactly=2)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class WeightsInfo(_Part):
    """The one file that holds every weight."""

    file: str = _checked(_file_name)
    bytes: int = _checked(_integer(0, 4096 * _GIB))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TensorInfo(_Part):
    """A tensor inside `weights` that the runtime itself reads."""

    offset: int = _checked(_integer(0, 4096 * _GIB))
    bytes: int = _checked(_integer(0, 4096 * _GIB))
    dtype: str = _checked(_DTYPE)
    shape: list[int] = _checked(_list(_integer(0, 1 << 31), 8))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DraftInfo(_Part):
    """A proposer of the bundle. `layer` is the cut after which it branches off; `graph` is null for early exit,
    and `fingerprint`, of the trained network, where nothing was trained."""

    name: str = _checked(_string(100))
    kind: str = _checked(_string(40))
    layer: int | None = _checked(_optional(_LAYERS), default=None)
    graph: str | None = _checked(_optional(_string(100)), default=None)
    trained: bool = _checked(_boolean, default=False)
    fingerprint: str | None = _checked(_optional(_string(200)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PolicyInfo(_Part):
    """Defaults of a request: which draft, how many tokens, and when to stop drafting."""

    draft: str | None = _checked(_optional(_string(100)), default=None)
    speculative: bool = _checked(_boolean, default=False)
    draft_length: int = _checked(_integer(0, 4096), default=5)
    confidence_threshold: float | None = _checked(_optional(_number(0.0, 1.0)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class FileInfo(_Part):
    """Size and checksum of a file of the bundle."""

    bytes: int = _checked(_integer(0, 4096 * _GIB))
    sha256: str = _checked(_string(64))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Manifest(_Part):
    """A whole manifest, schema version 1. Construct with `from_dict`."""

    format: str = _checked(_string(40, (FORMAT,)), default=FORMAT)
    schema_version: int = _checked(_integer(1, 1 << 30), default=SCHEMA_VERSION)
    producer: dict[str, Any] = _checked(_object)
    model: ModelInfo = _checked(ModelInfo._parse)
    precision: str = _checked(_string(40))
    limits: Limits = _checked(Limits._parse)
    text: TextInfo = _checked(TextInfo._parse)
    decoder: DecoderInfo = _checked(DecoderInfo._parse)
    graphs: dict[str, GraphInfo] = _checked(_mapping(GraphInfo._parse, _string(100)))
    weights: WeightsInfo = _checked(WeightsInfo._parse)
    tensors: dict[str, TensorInfo] = _checked(_mapping(TensorInfo._parse, _string(200)))
    files: dict[str, FileInfo] = _checked(_mapping(FileInfo._parse, _bundle_path))
    drafts: list[DraftInfo] = _checked(_list(DraftInfo._parse, 1000), default_factory=list)
    policy: PolicyInfo = _checked(PolicyInfo._parse, default_factory=PolicyInfo)
    image: ImageInfo | None = _checked(_optional(ImageInfo._parse), default=None)
    encoder: EncoderInfo | None = _checked(_optional(EncoderInfo._parse), default=None)
    verify_width: int | None = _checked(_optional(_integer(1, 4096)), default=None)
    parity: list[dict[str, Any]] = _checked(_list(_object, 100_000), default_factory=list)
    plans: list[dict[str, Any]] = _checked(_list(_object, 10_000), default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Any) -> Manifest:
        """Check a parsed `manifest.json`. Raises `BundleError` naming the first bad field and its value."""
        if not isinstance(data, Mapping):
            raise BundleError(f"manifest.json holds {type(data).__name__}, not an object")
        if data.get("format") != FORMAT:
            raise _fail("format", data.get("format"), f"{FORMAT!r}; this is not a bundle")
        version = _integer(1, 1 << 30)(data.get("schema_version"), "schema_version")
        if version > SCHEMA_VERSION:
            raise BundleError(
                f"manifest field 'schema_version': {version} is newer than {SCHEMA_VERSION}, the newest that this "
                "vlmexport reads; upgrade with `pip install --upgrade vlmexport`"
            )
        manifest: Manifest = cls._parse(data, "")
        _check_references(manifest)
        return manifest

    @property
    def segments(self) -> list[str]:
        """Names of the segment graphs in order: `segment.0`, `segment.1`, …"""
        return [f"segment.{index}" for index in range(len(self.decoder.cuts) - 1)]

    def draft(self, name: str) -> DraftInfo | None:
        """The draft called `name`, or None."""
        return next((draft for draft in self.drafts if draft.name == name), None)


def _check_references(manifest: Manifest) -> None:
    """Checks between fields; every name that points to something must be found."""
    decoder, graphs = manifest.decoder, manifest.graphs
    cuts = decoder.cuts
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != decoder.num_layers or cuts != sorted(set(cuts)):
        raise _fail("decoder.cuts", cuts, f"a rising list from 0 to num_layers ({decoder.num_layers})")
    if decoder.num_heads % decoder.num_kv_heads:
        raise _fail(
            "decoder.num_kv_heads", decoder.num_kv_heads, f"a divisor of num_heads ({decoder.num_heads})"
        )
    if decoder.mask_heads not in (1, decoder.num_heads):
        raise _fail("decoder.mask_heads", decoder.mask_heads, f"1 or num_heads ({decoder.num_heads})")
    if decoder.position == "relative_bias" and decoder.relative_bias is None:
        raise BundleError(
            "manifest field 'decoder.relative_bias' is null although decoder.position is relative_bias"
        )
    for name, graph in graphs.items():
        base, _, number = name.partition(".")
        numbered = graph.role in ("segment", "imitation")
        if base != graph.role or numbered != number.isdigit() or (not numbered and number):
            expected = f"{graph.role}.NUMBER" if numbered else graph.role
            raise BundleError(
                f"manifest field 'graphs.{name}.role': {graph.role!r} needs the graph name {expected}"
            )
        if graph.file not in manifest.files:
            raise _fail(f"graphs.{name}.file", graph.file, "listed under 'files'")
    for index, name in enumerate(manifest.segments):
        if name not in graphs:
            raise BundleError(f"manifest field 'graphs.{name}' is missing although decoder.cuts is {cuts}")
        expected_layers = [cuts[index], cuts[index + 1]]
        if graphs[name].layers != expected_layers:
            raise _fail(
                f"graphs.{name}.layers", graphs[name].layers, f"{expected_layers}, as decoder.cuts says"
            )
    if len([graph for graph in graphs.values() if graph.role == "segment"]) != len(cuts) - 1:
        raise BundleError(f"manifest field 'graphs' holds other segments than decoder.cuts {cuts} names")
    needed = ["embed", "head"]
    needed += ["cross_kv", "encoder"] if decoder.cross_attention else []
    needed += ["vision"] if manifest.image is not None else []
    for name in needed:
        if name not in graphs:
            raise BundleError(f"manifest field 'graphs.{name}' is missing; build the bundle again")
    if decoder.cross_attention and manifest.encoder is None:
        raise BundleError("manifest field 'encoder' is null although decoder.cross_attention is true")
    for where in (manifest.weights.file, manifest.text.tokenizer):
        if where not in manifest.files:
            raise BundleError(f"manifest field 'files' does not list {where!r}")
    _check_tensors(manifest)
    _check_tokens(manifest)
    names = [draft.name for draft in manifest.drafts]
    for index, draft in enumerate(manifest.drafts):
        if names.count(draft.name) > 1:
            raise _fail(f"drafts[{index}].name", draft.name, "unique")
        if draft.graph is not None and draft.graph not in graphs:
            raise _fail(f"drafts[{index}].graph", draft.graph, "a graph of this bundle")
        if draft.kind in DRAFT_KINDS and draft.layer not in cuts[1:-1]:
            raise _fail(f"drafts[{index}].layer", draft.layer, f"one of the cuts {cuts[1:-1]}")
        if draft.kind == "imitation" and draft.graph != f"imitation.{draft.layer}":
            raise _fail(f"drafts[{index}].graph", draft.graph, f"'imitation.{draft.layer}'")
    if manifest.policy.draft is not None and manifest.policy.draft not in names:
        raise _fail("policy.draft", manifest.policy.draft, f"one of the drafts {names}")
    check_interfaces(manifest)


def _check_tokens(manifest: Manifest) -> None:
    """Every token id has a row in the embedding table."""
    text = manifest.text
    rows = manifest.tensors["embedding_table"].shape[0]
    if text.vocab_size != rows:
        raise _fail("text.vocab_size", text.vocab_size, f"{rows}, the rows of the embedding table")
    names = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "image_token_id")
    tokens = {name: getattr(text, name) for name in names}
    tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(text.eos_token_ids)}
    for name, token in tokens.items():
        if token is not None and token >= text.vocab_size:
            raise _fail(f"text.{name}", token, f"below vocab_size ({text.vocab_size})")


def _check_tensors(manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        expected = math.prod(tensor.shape) * ITEM_SIZES[tensor.dtype]
        if tensor.bytes != expected:
            raise _fail(f"tensors.{name}.bytes", tensor.bytes, f"{expected}, which its shape and dtype need")
        if tensor.offset + tensor.bytes > manifest.weights.bytes:
            raise _fail(
                f"tensors.{name}.offset", tensor.offset, f"inside weights of {manifest.weights.bytes} bytes"
            )
        if tensor.offset % 64:
            raise _fail(f"tensors.{name}.offset", tensor.offset, "a multiple of 64")
    table = manifest.tensors.get("embedding_table")
    if table is None:
        raise BundleError("manifest field 'tensors.embedding_table' is missing; build the bundle again")
    width = manifest.decoder.hidden_size
    if len(table.shape) != 2 or table.shape[1] != width:
        raise _fail("tensors.embedding_table.shape", table.shape, f"[vocabulary, {width}]")
    sides = {"decoder": (manifest.decoder.relative_bias, manifest.decoder.num_heads)}
    if manifest.encoder is not None:
        sides["encoder"] = (manifest.encoder.relative_bias, manifest.encoder.num_heads)
    for side, (bias, heads) in sides.items():
        if bias is None:
            continue
        if bias.max_distance <= bias.num_buckets // 2:
            expected = f"above half of num_buckets ({bias.num_buckets})"
            raise _fail(f"{side}.relative_bias.max_distance", bias.max_distance, expected)
        if bias.tensor not in manifest.tensors:
            raise _fail(f"{side}.relative_bias.tensor", bias.tensor, "listed under 'tensors'")
        if manifest.tensors[bias.tensor].shape != [bias.num_buckets, heads]:
            shape = manifest.tensors[bias.tensor].shape
            raise _fail(
                f"tensors.{bias.tensor}.shape", shape, f"[{bias.num_buckets}, {heads}] (buckets, heads)"
            )
