"""The manifest of a bundle: everything the runtime knows about a model, as checked dataclasses.

`Manifest.from_dict` trusts nothing: every field has a type and a range, every name that points to something
else is looked up, and the first violation raises `BundleError` naming the field and the value. Fields that
this version does not know are kept in `extra` and written back by `to_dict` (later schema versions only add
optional fields). The format is described in docs/reference/bundle.md.
"""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import BundleError, OptionError
from ..common.validation import ADAPTIVE
from .checks import check_references
from .combined_drafts import SIGN, combination, no_combination, of_requests
from .decoder_info import DecoderInfo, EncoderInfo
from .draft_info import DraftInfo
from .draft_options import DraftCache
from .schema import (
    FLOATS,
    GIB,
    ITEM_SIZES,
    Part,
    boolean,
    bundle_path,
    checked,
    dimension,
    failure,
    file_name,
    integer,
    json_object,
    list_of,
    mapping_of,
    number,
    optional,
    string,
)
from .target_weights import TargetWeights

STORED_ADAPTIVE = (*ADAPTIVE, "logistic")
"""What manifests may say; "logistic", which an older release had, is served as "session"."""

FORMAT = "vlmexport-bundle"
SCHEMA_VERSION = 2

LOWERINGS = ("native", "portable")
"""Of a plan: the bundle's graph as it is, or in operators that every TensorRT has (plans of older versions are native)."""

_TOKEN = integer(0, 10_000_000)
_DTYPE = string(20, tuple(ITEM_SIZES))


@dataclass(kw_only=True)
class TrainedFrom(Part):
    """The model that a target was before it was trained further."""

    name: str = checked(string(200))
    fingerprint: str = checked(string(200))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class AdapterInfo(Part):
    """The adapter (a LoRA, say) that was merged into a model."""

    name: str = checked(string(200))
    fingerprint: str = checked(string(200))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelInfo(Part):
    """Where the model came from; `trained_from` where its weights changed while its draft was trained, `adapter` where
    one was merged into them."""

    source: str = checked(string(4096))
    family: str = checked(string(64))
    architecture: str = checked(string(200))
    decoder: str = checked(string(64))
    fingerprint: str = checked(string(200))
    parameters: int = checked(integer(0, 10**13))
    trained_from: TrainedFrom | None = checked(optional(TrainedFrom.parse), default=None)
    adapter: AdapterInfo | None = checked(optional(AdapterInfo.parse), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Limits(Part):
    """Largest request: positions per sequence, sequences, new positions per pass, encoder rows, image rows."""

    max_length: int = checked(integer(1, 1 << 21))
    max_batch: int = checked(integer(1, 4096))
    max_width: int = checked(integer(1, 4096))
    max_source: int | None = checked(optional(integer(0, 1 << 21)), default=None)
    max_image_rows: int | None = checked(optional(integer(1, 1 << 21)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TextInfo(Part):
    """Tokenizer file, special tokens and prompt layout; `image_rows` is null where it depends on the picture.

    `special_tokens` are the tokenizer's own by name ("eos_token" → "</s>"), which a chat template may write; None in
    bundles of older versions. They may differ from the ids above, which are the model's.
    """

    tokenizer: str = checked(file_name)
    vocab_size: int = checked(integer(1, 10_000_000))
    eos_token_ids: list[int] = checked(list_of(_TOKEN, 64))
    pad_token_id: int | None = checked(optional(_TOKEN), default=None)
    bos_token_id: int | None = checked(optional(_TOKEN), default=None)
    decoder_start_token_id: int | None = checked(optional(_TOKEN), default=None)
    image_token_id: int | None = checked(optional(_TOKEN), default=None)
    image_rows: int | None = checked(optional(integer(0, 1 << 20)), default=None)
    chat_template: str | None = checked(optional(string(1 << 20)), default=None)
    default_prompt: str | None = checked(optional(string(1 << 16)), default=None)
    special_tokens: dict[str, str] | None = checked(
        optional(mapping_of(string(1000), string(200), 1000)), default=None
    )
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class VideoInfo(Part):
    """How videos are read: the token that stands for one, frames per second that the model sees and their bounds, and
    their pixels; a family says of what.

    `max_rows` are embeddings of a whole video where its frames can be made smaller, `max_frame_rows` those of a frame, and
    `tokens_per_second` position steps per second; None where the family reads videos in another way."""

    token_id: int = checked(_TOKEN)
    fps: float = checked(number(1e-3, 1e3))
    min_frames: int = checked(integer(1, 1 << 20))
    max_frames: int = checked(integer(1, 1 << 20))
    min_pixels: int = checked(integer(1, 1 << 32))
    max_pixels: int = checked(integer(1, 1 << 32))
    max_rows: int | None = checked(optional(integer(1, 1 << 32)), default=None)
    max_frame_rows: int | None = checked(optional(integer(1, 1 << 32)), default=None)
    tokens_per_second: float | None = checked(optional(number(0, 1e6)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


_VIDEO = optional(VideoInfo.parse)


@dataclass(kw_only=True)
class ImageInfo(Part):
    """Image processor settings and the reference implementation they were compared with; `height` and `width` are
    null where they depend on the picture, `video` where the model reads none, and a processor's own settings are in
    `extra`."""

    processor: str = checked(string(100))
    height: int | None = checked(optional(integer(1, 16384)), default=None)
    width: int | None = checked(optional(integer(1, 16384)), default=None)
    resample: str = checked(string(40))
    rescale_factor: float = checked(number(1e-9, 1e3))
    mean: list[float] = checked(list_of(number(-1e3, 1e3), 3, exactly=3))
    std: list[float] = checked(list_of(number(1e-6, 1e3), 3, exactly=3))
    reference: str | None = checked(optional(string(200)), default=None)
    video: VideoInfo | None = checked(_VIDEO, default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ValueInfo(Part):
    """One graph input or output; symbolic dimensions are strings."""

    name: str = checked(string(200))
    dtype: str = checked(_DTYPE)
    shape: list[int | str] = checked(list_of(dimension, 8))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class GraphInfo(Part):
    """One ONNX file; `layers` is [first, end) for segments, `parameters` counts the numbers of its weights, `integers`
    those of them that are integers, `integer_bytes` what these take (None in older bundles, where a draft's `weights_dtype`
    says of which type they are). `float32` is the file of the same graph that computes in float32 on weights of another type, null in a bundle of float32. `folded`
    is the file of the same graph without groups of queries that share a key/value head, null where it has none, and in
    bundles of older versions; `float32_folded` is that of `float32`, in bundles with `target_weights`. Graphs of roles that
    this version does not know belong to drafts that it does not know, and are ignored with them."""

    file: str = checked(file_name)
    role: str = checked(string(40))
    inputs: list[ValueInfo] = checked(list_of(ValueInfo.parse, 10_000))
    outputs: list[ValueInfo] = checked(list_of(ValueInfo.parse, 10_000))
    layers: list[int] | None = checked(optional(list_of(integer(0, 1024), 2, exactly=2)), default=None)
    float32: str | None = checked(optional(file_name), default=None)
    folded: str | None = checked(optional(file_name), default=None)
    float32_folded: str | None = checked(optional(file_name), default=None)
    parameters: int | None = checked(optional(integer(0, 1 << 53)), default=None)
    integers: int | None = checked(optional(integer(0, 1 << 53)), default=None)
    integer_bytes: int | None = checked(optional(integer(0, 1 << 53)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class WeightsInfo(Part):
    """The file that holds every weight once, but for those in `linked`: files of the checkpoint that the bundle was built
    from, with their bytes."""

    file: str = checked(file_name)
    bytes: int = checked(integer(0, 4096 * GIB))
    linked: dict[str, int] = checked(
        mapping_of(integer(0, 4096 * GIB), file_name, 1000), default_factory=dict
    )
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all files that hold weights."""
        return self.bytes + sum(self.linked.values())


@dataclass(kw_only=True)
class TensorInfo(Part):
    """A tensor that the runtime itself reads, in the file of `weights` or in the `linked` one that `file` names."""

    offset: int = checked(integer(0, 4096 * GIB))
    bytes: int = checked(integer(0, 4096 * GIB))
    dtype: str = checked(_DTYPE)
    shape: list[int] = checked(list_of(integer(0, 1 << 31), 8))
    file: str | None = checked(optional(file_name), default=None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PolicyInfo(Part):
    """Defaults of a request: which draft, how many tokens (more `draft_nodes` than `draft_length` ask for a tree), when
    to stop drafting, and over what acceptance is learned; "logistic", of an older release, is
    served as "session"; "confidence": Draft & Verify's threshold (`AdaptiveThreshold`)."""

    draft: str | None = checked(optional(string(100)), default=None)
    speculative: bool = checked(boolean, default=False)
    draft_length: int = checked(integer(0, 4096), default=5)
    draft_nodes: int | None = checked(optional(integer(1, 4096)), default=None)
    confidence_threshold: float | None = checked(optional(number(0.0, 1.0)), default=None)
    adaptive: str = checked(string(20, STORED_ADAPTIVE), default="session")
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class GenerationInfo(Part):
    """What the model's `generation_config` asks of greedy decoding. The names and meanings are transformers';
    `ignored` names what this version does not do (beams, say)."""

    repetition_penalty: float = checked(number(1e-3, 1e3), default=1.0)
    no_repeat_ngram_size: int = checked(integer(0, 1 << 20), default=0)
    min_length: int = checked(integer(0, 1 << 21), default=0)
    min_new_tokens: int = checked(integer(0, 1 << 21), default=0)
    suppress_tokens: list[int] = checked(list_of(_TOKEN, 1 << 20), default_factory=list)
    begin_suppress_tokens: list[int] = checked(list_of(_TOKEN, 1 << 20), default_factory=list)
    bad_words_ids: list[list[int]] = checked(list_of(list_of(_TOKEN, 4096), 1 << 16), default_factory=list)
    ignored: list[str] = checked(list_of(string(200), 200), default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class FileInfo(Part):
    """Size and checksum of a file of the bundle."""

    bytes: int = checked(integer(0, 4096 * GIB))
    sha256: str = checked(string(64))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Manifest(Part):
    """A whole manifest, schema version 2. Construct with `from_dict`.

    `weights_dtype` is how weights are stored, `compute_dtype` what hidden states between graphs hold, `cache_dtype`
    what the key/value cache holds; an engine may compute and cache in a wider type. `costs` holds measured pass times
    by machine, and what pays there; `acceptance` what drafts accepted, on any machine. `target_weights` says how the
    target's own matrices are stored where they are integers; `certificates` what `verify --certificate` counted.
    `sha256` is what a file said of its other fields when it was read (`checksum.py`); writers compute it anew.
    """

    format: str = checked(string(40, (FORMAT,)), default=FORMAT)
    schema_version: int = checked(integer(1, 1 << 30), default=SCHEMA_VERSION)
    producer: dict[str, Any] = checked(json_object)
    model: ModelInfo = checked(ModelInfo.parse)
    weights_dtype: str = checked(_DTYPE)
    compute_dtype: str = checked(string(20, FLOATS))
    cache_dtype: str = checked(string(20, FLOATS))
    limits: Limits = checked(Limits.parse)
    text: TextInfo = checked(TextInfo.parse)
    decoder: DecoderInfo = checked(DecoderInfo.parse)
    graphs: dict[str, GraphInfo] = checked(mapping_of(GraphInfo.parse, string(100)))
    weights: WeightsInfo = checked(WeightsInfo.parse)
    tensors: dict[str, TensorInfo] = checked(mapping_of(TensorInfo.parse, string(200)))
    files: dict[str, FileInfo] = checked(mapping_of(FileInfo.parse, bundle_path))
    drafts: list[DraftInfo] = checked(list_of(DraftInfo.parse, 1000), default_factory=list)
    policy: PolicyInfo = checked(PolicyInfo.parse, default_factory=PolicyInfo)
    image: ImageInfo | None = checked(optional(ImageInfo.parse), default=None)
    encoder: EncoderInfo | None = checked(optional(EncoderInfo.parse), default=None)
    verify_width: int | None = checked(optional(integer(2, 4096)), default=None)
    target_weights: TargetWeights | None = checked(optional(TargetWeights.parse), default=None)
    generation: GenerationInfo = checked(GenerationInfo.parse, default_factory=GenerationInfo)
    costs: list[dict[str, Any]] = checked(list_of(json_object, 1000), default_factory=list)
    acceptance: list[dict[str, Any]] = checked(list_of(json_object, 10_000), default_factory=list)
    parity: list[dict[str, Any]] = checked(list_of(json_object, 100_000), default_factory=list)
    plans: list[dict[str, Any]] = checked(list_of(json_object, 10_000), default_factory=list)
    certificates: list[dict[str, Any]] = checked(list_of(json_object, 1000), default_factory=list)
    sha256: str | None = checked(optional(string(64)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Any) -> Manifest:
        """Check a parsed `manifest.json`. Raises `BundleError` naming the first bad field and its value."""
        if not isinstance(data, Mapping):
            raise BundleError(f"manifest.json holds {type(data).__name__}, not an object")
        if data.get("format") != FORMAT:
            raise failure("format", data.get("format"), f"{FORMAT!r}; this is not a bundle")
        version = integer(1, 1 << 30)(data.get("schema_version"), "schema_version")
        if version > SCHEMA_VERSION:
            raise BundleError(
                f"manifest field 'schema_version': {version} is newer than {SCHEMA_VERSION}, the newest that this "
                "vlmexport reads; upgrade with `pip install --upgrade vlmexport`"
            )
        if version < SCHEMA_VERSION:
            raise BundleError(
                f"manifest field 'schema_version': {version} is of an older vlmexport, this one reads {SCHEMA_VERSION}; "
                "build the bundle again"
            )
        manifest: Manifest = cls.parse(data, "")
        check_references(manifest)
        from .stored_entries import check_entries  # here: it imports this module

        check_entries(manifest)
        return manifest

    @property
    def segments(self) -> list[str]:
        """Names of the segment graphs in order: `segment.0`, `segment.1`, …"""
        return [f"segment.{index}" for index in range(len(self.decoder.cuts) - 1)]

    @property
    def attending(self) -> dict[str, DraftCache]:
        """Name → cache of every draft on the target's layers that attends itself. Its one layer of keys and values has a row
        for every position, as those of the target have, and lies beside them."""
        return {
            draft.name: cache
            for draft in self.drafts
            if draft.layer is not None and (cache := draft.options.own_cache) is not None
        }

    def integer_bytes(self, graph: str) -> int:
        """Bytes of the integers among the weights of a graph; every plan holds as many."""
        stored = self.graphs[graph].integer_bytes
        if stored is not None:
            return stored
        owner = next((draft for draft in self.drafts if graph in draft.graphs.values()), None)
        numbers = self.graphs[graph].integers or 0
        return -(-numbers // 2) if owner is not None and owner.weights_dtype == "int4" else numbers

    @property
    def widest_tree(self) -> int:
        """Most nodes of a token tree, its root included: as many as a pass has positions."""
        return self.limits.max_width if self.verify_width is None else self.verify_width

    @property
    def exact_trees(self) -> bool:
        """Whether trees may be verified. A node behind a sibling lies in another slot than in plain decoding, where attention
        adds in another order: of floats the last bits change, of rows that are rounded to 8 bits whole steps. The state of linear
        attention has no branches."""
        return self.target_weights is None and self.decoder.linear_attention is None

    def draft(self, name: str) -> DraftInfo | None:
        """The draft or the combination of drafts (`combined_drafts.py`) called `name`, or None."""
        entry = next((draft for draft in self.drafts if draft.name == name), None)
        return entry or of_requests(name) or combination(self.drafts, name)

    def choose_draft(self, name: str | None) -> DraftInfo | None:
        """The draft called `name`, or the preferred one of that kind; the bundle's default for None, which is none
        when its policy says that speculation is off; None for "none".

        Raises `OptionError` for a name that the bundle has not.
        """
        if name == "none":
            return None
        default = None if self.policy.draft is None else self.draft(self.policy.draft)
        if name is None:
            return default if self.policy.speculative else None
        exact = self.draft(name)
        of_kind = [draft for draft in self.drafts if draft.kind == name]
        if exact is None and not of_kind:
            if SIGN in name:
                raise no_combination(self.drafts, name)
            known = ", ".join(draft.name for draft in self.drafts) or "no draft"
            raise OptionError(f"draft: the bundle has no {name!r:.80}; it has {known}; none decodes plainly")
        return exact or (default if default in of_kind else of_kind[0])
