"""What is cheap to refuse, though it shows only late in a build: sample requests, shapes of tensors, activations, disk
space.

No weight is read, nothing is written, and nothing is traced but the activations, each by itself.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.activations import ACT2CLS, LinearActivation

from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.common.errors import BundleError, ExportError, PromptError, VlmexportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.families import FAMILIES, get_family
from ...runtime.families.chat import chat_ids
from ...runtime.text.meter import TooMuch
from ...runtime.text.tokenizer import Tokenizer, is_panic, unknown_tokens
from ..common.one_line import first_line
from ..families.common.reference import reference_inputs
from ..families.common.sample_inputs import CONVERSATIONS, SENTENCE, Sample, odd_picture
from ..graphs.meta_model import signature
from ..graphs.traced_module import TraceInput, trace
from ..quantization.matrix import integer_bytes
from .text import core_tokenizer, template_file

if TYPE_CHECKING:
    from ..families.common.base import Family
    from .prepared import Prepared

SPARE_BYTES = 16 << 20
"""Disk space asked for beyond the weights: graphs, tokenizer, manifest."""

_accepted: set[tuple] = set()
"""Signatures of activations that were traced in this process."""


def check_early(prepared: Prepared) -> None:
    """Raises the ExportError, or error of the runtime, that tracing, parity or a first request would end with."""
    check_shapes(prepared)
    check_words(prepared.manifest, prepared.checkpoint.folder)
    check_requests(prepared)
    check_activations(prepared.family)


def check_shapes(prepared: Prepared) -> None:
    """Every parameter of the model's class that the checkpoint holds has its shape, and none of a decoder layer is
    missing."""
    checkpoint, language = prepared.checkpoint, prepared.family.language
    layers = f"{language.within(language.layers_path)}."
    for name, shape in checkpoint.names.shapes.items():
        stored = checkpoint.stored(name) if name.startswith(layers) else checkpoint.names.held(name)
        if stored is not None and checkpoint.tensors.shape(stored) != shape:
            actual = checkpoint.tensors.shape(stored)
            raise ExportError(f"tensor {stored} has shape {actual} in the checkpoint, not {shape}")


def check_activations(family: Family) -> None:
    """The runtime knows the operators of every activation that the configuration names.

    Most activations are a few operators of the runtime's list, some need others (`softplus`); tracing one alone takes a
    part of a second, once PyTorch's exporter is loaded, which the build needs anyway.
    """
    kinds = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
    models = [family.language.model, *([] if family.vision is None else [family.vision.model])]
    activations = {
        signature(module): module
        for model in models
        for path, module in model.named_modules()
        # No graph holds a pooler, and "linear" has no operator.
        if isinstance(module, kinds)
        and not isinstance(module, LinearActivation)
        and "pooler" not in path.split(".")
    }
    inputs = [TraceInput("hidden", ("batch", "width", 8))]
    with family.language.hooks():
        for kind, module in activations.items():
            if kind not in _accepted:
                trace(module, lambda m, hidden: (m(hidden),), inputs, ("out",))
                _accepted.add(kind)


def check_words(manifest: Manifest, folder: Any) -> None:
    """Words that are never to be said have tokens of the vocabulary: transformers' `generate` refuses others."""
    vocabulary, words = manifest.text.vocab_size, manifest.generation.bad_words_ids or []
    for token in itertools.chain.from_iterable(words):
        if token >= vocabulary:
            raise ExportError(
                f"{folder}: bad_words_ids holds {token}, beyond the vocabulary of {vocabulary}; correct "
                "generation_config.json"
            )


def check_requests(prepared: Prepared) -> None:
    """The tokenizer as it will be written reads a sentence, and every request that the build itself will make is laid
    out as the model's own processor lays it out."""
    manifest, family = prepared.manifest, prepared.family
    folder = prepared.checkpoint.folder
    try:
        core = core_tokenizer(prepared.checkpoint)
        tokenizer = Tokenizer(core)
        unknown = unknown_tokens(tokenizer.post_processor, ("single", "pair"))
        if unknown:
            raise ExportError(
                f"the tokenizer of {folder} puts the special token {unknown[0]!r:.80} around texts but does not define "
                "it; save it again with its tokens"
            )
        ids = tokenizer.encode(SENTENCE)
        if len(ids) and int(ids.max()) >= manifest.text.vocab_size:
            raise ExportError(
                f"the tokenizer of {folder} gives token {int(ids.max())}; the model knows {manifest.text.vocab_size}: "
                "is it the model's own?"
            )
        check_chat(manifest, tokenizer, folder)
        if prepared.request.parity and family.name in FAMILIES:
            _try_requests(prepared, Sample(manifest, tokenizer))
    except VlmexportError:
        raise
    except Exception as error:  # tokenizers, templates and processors of any origin fail in many ways
        raise_if_foreign(error)
        raise ExportError(
            f"a sample request cannot be prepared with the files of {folder}: {first_line(error)}"
        ) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ExportError(f"the tokenizer of {folder} cannot be used: {first_line(error)}") from error


def check_chat(manifest: Manifest, tokenizer: Tokenizer, folder: Path) -> None:
    """The runtime renders the chat template within its bounds, whatever conversation it accepts."""
    text = manifest.text
    if not text.chat_template:
        return
    for conversation in CONVERSATIONS:
        try:
            chat_ids(Sample(manifest, tokenizer), text.chat_template, conversation)
        except (BundleError, TooMuch) as error:
            raise _unusable(text.chat_template, folder, error) from error
        except PromptError as error:
            if conversation is CONVERSATIONS[0]:  # what every request without messages is laid out as
                raise _unusable(text.chat_template, folder, error) from error
            # No turns of the system, say: the runtime refuses them, in transformers they fail or are dropped.


def _unusable(template: str, folder: Path, error: Exception) -> ExportError:
    """What to say of a chat template that does not serve, with the file that it stands in."""
    reason = str(error).removeprefix("manifest field 'text.chat_template': ")
    return ExportError(f"the chat template of {template_file(folder, template)} cannot be used: {reason}")


def _try_requests(prepared: Prepared, sample: Sample) -> None:
    from ..parity.generation import compared_prompt
    from ..parity.preparation import compare_preparation
    from ..parity.recorded import compared_rows

    family, template = prepared.family, sample.manifest.text.chat_template
    try:
        compare_preparation(sample, family)
    except ExportError as error:
        if not template:
            raise
        file = template_file(prepared.checkpoint.folder, template)
        raise ExportError(f"{error}; the chat template is that of {file}") from error
    image = None if family.vision is None else odd_picture(0)
    get_family(family.name).prepare(sample, image, compared_prompt(sample.manifest))
    reference_inputs(family, "realistic", 0, compared_rows(sample.manifest.limits.max_length))


def estimated_bytes(prepared: Prepared) -> int:
    """The bundle's bytes, from the checkpoint's shapes alone (graphs say exactly, once they are traced).

    Tensors that a parameter of the model's class is read from count once, tied tables as one; buffers of integers are never
    stored. TensorRT plans hold every weight once more. So does the file beside the bundle in which rounded integers wait.
    """
    checkpoint, language, manifest = prepared.checkpoint, prepared.family.language, prepared.manifest
    tensors = checkpoint.tensors
    embedding, head = language.embedding, language.head
    used = {stored for name in checkpoint.names.shapes if (stored := checkpoint.names.held(name)) is not None}
    used = {s for s in used if "float" in tensors.dtype(s) and tensors.shape(s) != embedding.shape}
    used |= {*embedding.names, *head.names}
    if prepared.request.link_weights:
        places = {stored: tensors.place(stored) for stored in used}
        used = {s for s, place in places.items() if place is None or place.dtype != manifest.weights_dtype}
    integers = {s: kind for s in used if (kind := tensors.quantized.get(s)) is not None}
    used -= integers.keys()
    own = sum(integer_bytes(kind, math.prod(tensors.shape(stored))) for stored, kind in integers.items())
    count = sum(math.prod(tensors.shape(stored)) for stored in used)
    networks = [getattr(draft, "network", None) for draft in prepared.selection.drafts]
    count += sum(p.numel() for network in networks if network is not None for p in network.parameters())
    item = ITEM_SIZES[manifest.weights_dtype]
    if prepared.plans is not None:
        item += 4 if prepared.plans.precision in ("fp32", "float32") else 2
    waiting = getattr(tensors, "waiting_bytes", 0)
    return count * item + own * (1 if prepared.plans is None else 2) + waiting + SPARE_BYTES
