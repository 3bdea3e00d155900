"""What a bundle says of itself, as the runtime's own dataclasses (docs/reference/bundle.md)."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...runtime.bundle.checks import check_tokens
from ...runtime.bundle.decoder_info import DecoderInfo, EncoderInfo
from ...runtime.bundle.manifest import (
    AdapterInfo,
    DraftInfo,
    GenerationInfo,
    GraphInfo,
    ImageInfo,
    Limits,
    Manifest,
    ModelInfo,
    PolicyInfo,
    TensorInfo,
    TextInfo,
    TrainedFrom,
    ValueInfo,
    WeightsInfo,
)
from ...runtime.common.errors import BundleError, UnsupportedModelError
from ...runtime.graphs.values import EMBEDDING
from ..checkpoint import Checkpoint
from ..drafts.selection import DraftSelection
from ..families.common.base import Family
from ..families.common.parts import GraphSpec
from ..graphs.dtypes import NAMES
from ..graphs.weights import WEIGHTS_FILE, WeightRef, WeightStore, is_number
from ..quantization.blocks import LIMITS
from .generation import describe_generation
from .request import BuildRequest
from .target_weights import describe_target_weights
from .text import describe_text


def describe(
    request: BuildRequest, checkpoint: Checkpoint, family: Family, selection: DraftSelection
) -> Manifest:
    """All of a manifest that is known before a graph is traced; `export` and later steps fill in the rest.

    Raises BundleError for a value that no manifest may hold, UnsupportedModelError for what cannot be described.
    """
    shape, precision = family.decoder, family.precision(request.precision)
    origin = checkpoint.trained_from
    text = TextInfo.parse(describe_text(checkpoint, family, request.default_prompt), "text")
    check_tokens(text, family.tensors()["embedding_table"].shape[0])
    image, encoder = family.image(), family.encoder()
    try:
        fields = {**asdict(shape), "cuts": selection.cuts(shape.num_layers)}
        fields["max_block"] = family.max_block(request.length)
        if shape.mask_dtype != "bool":
            fields["mask_dtype"] = precision.mask
        decoder = DecoderInfo.parse(fields, "decoder")
    except BundleError as error:
        raise UnsupportedModelError(
            f"the configuration in {checkpoint.folder} cannot be exported ({error}); correct config.json"
        ) from error
    return Manifest(
        producer=_producer(),
        model=ModelInfo(
            source=_source(request, checkpoint),
            family=family.name,
            architecture=checkpoint.architecture,
            decoder=family.decoder_name,
            fingerprint="",
            parameters=0,
            trained_from=None
            if origin is None
            else TrainedFrom(name=origin.name, fingerprint=origin.fingerprint),
            adapter=None
            if checkpoint.adapter is None
            else AdapterInfo(name=checkpoint.adapter.name[:200], fingerprint=checkpoint.adapter.fingerprint),
        ),
        weights_dtype=precision.weights,
        target_weights=describe_target_weights(checkpoint, family, request.weights),
        compute_dtype=precision.compute,
        cache_dtype=precision.cache,
        limits=Limits(
            max_length=request.length,
            max_batch=request.max_batch,
            max_width=request.max_width,
            max_source=family.max_source(request.max_source),
            max_image_rows=None if family.vision is None else family.vision.max_embeds,
        ),
        text=text,
        image=None if image is None else ImageInfo.parse(image, "image"),
        decoder=decoder,
        encoder=None if encoder is None else EncoderInfo.parse(encoder, "encoder"),
        graphs={},
        weights=WeightsInfo(file=WEIGHTS_FILE, bytes=0),
        tensors={},
        files={},
        drafts=[
            DraftInfo.parse(draft.entry(precision.weights), f"drafts[{index}]")
            for index, draft in enumerate(selection.drafts)
        ],
        policy=PolicyInfo(
            draft=None if selection.default is None else selection.default.name,
            speculative=selection.speculative,
            draft_length=min(selection.draft_length, max(1, (request.verify_width or request.max_width) - 1)),
        ),
        verify_width=request.verify_width,
        generation=GenerationInfo.parse(describe_generation(checkpoint), "generation"),
    )


def _source(request: BuildRequest, checkpoint: Checkpoint) -> str:
    """Where the model came from; of a folder only its name, which says nothing of the machine."""
    local = checkpoint.alias is None and Path(request.model).is_dir()
    return checkpoint.folder.resolve().name if local else request.model


def _producer() -> dict[str, Any]:
    packages = ("vlmexport", "torch", "transformers", "onnx")
    now = (
        datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    )
    return {**{p: importlib.metadata.version(p) for p in packages}, "created": now}


def describe_graph(spec: GraphSpec) -> GraphInfo:
    """A graph's entry in the manifest."""
    graph = spec.model.graph
    integers = [weight for weight in external_weights(spec.model) if NAMES[weight.dtype] in LIMITS]
    return GraphInfo(
        file=spec.file,
        role=spec.role,
        float32=spec.wide_file,
        folded=spec.folded_file,
        float32_folded=spec.wide_folded_file,
        parameters=count(external_weights(spec.model)),
        integers=count(integers) or None,
        integer_bytes=sum(weight.nbytes for weight in integers) or None,
        layers=None if spec.layers is None else list(spec.layers),
        inputs=[describe_value(v) for v in graph.inputs],
        outputs=[describe_value(v) for v in graph.outputs],
    )


def external_weights(model: ir.Model) -> list[ir.ExternalTensor]:
    """The weights that a graph refers to."""
    values = [value.const_value for value in model.graph.initializers.values()]
    return [value for value in values if isinstance(value, ir.ExternalTensor)]


def count(weights: Iterable[ir.ExternalTensor]) -> int:
    """Numbers of the networks among `weights`: scales, zero points and orders of integers are none."""
    return sum(weight.size for weight in weights if is_number((weight.name or "").removesuffix(".T")))


def describe_value(value: ir.Value) -> ValueInfo:
    """Name, dtype and shape of a graph's input or output."""
    assert value.name is not None and value.shape is not None and value.dtype is not None
    shape = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return ValueInfo(name=value.name, dtype=NAMES[value.dtype], shape=shape)


def describe_tensors(store: WeightStore, tensors: Mapping[str, WeightRef]) -> dict[str, TensorInfo]:
    """The tensors that the runtime reads itself; they get the first slots of the weights file."""
    tensors = _stored_as(store, tensors)
    slots = {name: store.slot(ref) for name, ref in tensors.items()}
    return {
        name: TensorInfo(
            offset=slots[name].offset,
            bytes=slots[name].bytes,
            dtype=store.stored_dtype(ref),
            shape=list(ref.shape),
            file=None if slots[name].file == WEIGHTS_FILE else slots[name].file,
        )
        for name, ref in tensors.items()
    }


def _stored_as(store: WeightStore, tensors: Mapping[str, WeightRef]) -> dict[str, WeightRef]:
    """`tensors` where some are integers: the embedding table is two, others are read by graphs alone."""
    stored: dict[str, WeightRef] = {}
    for name, ref in tensors.items():
        integers = store.integers_of(ref)
        if integers is None:
            stored[name] = ref
        elif name == EMBEDDING[0]:
            stored |= dict(zip(EMBEDDING, (integers.integers, integers.scales), strict=True))
    return stored
