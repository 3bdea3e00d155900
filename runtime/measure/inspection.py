"""Facts about a bundle, read from its manifest: what `vlmexport inspect` shows."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from ..bundle.folder import Bundle
from ..bundle.manifest import Manifest
from ..bundle.schema import ITEM_SIZES
from ..bundle.stored_acceptance import stored_acceptance
from ..bundle.stored_costs import every_costs
from ..graphs.states import sequence_states
from ..graphs.values import layer_caches


def cache_bytes(manifest: Manifest, layers: Iterable[int]) -> int:
    """Bytes that one position adds to the caches of some decoder layers."""
    shapes = [shape for layer in layers for shape in layer_caches(manifest.decoder, layer).values()]
    return sum(heads * size for heads, size in shapes) * ITEM_SIZES[manifest.cache_dtype]


def kv_bytes_per_token(manifest: Manifest) -> int:
    """Bytes that one position adds to the caches of all decoder layers, and of drafts that attend beside them
    (`Manifest.attending`)."""
    beside = sum(cache.num_kv_heads * cache.head_dim for cache in manifest.attending.values())
    layers = cache_bytes(manifest, range(manifest.decoder.num_layers))
    return layers + 2 * beside * ITEM_SIZES[manifest.cache_dtype]


def state_bytes(manifest: Manifest, layers: Iterable[int]) -> int:
    """Bytes of the states that some decoder layers keep of one sequence, whatever its length."""
    return sum(ITEM_SIZES[dtype] * prod(shape) for dtype, shape in sequence_states(manifest, layers).values())


def kv_bytes_per_sequence(manifest: Manifest) -> int:
    """Bytes of the buffers of one sequence: keys and values of max_length + max_width positions, and its states."""
    limits, layers = manifest.limits, range(manifest.decoder.num_layers)
    capacity = limits.max_length + limits.max_width
    return capacity * kv_bytes_per_token(manifest) + state_bytes(manifest, layers)


def cross_kv_bytes_per_row(manifest: Manifest) -> int:
    """Bytes that one row which a sequence looks at adds to the cross-attention of all decoder layers; 0 without."""
    decoder = manifest.decoder
    num_values = 2 * decoder.num_layers * decoder.num_heads * decoder.head_dim
    return num_values * ITEM_SIZES[manifest.cache_dtype] if decoder.cross_attention else 0


def kv_bytes_per_image(manifest: Manifest) -> int:
    """Bytes of keys and values that the embeddings of one picture take, of as many as it may have; 0 for a model of
    text."""
    num_embeds = manifest.text.image_rows or manifest.limits.max_image_rows or 0
    return num_embeds * (cross_kv_bytes_per_row(manifest) or kv_bytes_per_token(manifest))


def facts(bundle: Bundle) -> dict[str, Any]:
    """Everything about a bundle as one JSON object (schema: `schemas/inspect-1.json`)."""
    manifest = bundle.manifest
    text, decoder = manifest.text, manifest.decoder
    files = manifest.files
    return {
        "schema_version": 1,
        "path": str(bundle.path),
        "model": manifest.model.to_dict(),
        "producer": manifest.producer,
        "precision": manifest.weights_dtype,
        "compute_dtype": manifest.compute_dtype,
        "limits": manifest.limits.to_dict(),
        "decoder": {
            "num_layers": decoder.num_layers,
            "hidden_size": decoder.hidden_size,
            "num_heads": decoder.num_heads,
            "num_kv_heads": decoder.num_kv_heads,
            "head_dim": decoder.head_dim,
            "position": decoder.position,
            "cross_attention": decoder.cross_attention,
            "cuts": decoder.cuts,
            "cache_dtype": manifest.cache_dtype,
        },
        "kv": {
            "bytes_per_token": kv_bytes_per_token(manifest),
            "bytes_per_image": kv_bytes_per_image(manifest),
            "bytes_per_sequence": kv_bytes_per_sequence(manifest),
            "bytes": manifest.limits.max_batch * kv_bytes_per_sequence(manifest),
        },
        "text": {
            "vocab_size": text.vocab_size,
            "eos_token_ids": text.eos_token_ids,
            "chat_template": text.chat_template is not None,
            "default_prompt": text.default_prompt,
            "image_rows": text.image_rows,
        },
        "image": None if manifest.image is None else manifest.image.to_dict(),
        "graphs": [
            {
                "name": name,
                "role": graph.role,
                "file": graph.file,
                "bytes": files[graph.file].bytes,
                "float32": graph.float32,
                "folded": graph.folded,
                "float32_folded": graph.float32_folded,
                "layers": graph.layers,
                "inputs": [value.to_dict() for value in graph.inputs],
                "outputs": [value.to_dict() for value in graph.outputs],
            }
            for name, graph in manifest.graphs.items()
        ],
        "weights": manifest.weights.to_dict(),
        "bytes": sum(info.bytes for info in files.values()),
        "drafts": [draft.to_dict() for draft in manifest.drafts],
        "policy": manifest.policy.to_dict(),
        "calibrated": [
            {
                "machine": entry.machine,
                "threads": entry.threads,
                "date": entry.date,
                "choice": entry.choice.to_dict(),
            }
            for entry in every_costs(manifest)
            if entry.choice is not None
        ],
        "acceptance": [entry.to_dict() for entry in stored_acceptance(manifest)],
        "generation": manifest.generation.to_dict(),
        "verify_width": manifest.verify_width,
        "target_weights": None if manifest.target_weights is None else manifest.target_weights.to_dict(),
        "certificates": manifest.certificates,
        "parity": manifest.parity,
        "plans": manifest.plans,
        "files": {name: info.to_dict() for name, info in files.items()},
    }
