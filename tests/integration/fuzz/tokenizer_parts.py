"""Parts of tokenizer.json that may stand in any place of one: every kind of step of `tokenizers`, with odd values."""

from __future__ import annotations

import base64
import copy
import random
import struct
from collections.abc import Callable
from typing import Any

from tests.integration.fuzz.mutate import ODD, mutate_json

STRINGS = (
    "", " ", "a", "e", "▁", "Ġ", "é", "\0", "ab", "the", "</w>", "##", "</s>", "<unk>", "\U0001f642", "x" * 90, "a" * 3000, "ﬁ", "\u0301",
)  # fmt: skip
REGEXES = (
    "", "a", r"\s+", r"\p{L}+", r"\b", "^", "$", ".", r"(?=a)", r"(?<!a)b", r"\X", r"\G", "x*", "[^ ]", r"\p{N}{1,3}", r"'(?i:[sdmt]|ll|ve|re)|\s+(?!\S)",
    "(a+)+$", "(x*)*y", "(.*)(.*)(.*)(.*)z", "(?:a|a)*b", "(a|b|ab)*c", "(a?){40}a{40}", r"(.+)\1\1$", "(?:(?:a*)*)*b", r"(?<n>a\g<n>?b)", "(?:.|\\s)*!",
    "a{100000}", ".{0,1000}", "(" * 200 + ")" * 200, "x" * 5000, "[", "(?<", "*", r"\p{Nothing}", "[a-z&&[^aeiou]]", "(?m:^)", "(?>a+)b",
)  # fmt: skip
"""Those of the second line look back very often, those of the third are large, or wrong."""
BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
NUMBERS = (*(0, 1, 2, 3, 7, 100, 1000, 2**31, 2**32 - 1) * 4, -1, 2**63, 0.5)

Step = dict[str, Any]


def _pattern(rng: random.Random) -> Step:
    return {"String": rng.choice(STRINGS)} if rng.random() < 0.4 else {"Regex": rng.choice(REGEXES)}


def _boolean(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _token(rng: random.Random) -> list[Any]:
    return [rng.choice(("</s>", "<s>", "[SEP]", "nowhere", "")), rng.choice((0, 1, 2, 5, 99999, 2**32 - 1))]


def _metaspace(rng: random.Random) -> Step:
    return {
        "type": "Metaspace", "replacement": rng.choice(("▁", "_", "a", "\U0001f642", " ")),
        "prepend_scheme": rng.choice(("always", "never", "first")), "split": _boolean(rng),
    }  # fmt: skip


def _byte_level(rng: random.Random) -> Step:
    return {
        "type": "ByteLevel",
        "add_prefix_space": _boolean(rng),
        "trim_offsets": _boolean(rng),
        "use_regex": _boolean(rng),
    }


def _replace(rng: random.Random) -> Step:
    return {"type": "Replace", "pattern": _pattern(rng), "content": rng.choice(STRINGS)}


def _charsmap(rng: random.Random) -> Step:
    """sentencepiece's: the trie's size, a trie, what texts become."""
    trie = rng.randbytes(rng.choice((0, 4, 64, 1024)))
    size = len(trie) if rng.random() < 0.7 else rng.choice((0, 1, 2**31, 2**32 - 1))
    data = struct.pack("<I", size) + trie + b"a\0bcd\0" + b"e" * rng.choice((0, 5, 500))
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def _template(rng: random.Random) -> Step:
    names = [rng.choice(("</s>", "<s>", "a b", "")) for _ in range(rng.choice((0, 1, 2, 40, 2000)))]
    texts = [
        {"Sequence": {"id": rng.choice("AAAB"), "type_id": rng.choice((0, 1, 7))}}
        for _ in range(rng.choice((0, 1, 1, 1, 3)))
    ]
    single: list[Step] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names] + texts
    rng.shuffle(single)
    ids = [rng.choice((0, 1, 5, 2**32 - 1)) for _ in range(rng.choice((0, 1, 1, 2, 600)))]
    defined = {
        name: {"id": name, "ids": ids, "tokens": [name] * (len(ids) if rng.random() < 0.9 else 1)}
        for name in set(names)
        if rng.random() < 0.9
    }
    pair = [*texts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": defined}


STEPS: dict[str, tuple[str, tuple[Callable[[random.Random], Step], ...]]] = {
    "normalizer": ("normalizers", (
        lambda r: {"type": "BertNormalizer", "clean_text": _boolean(r), "handle_chinese_chars": _boolean(r), "strip_accents": r.choice((None, True, False)), "lowercase": _boolean(r)},
        lambda r: {"type": "Strip", "strip_left": _boolean(r), "strip_right": _boolean(r)},
        lambda r: {"type": r.choice(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel"))},
        lambda r: {"type": "Prepend", "prepend": r.choice(STRINGS)}, _replace, _replace, _charsmap,
    )),
    "pre_tokenizer": ("pretokenizers", (
        lambda r: {"type": r.choice(("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"))}, _byte_level, _metaspace,
        lambda r: {"type": "CharDelimiterSplit", "delimiter": r.choice((" ", "a", "▁"))},
        lambda r: {"type": "Split", "pattern": _pattern(r), "behavior": r.choice(BEHAVIORS), "invert": _boolean(r)},
        lambda r: {"type": "Split", "pattern": _pattern(r), "behavior": r.choice(BEHAVIORS), "invert": _boolean(r)},
        lambda r: {"type": "Punctuation", "behavior": r.choice(BEHAVIORS)}, lambda r: {"type": "Digits", "individual_digits": _boolean(r)},
        lambda r: {"type": "FixedLength", "length": r.choice(NUMBERS)},
    )),
    "post_processor": ("processors", (
        lambda r: {"type": "BertProcessing", "sep": _token(r), "cls": _token(r)},
        lambda r: {"type": "RobertaProcessing", "sep": _token(r), "cls": _token(r), "trim_offsets": _boolean(r), "add_prefix_space": _boolean(r)},
        _byte_level, _template, _template,
    )),
    "decoder": ("decoders", (
        lambda r: {"type": "BPEDecoder", "suffix": r.choice(STRINGS)}, _byte_level, _metaspace, _replace, _replace,
        lambda r: {"type": "WordPiece", "prefix": r.choice(STRINGS), "cleanup": _boolean(r)},
        lambda r: {"type": "CTC", "pad_token": r.choice(STRINGS), "word_delimiter_token": r.choice(STRINGS), "cleanup": _boolean(r)},
        lambda r: {"type": r.choice(("Fuse", "ByteFallback"))},
        lambda r: {"type": "Strip", "content": r.choice((" ", "a", "▁", "ab")), "start": r.choice(NUMBERS), "stop": r.choice(NUMBERS)},
    )),
}  # fmt: skip
"""Part of tokenizer.json → what a sequence of its steps calls them, and what makes one step."""


def _change_steps(document: Step, rng: random.Random) -> None:
    """Steps of one part replaced, or others before and behind those that it has."""
    part = rng.choice(tuple(STEPS))
    inner, makers = STEPS[part]
    new = [rng.choice(makers)(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 6)))]
    if rng.random() < 0.03:
        new *= 60
    if rng.random() < 0.06:
        new[0] = mutate_json(new[0], rng)
    old = document.get(part)
    kept = [] if old is None or rng.random() < 0.25 else [old]
    steps = kept + new if _boolean(rng) else new + kept
    document[part] = steps[0] if len(steps) == 1 else {"type": "Sequence", inner: steps}
    for _ in range(rng.choice((*[0] * 20, 1, 1, 30, 200))):
        document[part] = {"type": "Sequence", inner: [document[part]]}


def _change_model(document: Step, rng: random.Random) -> None:
    """Another field of the model, or another token of its vocabulary."""
    model = document["model"]
    fields: dict[str, tuple[Any, ...]] = {
        "unk_token": (None, "a", "nowhere", ""), "unk_id": (None, 0, 1, 10**6, -1), "continuing_subword_prefix": (None, "", "##", "x" * 200),
        "end_of_word_suffix": (None, "", "</w>", "a" * 99, "b" * 101), "fuse_unk": (True, False), "byte_fallback": (True, False), "ignore_merges": (True, False),
        "max_input_chars_per_word": NUMBERS, "dropout": (None, 0.0, 1.0, -1.0, 2.0), "type": ("BPE", "Unigram", "WordLevel", "WordPiece", "Nothing", None),
    }  # fmt: skip
    if rng.random() < 0.5:
        name = rng.choice([name for name in fields if name in model or rng.random() < 0.2])
        model[name] = rng.choice(fields[name])
        return
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict | list):
        return
    content = rng.choice((*STRINGS, "<0x41>", "<0xZZ>", "y" * 9000, "z" * 20000))
    if isinstance(vocabulary, dict):
        key = rng.choice(list(vocabulary)) if vocabulary and _boolean(rng) else content
        vocabulary[key] = rng.choice((*(0, 1, 5, 10**5, 2**31, 2**32 - 1) * 5, 2**32, -1, 0.5))
        if vocabulary and rng.random() < 0.3:
            del vocabulary[rng.choice(list(vocabulary))]
        merges = model.get("merges")
        if merges and rng.random() < 0.3:
            rng.shuffle(merges)
            merges.append(
                rng.choice((["a", "b"], "a b", ["", ""], "", "a", ["nowhere", "a"], [["a"], "b"], merges[0]))
            )
    else:
        vocabulary.insert(
            rng.randrange(len(vocabulary) + 1),
            [
                content,
                rng.choice((0.0, -1.0, 1e308, -1e308, 5, 1e-320, -0.5, -7, -7, -7, float("nan"), None)),
            ],
        )


def _change_added(document: Step, rng: random.Random) -> None:
    """More added tokens, or others."""
    added = document.setdefault("added_tokens", [])
    for _ in range(rng.choice((1, 1, 2, 5, 300))):
        token: Step = {
            name: _boolean(rng) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        token["content"] = rng.choice((*STRINGS, "<extra>", "a b", "cup", f"<t{rng.randrange(999)}>"))
        token["id"] = rng.choice(
            (*(0, 1, 5, len(document["model"]["vocab"]), 5000, 2**31, 2**32 - 1) * 9, 2**32, -1)
        )
        added.append(token)
    if rng.random() < 0.2:
        rng.shuffle(added)


def _change_cutting(document: Step, rng: random.Random) -> None:
    """Truncation and padding, which are not ours to follow."""
    if _boolean(rng):
        document["truncation"] = {
            "direction": rng.choice(("Left", "Right")), "max_length": rng.choice(NUMBERS), "stride": rng.choice(NUMBERS),
            "strategy": rng.choice(("LongestFirst", "OnlyFirst", "OnlySecond")),
        }  # fmt: skip
    else:
        document["padding"] = {
            "strategy": rng.choice(("BatchLongest", {"Fixed": rng.choice(NUMBERS)})), "direction": rng.choice(("Left", "Right")),
            "pad_to_multiple_of": rng.choice((None, *NUMBERS)), "pad_id": rng.choice(NUMBERS), "pad_type_id": 0, "pad_token": rng.choice(STRINGS),
        }  # fmt: skip


def _change_any(document: Step, rng: random.Random) -> None:
    """Any value anywhere, mostly outside the vocabulary."""
    name = rng.choice(list(document))
    if name == "model" and _boolean(rng):
        inner = rng.choice([key for key in document["model"] if key not in ("vocab", "merges")] or ["type"])
        document["model"][inner] = rng.choice(ODD)
    else:
        document[name] = mutate_json(document[name], rng) if document[name] else rng.choice(ODD)


CHANGES = (
    _change_steps,
    _change_steps,
    _change_steps,
    _change_steps,
    _change_model,
    _change_model,
    _change_added,
    _change_cutting,
    _change_any,
)


def mutant(document: Step, rng: random.Random) -> Step:
    """One to three parts of a tokenizer changed."""
    out = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if (
            isinstance(out.get("model"), dict)
            and out["model"].get("vocab")
            and isinstance(out.get("added_tokens", []), list)
        ):
            rng.choice(CHANGES)(out, rng)
    return out
