"""Tokenizers of the published kinds with a few hundred tokens: the same steps, the same special tokens, other ids.

Tokens that come first as published (`<pad>` 0, `</s>` 1) come first here; those behind the vocabulary follow it in their
order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.tiny_models import WORDS

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("r", "e"), ("re", "d"), ("Ġ", "a"), ("i", "n"), ("o", "n")]
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level_vocabulary(first: list[str]) -> dict[str, int]:
    pieces = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    return {piece: index for index, piece in enumerate(pieces)}


def gpt2(first: list[str]) -> Tokenizer:
    """Byte-level BPE, as GPT-2 and OPT have it."""
    core = Tokenizer(models.BPE(vocab=_byte_level_vocabulary(first), merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def _split(pattern: str, first: list[str]) -> Tokenizer:
    core = gpt2(first)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return core


def qwen2(first: list[str]) -> Tokenizer:
    """Byte-level BPE with a pattern of its own over composed characters."""
    core = _split(QWEN2_SPLIT, first)
    core.normalizer = normalizers.NFC()
    return core


def llama3(first: list[str]) -> Tokenizer:
    """Byte-level BPE with a pattern of its own."""
    return _split(LLAMA3_SPLIT, first)


def llama(first: list[str]) -> Tokenizer:
    """sentencepiece's BPE with bytes for what it does not know."""
    merges, pieces = [], ["▁", *map(chr, range(33, 127))]
    for word in WORDS:
        for end in range(1, len(word) + 1):
            pair = ("▁" + word[: end - 1], word[end - 1])
            if "".join(pair) not in pieces:
                pieces.append("".join(pair))
                merges.append(pair)
    vocabulary = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    core = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)}, merges=merges, unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def gemma(first: list[str]) -> Tokenizer:
    """As Llama's, without a space in front of a text; two line ends are one token."""
    core = llama(first)
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model = json.loads(core.to_str())["model"]
    vocabulary = model["vocab"] | {text: len(model["vocab"]) + n for n, text in enumerate(("\n", "\n\n"))}
    merges = [*map(tuple, model["merges"]), ("\n", "\n")]
    core.model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    return core


def t5(first: list[str]) -> Tokenizer:
    """sentencepiece's Unigram with a hundred sentinels behind it."""
    pieces = [(piece, 0.0) for piece in first] + [("▁" + word, -5.0) for word in WORDS]
    singles = ["▁", *map(chr, range(33, 127)), *("▁" + chr(c) for c in range(97, 123))]
    known = {piece for piece, _ in pieces}
    pieces += [(piece, -20.0) for piece in singles if piece not in known]
    core = Tokenizer(models.Unigram(pieces, unk_id=first.index("<unk>"), byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    core.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(100))])
    return core


def smollm2(first: list[str]) -> Tokenizer:
    """As GPT-2's, every digit by itself."""
    core = gpt2(first)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return core


KINDS: dict[str, Callable[[list[str]], Tokenizer]] = {
    "gemma": gemma,
    "gpt2": gpt2,
    "qwen2": qwen2,
    "llama3": llama3,
    "llama": llama,
    "smollm2": smollm2,
    "t5": t5,
}
"""A layout's `tokenizer.kind` → its tokenizer without added tokens, given the tokens that come first."""


def tokenizer(described: dict[str, Any], tokens: dict[str, int], flags: dict[str, Any]) -> Tokenizer:
    """The small tokenizer of a layout.

    `described` is its `tokenizer`: `kind`, and `around`, the template of special tokens around a text ("<s> $A"), if any.
    `flags` are the fields of added tokens by content, as tokenizer_config.json has them.
    """
    ordered = sorted(tokens, key=lambda content: tokens[content])
    first = [content for index, content in enumerate(ordered) if tokens[content] == index]
    core = KINDS[described["kind"]](first)
    for content in ordered:
        known = core.token_to_id(content) is not None
        if known and content not in first and content not in flags:
            continue  # an ordinary token, a line's end, that ends a text
        fields = {"special": True, "normalized": False} | flags.get(content, {})
        special = fields.pop("special")
        token = AddedToken(content, special=special, **fields)
        (core.add_special_tokens if special else core.add_tokens)([token])
    if (around := described.get("around")) is not None:
        named = [word for word in around.split() if word != "$A"]
        template = processors.TemplateProcessing(
            single=around, pair=f"{around} {around.replace('$A', '$B')}:1",
            special_tokens=[(word, core.token_to_id(word)) for word in dict.fromkeys(named)],
        )  # fmt: skip
        byte_level = described["kind"] in ("llama3", "qwen2", "gpt2", "smollm2")
        steps = [processors.ByteLevel(trim_offsets=False), template] if byte_level else [template]
        core.post_processor = processors.Sequence(steps) if byte_level else template
    return core


def write(core: Tokenizer, files: list[str], folder: Path) -> None:
    """Writes the `files` that hold a tokenizer: tokenizer.json, or vocab.json and merges.txt, or a sentencepiece model."""
    model = json.loads(core.to_str())["model"]
    for name in files:
        path = folder / name
        if name == "tokenizer.json":
            core.save(str(path))
        elif name == "vocab.json":
            path.write_text(json.dumps(model["vocab"], ensure_ascii=False))
        elif name == "merges.txt":
            path.write_text(
                "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]) + "\n"
            )
        elif name.endswith(".model"):
            path.write_bytes(sentencepiece(model))
        else:
            raise ValueError(f"{name} holds no tokenizer")


def sentencepiece(model: dict[str, Any]) -> bytes:
    """The pieces of a tokenizer as sentencepiece stores them (its ModelProto, field 1: piece 1, score 2, type 3)."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<pad>": 3}
    if isinstance(model["vocab"], dict):
        scored = [
            (piece, -float(index)) for piece, index in sorted(model["vocab"].items(), key=lambda p: p[1])
        ]
    else:
        scored = [(piece, score) for piece, score in model["vocab"]]
    found = bytearray()
    for piece, score in scored:
        kind = kinds.get(piece, 6 if piece.startswith("<0x") else 1)
        text = piece.encode()
        body = (
            b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        )
        found += b"\x0a" + bytes([len(body)]) + body
    return bytes(found)
