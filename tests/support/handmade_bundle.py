"""Bundles written by hand for tests of the edges: real files, sums and tokenizer; graphs are never executed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from vlmexport.runtime.bundle.interfaces import interface
from vlmexport.runtime.bundle.manifest import (
    DecoderInfo,
    EncoderInfo,
    ImageInfo,
    TensorInfo,
    TextInfo,
)
from vlmexport.runtime.bundle.seal import sealed

WORDS = [
    "a", "the", "cup", "red", "blue", "table", "on", "robot", "is", "stands", "describe", "scene", "left", "right",
]  # fmt: skip


def metaspace_tokenizer() -> Tokenizer:
    """A T5-like tokenizer: unigram, Metaspace, `</s>` appended, `<image>` as an added token."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS] + [("▁", -4.0)]
    pieces += [(character, -6.0) for character in "abcdefghijklmnopqrstuvwxyzäé€.,!?'0123456789"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<image>"])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """A GPT-2-like tokenizer: every byte is a token, so characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A Llama-like tokenizer: unknown characters become runs of `<0x..>` tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for value in range(256):
        vocabulary[f"<0x{value:02X}>"] = len(vocabulary)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁t", "he", "▁the"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _graph(name: str, role: str, layers: list[int] | None = None) -> dict[str, Any]:
    graph: dict[str, Any] = {"file": f"{name}.onnx", "role": role, "inputs": [], "outputs": []}
    return graph | ({} if layers is None else {"layers": layers})


def _add_interfaces(data: dict[str, Any]) -> dict[str, Any]:
    """Give every graph the inputs and outputs that the rest of the manifest implies."""
    parts = {
        "decoder": DecoderInfo, "text": TextInfo, "image": ImageInfo, "encoder": EncoderInfo,
    }  # fmt: skip
    made: dict[str, Any] = {
        name: None if data[name] is None else part.parse(data[name], name) for name, part in parts.items()
    }
    made["compute_dtype"] = made["cache_dtype"] = "float32"
    made["drafts"] = []
    made["tensors"] = {"embedding_table": TensorInfo.parse(data["tensors"]["embedding_table"], "")}
    for graph in data["graphs"].values():
        if graph["role"] == "vision":
            image, text = made["image"], made["text"]
            sides: Any = (
                {"pixel_values": ("float32", ("batch", 3, image.height, image.width))},
                {"image_rows": ("float32", ("batch", text.image_rows, made["decoder"].hidden_size))},
            )
        else:
            sides = interface(SimpleNamespace(**made), graph["role"], graph.get("layers"))  # type: ignore[arg-type]
        for side, values in zip(("inputs", "outputs"), sides, strict=True):
            graph[side] = [
                {"name": key, "dtype": dtype, "shape": list(shape)} for key, (dtype, shape) in values.items()
            ]
    return data


def manifest(tokenizer: Tokenizer, family: str) -> dict[str, Any]:
    """A complete manifest of a made-up model with 2 layers, cut after the first, without `files`."""
    seeing = family == "blip2"
    vocab = tokenizer.get_vocab_size()
    names = [("embed", "embed"), ("head", "head"), ("imitation.1", "imitation"), ("commit", "commit")]
    names += [("vision", "vision"), ("encoder", "encoder"), ("cross_kv", "cross_kv")] if seeing else []
    graphs = {name: _graph(name, role) for name, role in names}
    graphs["segment.0"] = _graph("segment.0", "segment", [0, 1])
    graphs["segment.1"] = _graph("segment.1", "segment", [1, 2])
    bias = {"tensor": "decoder.relative_bias", "num_buckets": 32, "max_distance": 128}
    tensors = {"embedding_table": {"offset": 0, "bytes": vocab * 32, "dtype": "float32", "shape": [vocab, 8]}}
    end = -(-vocab * 32 // 64) * 64
    if seeing:
        for side in ("decoder", "encoder"):
            tensors[f"{side}.relative_bias"] = {
                "offset": end, "bytes": 256, "dtype": "float32", "shape": [32, 2],
            }  # fmt: skip
            end += 256
    image = {
        "processor": "blip", "height": 16, "width": 24, "resample": "bicubic", "rescale_factor": 1 / 255,
        "mean": [0.48, 0.45, 0.40], "std": [0.26, 0.26, 0.27], "reference": "BlipImageProcessorPil",
    }  # fmt: skip
    data = {
        "format": "vlmexport-bundle",
        "schema_version": 2,
        "producer": {"vlmexport": "0.1.0", "created": "2026-01-01T00:00:00Z"},
        "model": {
            "source": "handmade", "family": family, "architecture": "Handmade", "fingerprint": "sha256:0",
            "decoder": "t5" if seeing else "llama", "parameters": 1234,
        },
        "weights_dtype": "float32", "compute_dtype": "float32", "cache_dtype": "float32",
        "limits": {"max_length": 64, "max_batch": 1, "max_width": 8, "max_source": 20 if seeing else None},
        "text": {
            "tokenizer": "tokenizer.json", "vocab_size": vocab, "eos_token_ids": [1], "pad_token_id": 0,
            "bos_token_id": None, "decoder_start_token_id": 0 if seeing else None,
            "image_token_id": tokenizer.token_to_id("<image>"), "image_rows": 4 if seeing else None,
            "chat_template": None, "default_prompt": "describe the scene" if seeing else None,
        },
        "image": image if seeing else None,
        "decoder": {
            "num_layers": 2, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4,
            "position": "relative_bias" if seeing else "rotary", "mask_dtype": "float32" if seeing else "bool",
            "mask_heads": 2 if seeing else 1, "cross_attention": seeing, "cuts": [0, 1, 2],
            "relative_bias": bias if seeing else None,
        },
        "encoder": {"num_heads": 2, "relative_bias": bias | {"tensor": "encoder.relative_bias"}} if seeing else None,
        "graphs": graphs,
        "weights": {"file": "weights.bin", "bytes": end},
        "tensors": tensors,
        "drafts": [
            {"name": "imitation@1", "kind": "imitation", "layer": 1, "graphs": {"imitation": "imitation.1"}, "trained": True},
            {"name": "early-exit@1", "kind": "early-exit", "layer": 1, "graphs": {}, "trained": False},
        ],
        "policy": {"draft": "imitation@1", "speculative": True, "draft_length": 5, "confidence_threshold": None},
        "verify_width": None,
        "parity": [{"graph": "segment.0", "reference": "torch", "max_abs_difference": 1e-6}],
        "plans": [],
    }  # fmt: skip
    return _add_interfaces(data)


def list_files(folder: Path) -> dict[str, Any]:
    """The `files` entry of a bundle folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            found[path.relative_to(folder).as_posix()] = {"bytes": len(data), "sha256": digest}
    return found


def write_bundle(
    folder: Path, family: str = "blip2", tokenizer: Tokenizer | None = None, **text: Any
) -> Path:
    """Write a bundle that passes every check; `text` overrides entries of the manifest's `text`."""
    folder.mkdir(parents=True)
    tokenizer = tokenizer or (metaspace_tokenizer() if family == "blip2" else byte_level_tokenizer())
    data = manifest(tokenizer, family)
    data["text"] |= text
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(data["weights"]["bytes"] // 4).astype(np.float32)
    (folder / "weights.bin").write_bytes(weights.tobytes())
    for name in data["graphs"]:
        (folder / f"{name}.onnx").write_bytes(b"not executed: " + name.encode())
    write_manifest(folder, data | {"files": list_files(folder)})
    return folder


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle as plain JSON."""
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def write_manifest(folder: Path, data: dict[str, Any]) -> None:
    """Write a manifest as it is, right or wrong, with the checksum that belongs to it."""
    (folder / "manifest.json").write_text(json.dumps(sealed(data)), encoding="utf-8")
