"""How much a tokenizer may make of a text, from what `tokenizer.json` says, before it makes it.

The `tokenizers` library runs a bundle's steps without a bound on time or memory, and cannot be interrupted. So each kind
of step has a factor here: bytes of UTF-8 that it may give for one byte. Steps behind each other multiply. A kind that is
not in the tables is refused by name. Regular expressions are bounded by the work that their patterns may take, too.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from ..common.errors import BundleError, PromptError
from ..common.foreign_errors import raise_if_foreign
from . import regexes
from .regex_nodes import UnreadableRegex

LARGEST = 4_000_000
"""Bytes that a text may become on its way to tokens: the library takes some hundred bytes for each."""

WORK = 400_000_000
"""Steps of the model over a text, of some nanoseconds each."""

LONGEST_TOKEN = 10_000
"""Bytes of text that one token may become."""

_MOST_STEPS = 100
_MOST_ADDED = 1000
_LONGEST_AFFIX = 100
_LONGEST_WORD = 1000
_LEAST = 1000
"""Bytes that every usable tokenizer reads."""

_REMEDY = "use the model's own tokenizer"

Step = Mapping[str, Any]
Factor = Callable[[Step], int]


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _replace(step: Step) -> int:
    pattern, content = step.get("pattern"), _bytes(step.get("content"))
    size = _bytes(pattern.get("String")) if isinstance(pattern, Mapping) else 0
    return (
        max(1, -(-content // size)) if size else 1 + 2 * content
    )  # a regex may match before and behind every character


def _precompiled(step: Step) -> int:
    """sentencepiece's map: the size of a trie, the trie, then what texts become, each ended by a zero byte."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or "")
    except (binascii.Error, ValueError, TypeError) as error:
        raise_if_foreign(error)
        return 1  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _metaspace(step: Step) -> int:
    size = max(1, _bytes(step.get("replacement")))
    return size if step.get("prepend_scheme") == "never" else 2 * size


NORMALIZERS: Mapping[str, Factor] = {
    "BertNormalizer": lambda step: 12,  # spaces around Chinese characters, decomposed, lower case
    "ByteLevel": lambda step: 2,
    "Lowercase": lambda step: 2,
    "NFC": lambda step: 3,
    "NFD": lambda step: 3,
    "NFKC": lambda step: 11,
    "NFKD": lambda step: 11,
    "Nmt": lambda step: 1,
    "Precompiled": _precompiled,
    "Prepend": lambda step: 1 + _bytes(step.get("prepend")),  # to every piece between added tokens
    "Replace": _replace,
    "Strip": lambda step: 1,
    "StripAccents": lambda step: 1,
}
PRE_TOKENIZERS: Mapping[str, Factor] = {
    "BertPreTokenizer": lambda step: 1,
    "ByteLevel": lambda step: 4 if step.get("add_prefix_space", True) else 2,
    "CharDelimiterSplit": lambda step: 1,
    "Digits": lambda step: 1,
    "FixedLength": lambda step: 1,
    "Metaspace": _metaspace,
    "Punctuation": lambda step: 1,
    "Split": lambda step: 1,
    "UnicodeScripts": lambda step: 1,
    "Whitespace": lambda step: 1,
    "WhitespaceSplit": lambda step: 1,
}
DECODERS: Mapping[str, Factor] = {
    "BPEDecoder": lambda step: 2,
    "ByteFallback": lambda step: 1,
    "ByteLevel": lambda step: 3,  # a byte that is no character becomes U+FFFD
    "CTC": lambda step: 2,
    "Fuse": lambda step: 1,
    "Metaspace": lambda step: 1,
    "Replace": _replace,
    "Strip": lambda step: 1,
    "WordPiece": lambda step: 2,
}
_BY_CHARACTER = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents")
"""Normalizers that make the same of a text and of its pieces, but for what stands at their ends."""
_REWRITERS = ("ByteLevel", "Metaspace")
"""Pre-tokenizers that do not only cut."""
_KEEP_ASCII = ("NFC", "NFD", "NFKC", "NFKD", "StripAccents")
"""Normalizers that leave plain ASCII as it is."""
_AT_ENDS = 40
"""Bytes that characters may lose or gain where a text is cut between them."""
PROCESSORS = ("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")


@dataclass(frozen=True)
class Growth:
    """Bounds of one tokenizer."""

    normalizers: tuple[Step, ...]
    before_model: int
    """Factor of the pre-tokenizers, and of a post-processor that repeats the text."""
    per_byte: int
    """Steps of the model for one byte."""
    added: tuple[str, ...] = ()
    """Tokens that cut a text into pieces."""
    pre_tokenizers: tuple[Step, ...] = ()
    works: Mapping[str, regexes.Work] = field(default_factory=dict)
    """Of each pattern."""
    factor: int = field(init=False)
    """Of all steps."""

    def __post_init__(self) -> None:
        factor = self.before_model
        for step in self.normalizers:
            factor *= NORMALIZERS[step["type"]](step)
        object.__setattr__(self, "factor", factor)

    def check(self, text: str) -> None:
        """Raises `PromptError` for a text of which the tokenizer might make more than this process can hold."""
        size = _bytes(text)
        largest = min(LARGEST, WORK // self.per_byte)
        if size * self.factor > largest and self._measured(text, size) > largest:
            raise PromptError(
                f"the bundle's tokenizer may make more than {largest:,} bytes of a prompt of {len(text):,} characters: "
                "shorten it"
            )
        longest = len(text) * self.factor
        if sum(work.on(longest, None) for work in self.works.values()) > regexes.STEPS:
            self._check_work(text)

    def _check_work(self, text: str) -> None:
        """Raises `PromptError` for a text that the regular expressions may take too long for."""
        now: str | None = text  # what the next step is given, as far as it is known
        size, spent = len(text), 0
        whole = not any(token in text for token in self.added)

        def spend(step: Step) -> None:
            nonlocal spent
            if (pattern := _regex(step)) is None:
                return
            spent += self.works[pattern].on(size, now)
            if spent > regexes.STEPS:
                raise PromptError(
                    f"the bundle's tokenizer may take too long for a prompt of {len(text):,} characters by its regular "
                    f"expression {_shortened(pattern)}: shorten the prompt, or its runs of characters of one kind"
                )

        for step in self.normalizers:
            spend(step)
            longest = size * NORMALIZERS[step["type"]](step)
            if now is None or longest > 4 * LARGEST or not (whole or step["type"] in _BY_CHARACTER):
                now, size = None, longest
            else:
                normalized: str = _normalizer(step).normalize_str(now)
                now, size = normalized, len(normalized)
        for step in self.pre_tokenizers:
            spend(step)
            if step["type"] in _REWRITERS:
                now, size = None, size * PRE_TOKENIZERS[step["type"]](step)

    def _measured(self, text: str, size: int) -> int:
        """Bytes at most in front of the model, where the text is normalised as far as that takes little.

        The library normalises the pieces between added tokens one by one: each may get a beginning of its own, and what
        stands at its ends may be replaced. That is `extra`, which later steps lengthen by their factors.
        """
        pieces, extra, left = 1 + sum(text.count(token) for token in self.added), 0, self.factor
        for step in self.normalizers:
            kind, factor = step["type"], NORMALIZERS[step["type"]](step)
            if size * factor > 4 * LARGEST or (kind == "Replace" and "String" not in step["pattern"]):
                break  # a regex may look at what is not in its piece
            left //= factor
            if kind == "Prepend":
                extra += _bytes(step["prepend"]) * pieces
                continue
            extra = extra * factor + (_bytes(step.get("content")) + _AT_ENDS) * pieces
            if not text.isascii() or kind not in _KEEP_ASCII:  # a later step may replace what this one makes
                text = _normalizer(step).normalize_str(text)
            size = max(size, _bytes(text))
        return (size + extra) * left


def growth_of(backend: tokenizers.Tokenizer, vocabulary: Collection[str]) -> Growth:
    """Bounds of a tokenizer, whose `vocabulary` holds all tokens, added ones too.

    Raises `BundleError` naming what would make too much of any text, or whose growth nobody knows.
    """

    def read_steps(part: str, inner: str, known: Any) -> list[Step]:
        steps = list(_steps(state_of(getattr(backend, part)), inner))
        unknown = [step.get("type") for step in steps if step.get("type") not in known]
        if unknown:
            raise BundleError(
                f"the tokenizer's {part} has a step {unknown[0]!r:.80}, which this version does not know; use a newer vlmexport"
            )
        if len(steps) > _MOST_STEPS:
            raise BundleError(
                f"the tokenizer's {part} has {len(steps)} steps, more than {_MOST_STEPS}; {_REMEDY}"
            )
        return steps

    def refuse_beyond(what: str, amount: int, limit: int) -> None:
        if amount > limit:
            number = f"{amount:,}" if amount < 10**18 else "very many"
            raise BundleError(f"{what} {number}, more than {limit:,}; {_REMEDY}")

    normalizers = read_steps("normalizer", "normalizers", NORMALIZERS)
    pre_tokenizers = read_steps("pre_tokenizer", "pretokenizers", PRE_TOKENIZERS)
    before = 1
    for step in pre_tokenizers:
        if step["type"] == "FixedLength" and step.get("length") == 0:  # the library would panic
            raise BundleError(f"the tokenizer cuts texts into parts of length 0; {_REMEDY}")
        before *= PRE_TOKENIZERS[step["type"]](step)
    added = 0
    for step in read_steps("post_processor", "processors", PROCESSORS):
        if step["type"] == "TemplateProcessing":
            pieces = list(step.get("single") or ())
            defined = step.get("special_tokens") or {}
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            added += sum(len(defined.get(name, {}).get("ids", ())) for name in names)
            before *= max(1, len(pieces) - len(names))
        else:
            added += 2
    refuse_beyond("tokens that the tokenizer puts around a text:", added, _MOST_ADDED)
    kind = type(backend.model).__name__
    if kind not in MODELS:
        raise BundleError(
            f"the tokenizer's model is {kind!r:.80}, which this version does not know; use a newer vlmexport"
        )
    longest = max(map(_bytes, vocabulary), default=0)
    decoded = longest
    for step in read_steps("decoder", "decoders", DECODERS):
        decoded *= DECODERS[step["type"]](step)
        pattern = _regex(step)
        if pattern is not None and _work(pattern).steps.per_run:  # a whole text may be decoded as one
            raise _slow(pattern)
    refuse_beyond("bytes that one token of the tokenizer may become:", decoded, LONGEST_TOKEN)
    affixes = (
        getattr(backend.model, name, None) for name in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    affix = max(map(_bytes, affixes))
    refuse_beyond("bytes of the tokenizer's prefix or suffix of words:", affix, _LONGEST_AFFIX)
    word = int(getattr(backend.model, "max_input_chars_per_word", 1))
    refuse_beyond("characters of a word that the tokenizer looks up:", word, _LONGEST_WORD)
    # Unigram looks for every token at every place, WordPiece for every part of a word at every place of it.
    per_byte = longest if kind == "Unigram" else max(1, word * word // 64)
    added = [token.content for token in backend.get_added_tokens_decoder().values() if token.content]
    patterns = {_regex(step) for step in (*normalizers, *pre_tokenizers)} - {None}
    works = {pattern: _work(pattern) for pattern in patterns if pattern is not None}
    growth = Growth(tuple(normalizers), before, max(1, per_byte), tuple(added), tuple(pre_tokenizers), works)
    refuse_beyond("bytes that the tokenizer may make of one:", growth.factor, LARGEST // _LEAST)
    return growth


def _regex(step: Step) -> str | None:
    pattern = step.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, Mapping) else None


def _work(pattern: str) -> regexes.Work:
    """Raises `BundleError` for a pattern whose work nobody knows, or which takes too long on short texts."""
    try:
        work = regexes.work_of(pattern)
    except UnreadableRegex as error:
        raise BundleError(
            f"the tokenizer's regular expression {_shortened(pattern)} cannot be judged: {error}; {_REMEDY}"
        ) from None
    if work.steps.more or work.on(_LEAST, None) > regexes.STEPS:
        raise _slow(pattern)
    return work


def _slow(pattern: str) -> BundleError:
    return BundleError(
        f"the tokenizer's regular expression {_shortened(pattern)} may try too many ways to match a text; {_REMEDY}"
    )


def _shortened(pattern: str) -> str:
    return ascii(pattern if len(pattern) <= 60 else f"{pattern[:60]}...")


def _steps(part: Any, inner: str) -> Iterator[Step]:
    """The steps of a part of a tokenizer, those of sequences in their order."""
    waiting = [part] if part is not None else []
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Mapping):
            raise BundleError(f"a step of the tokenizer is {type(step).__name__}, no object; {_REMEDY}")
        if step.get("type") == "Sequence":
            waiting += reversed(step.get(inner) or [])
        else:
            yield step


def state_of(part: Any) -> Any:
    """A part of a tokenizer as `tokenizer.json` holds it."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizer(step: Step) -> Any:
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, ""))
    document = {**json.loads(empty.to_str()), "normalizer": step}
    return tokenizers.Tokenizer.from_str(json.dumps(document)).normalizer
