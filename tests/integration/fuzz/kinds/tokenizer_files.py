"""tokenizer.json from anywhere: what is served is what `tokenizers` makes of the same file, all at once and in pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.integration.fuzz import tokenizer_parts
from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import json_text, mutate_bytes

from .base import call

TEXTS = (
    "a red cup stands on the table", "", " ", "a" * 64, "x" * 300 + "!", "Ünïcödé naïve ﬁ ½ İ ǆ", "漢字 かな 한국어", "\U0001f642\U0001f3fd\u200d e\u0301\u0301\u0301",
    "\0\x01\x7f\u2028\r\n\t", "<s> a</s><unk><image><extra>", "<|im_start|>user\n<|im_end|>", "It's 12345.67 — don't, we'll!", "ab" * 40 + "c", "▁▁Ġ##</w>",
    "\u202e\ufeff\ufffd", "the  cup   ,  red", "�",
)  # fmt: skip
WORDS = ["<unk>", "a", "red", "cup", "the", "table", "on", "."]
LONG = (1000, 5000, 20_000, 100_000)
"""Bytes."""


class Seeds:
    """Small tokenizers of the published kinds, and of the kinds that other models have."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        from tests.support import handmade_bundle
        from tests.support.published import vocabularies

        first = ["<unk>", "<s>", "</s>", "<pad>"]
        made: list[Tokenizer] = [kind(first) for kind in vocabularies.KINDS.values()]
        made += [
            handmade_bundle.metaspace_tokenizer(),
            handmade_bundle.byte_level_tokenizer(),
            handmade_bundle.byte_fallback_tokenizer(),
        ]
        made += [_bert(), _words(), _clip()]
        bundled = sorted((Path(__file__).parents[4] / "models").glob("*/*/tokenizer.json"))
        texts = [*(each.to_str() for each in made), *(path.read_text("utf-8") for path in bundled)]
        self._documents: list[dict[str, Any]] = [json.loads(text) for text in texts]

    def make(self, rng: random.Random, folder: Path) -> Case:
        whole = rng.choice(self._documents)
        document = tokenizer_parts.mutant(whole, rng)
        kind = rng.random()
        data = json.dumps(document).encode("utf-8", "surrogatepass")
        if kind < 0.03:
            data = mutate_bytes(data, rng)
        elif kind < 0.05:
            data = json_text(document, rng)
        path = folder / "tokenizer.json"
        path.write_bytes(data)
        texts: list[str] = rng.sample(TEXTS, 4)
        if rng.random() < 0.5:
            size = rng.choice(LONG)
            part = rng.choice((*TEXTS, "a", "x", "ab", " ", "é")) or "a"
            texts.append((part * (size // len(part.encode()) + 1))[:size])
        size = len(document["model"]["vocab"]) if _has_vocabulary(document) else 10
        ids = [
            rng.choice((0, 1, 5, size - 1, size, 2**31, rng.randrange(size)))
            for _ in range(rng.choice((1, 5, 60)))
        ]
        known = (
            document.get("decoder") == whole["decoder"]
            and document.get("added_tokens") == whole["added_tokens"]
        )
        return Case(call(lambda: _use(path, texts, ids, known)))


def prepare(folder: Path) -> Seeds:
    """Tokenizers of the kinds that models have."""
    import tokenizers  # noqa: F401  # a case need not import it
    from vlmexport.runtime.text import incremental  # noqa: F401

    return Seeds()


def _has_vocabulary(document: dict[str, Any]) -> bool:
    model = document.get("model")
    return isinstance(model, dict) and isinstance(model.get("vocab"), dict | list) and len(model["vocab"]) > 0


def _use(path: Path, texts: list[str], ids: list[int], known: bool) -> None:
    """Every text is tried; the first refusal is the answer. With a `known` decoder, pieces are compared with the whole."""
    from vlmexport.runtime.common.errors import VlmexportError
    from vlmexport.runtime.images.quiet import quiet_stderr
    from vlmexport.runtime.text.tokenizer import Tokenizer

    refused: list[VlmexportError] = []
    with quiet_stderr():
        tokenizer = Tokenizer.open(path)
        reference = _reference(path)
        for text in texts:
            try:
                found = tokenizer.encode(text).tolist()
            except VlmexportError as error:
                refused.append(error)
                continue
            if not _draws(reference):
                assert found == reference.encode(text).ids, f"other tokens of {text!r:.100}"
            try:
                _decode(tokenizer, reference, found, known)
            except VlmexportError as error:
                refused.append(error)
        _decode(tokenizer, reference, ids, known)
    if refused:
        raise refused[0]


def _decode(tokenizer: Any, reference: Any, ids: list[int], known: bool) -> None:
    from vlmexport.runtime.text.incremental import IncrementalDetokenizer

    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert whole == reference.decode(ids, skip_special_tokens=skip), "another text"
        pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        few = ids[:2000]
        joined = "".join([*map(pieces.push, few), pieces.finish()])
        if known:
            assert joined == tokenizer.decode(few, skip_special_tokens=skip), f"pieces give {joined!r:.200}"


def _reference(path: Path) -> Any:
    import tokenizers

    found = tokenizers.Tokenizer.from_file(str(path))
    found.no_truncation()
    found.no_padding()
    return found


def _draws(tokenizer: Any) -> bool:
    """Whether its tokens are a matter of chance."""
    return bool(getattr(tokenizer.model, "dropout", None))


def _bert() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "a",
        "red",
        "cup",
        "the",
        "ta",
        "##ble",
        "on",
        *(f"##{c}" for c in "abcdexyz"),
        *"bcdexyz.,!'1234567",
    ]
    found = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    found.decoder = decoders.WordPiece()
    found.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return found


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    found = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def _clip() -> Any:
    """Lower case, words that end with a mark."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("c", "u"), ("cu", "p</w>")]
    pieces = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *map("".join, merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    found = Tokenizer(
        models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            merges,
            end_of_word_suffix="</w>",
            unk_token="<|endoftext|>",
        )
    )
    found.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(
        Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True
    )
    found.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ends = {name: pieces.index(name) for name in ("<|endoftext|>", "<|startoftext|>")}
    found.post_processor = processors.RobertaProcessing(
        *ends.items(), trim_offsets=False, add_prefix_space=False
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(ends))
    return found
