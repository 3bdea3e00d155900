"""Tokenizers of bundles from anywhere: what they make of a text is bounded beforehand, and they fail in one line."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from vlmexport.runtime.common.errors import BundleError, PromptError, VlmexportError
from vlmexport.runtime.text import growth
from vlmexport.runtime.text.incremental import IncrementalDetokenizer
from vlmexport.runtime.text.tokenizer import Tokenizer, is_panic

from tests.support import handmade_bundle

THOUSAND = normalizers.Replace("a", "a" * 1000)
LEVELS = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 12)
MANY = processors.TemplateProcessing(single=" ".join(["[C]"] * 2000 + ["$A"]), special_tokens=[("[C]", 1)])
TWICE = processors.TemplateProcessing(single=" ".join(["$A"] * 5000), special_tokens=[])


def letters(**parts: Any) -> tokenizers.Tokenizer:
    """Every byte of a text is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "texts that grow": ({"normalizer": normalizers.Sequence([THOUSAND] * 4)}, "may make of one: 2,000,000,000,000, more"),
    "without end": ({"normalizer": normalizers.Sequence([THOUSAND] * 99)}, "may make of one: very many, more"),
    "many steps": ({"normalizer": normalizers.Sequence([normalizers.Prepend("a")] * 2000)}, "normalizer has 2000 steps"),
    "a long beginning": ({"normalizer": normalizers.Prepend("a" * 10**6)}, "may make of one: 2,000,002, more"),
    "a pattern that is nowhere": ({"normalizer": normalizers.Replace(Regex("x*"), "a" * 10**4)}, "may make of one"),
    "bytes of bytes": ({"pre_tokenizer": LEVELS}, "may make of one"),
    "words of other beginnings": (
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Metaspace(letter) for letter in "abcdefghijklm"])},
        "may make of one",
    ),
    "parts of nothing": ({"pre_tokenizer": pre_tokenizers.FixedLength(0)}, "parts of length 0"),
    "tokens around": ({"post_processor": MANY}, "around a text: 2,000, more than 1,000"),
    "the text again": ({"post_processor": TWICE}, "may make of one: 10,000, more"),
    "the text again and again": ({"post_processor": processors.Sequence([TWICE] * 101)}, "post_processor has 101 steps"),
    "tokens that grow": ({"decoder": decoders.Sequence([decoders.Replace("a", "a" * 200)] * 2)}, "one token .* become: 80,000"),
    "long prefixes": ({"model": models.WordPiece({"[U]": 0}, unk_token="[U]", continuing_subword_prefix="#" * 999)}, "999, more"),
    "long words": ({"model": models.WordPiece({"[U]": 0}, unk_token="[U]", max_input_chars_per_word=10**9)}, "looks up"),
    "a long token": ({"model": models.WordLevel({"a" * 20000: 0}, unk_token="")}, "one token .* become: 20,000"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_unbounded_tokenizer_steps_are_refused(tmp_path: Path, kind: str) -> None:
    parts, message = HOSTILE[kind]
    letters(**parts).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BundleError, match=message) as caught:
        Tokenizer.open(tmp_path / "tokenizer.json")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_that_would_become_too_long_is_refused_and_shorter_ones_are_read() -> None:
    tokenizer = Tokenizer(letters(normalizer=normalizers.Sequence([normalizers.Replace("a", "a" * 100)])))
    assert len(tokenizer.encode("ab" * 1000)) == 101_000
    assert len(tokenizer.encode("b" * 100_000)) == 100_000, "measured: there is nothing to replace"
    with pytest.raises(
        PromptError, match=r"more than 4,000,000 bytes of a prompt of 30,000 characters: shorten it"
    ):
        tokenizer.encode("a" * 30_000)
    with pytest.raises(PromptError, match="shorten it"):
        Tokenizer(letters(normalizer=normalizers.Prepend("x" * 1000))).encode("b" * 30_000)


@pytest.mark.parametrize("first", [normalizers.Lowercase(), normalizers.BertNormalizer()])
def test_a_step_that_changes_ascii_is_measured_before_the_steps_that_lengthen_it(first: Any) -> None:
    growing = [normalizers.Replace("b", "c" * 12), normalizers.Replace("c", "d" * 12)]
    tokenizer = Tokenizer(letters(normalizer=normalizers.Sequence([first, *growing])))
    with pytest.raises(PromptError, match="of a prompt of 300,000 characters: shorten it"):
        tokenizer.encode("B" * 300_000)


@pytest.mark.parametrize("name", growth._KEEP_ASCII)
def test_ascii_stays_as_it_is(name: str) -> None:
    text = "".join(map(chr, range(128)))
    assert getattr(normalizers, name)().normalize_str(text) == text


def test_quadratic_models_read_short_texts_only() -> None:
    backend = letters(model=models.Unigram([("<unk>", 0.0), ("a", -1.0), ("a" * 5000, -2.0)], unk_id=0))
    assert len(Tokenizer(backend).encode("a" * 10_000)) == 2
    with pytest.raises(PromptError, match="more than 80,000 bytes"):
        Tokenizer(backend).encode("a" * 100_000)


TEXT = st.text(st.sampled_from("aAéÅß ﷺﬀİ\u1f82\n中#.Ⱥ☃𝅘𝅥𝅮"), max_size=12)
CHARSMAP = base64.b64encode(b"\4\0\0\0\0\0\0\0abc\0de\0").decode()


@settings(max_examples=200, deadline=None)
@given(TEXT, st.data())
def test_tokenizer_steps_stay_within_their_factor(text: str, data: st.DataObject) -> None:
    steps: dict[str, list[Any]] = {
        "normalizer": [
            normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase(),
            normalizers.StripAccents(), normalizers.Nmt(), normalizers.Strip(), normalizers.ByteLevel(),
            normalizers.BertNormalizer(), normalizers.Prepend("☃b"), normalizers.Replace("a", "bcd"),
            normalizers.Replace(Regex("a*"), "☃"), normalizers.Replace(" ", "▁"),
        ],
        "pre_tokenizer": [
            pre_tokenizers.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Metaspace(),
            pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace(),
            pre_tokenizers.Digits(), pre_tokenizers.FixedLength(2), pre_tokenizers.UnicodeScripts(),
            pre_tokenizers.Split("a", "isolated"), pre_tokenizers.BertPreTokenizer(), pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.CharDelimiterSplit("a"),
        ],
    }  # fmt: skip
    before = data.draw(st.lists(st.sampled_from(steps["normalizer"]), max_size=3))
    behind = data.draw(st.lists(st.sampled_from(steps["pre_tokenizer"]), max_size=3))
    backend = letters(normalizer=normalizers.Sequence(before), pre_tokenizer=pre_tokenizers.Sequence(behind))
    try:
        bounds = growth.growth_of(backend, backend.get_vocab())
    except BundleError as error:
        assert "may make of one" in str(error)
        return
    try:
        normal = backend.normalizer.normalize_str(text)
        made = sum(len(piece.encode()) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal))
    except BaseException as error:  # some steps behind others are too much for the library
        assert is_panic(error), error
        return
    assert made <= len(text.encode()) * bounds.factor
    assert made <= bounds._measured(text, len(text.encode()))


@pytest.mark.parametrize(
    "steps",
    [
        [normalizers.Prepend(" " * 10), normalizers.Replace(" ", "x" * 10)],
        [normalizers.Replace(Regex("b(?!.*d)"), "y" * 100)],
        [normalizers.Prepend("z" * 99)],
    ],
)
def test_pieces_between_added_tokens_are_bounded_separately(steps: list[Any]) -> None:
    backend = letters(normalizer=normalizers.Sequence(steps))
    backend.add_special_tokens(["A"])
    tokenizer = Tokenizer(backend)
    text = "bbbbA" * 100 + "d"
    assert tokenizer.encode(text).size <= tokenizer.growth._measured(text, len(text))
    shorter = tokenizer.growth._measured("bb" * 150, 300)
    assert shorter <= tokenizer.growth._measured(text, len(text))


def test_every_step_of_the_library_is_in_the_tables() -> None:
    for module, known in (
        (normalizers, growth.NORMALIZERS), (pre_tokenizers, growth.PRE_TOKENIZERS), (decoders, growth.DECODERS),
        (processors, growth.PROCESSORS), (models, growth.MODELS),
    ):  # fmt: skip
        base = next(
            getattr(module, name)
            for name in ("Normalizer", "PreTokenizer", "Decoder", "PostProcessor", "Model")
            if hasattr(module, name)
        )
        there = {
            name for name, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base and name != "Sequence"
        }  # fmt: skip
        assert there == set(known)


SAME_IDS: dict[str, tuple[dict[str, int], dict[int, str], str]] = {
    "two of the vocabulary": ({"a": 1, "bc": 1, "[U]": 0}, {}, "two tokens of id 1, 'a' and 'bc'"),
    "three": ({"b": 7, "a": 7, "c": 7, "[U]": 0}, {}, "of id 7, 'a' and 'b'"),
    "an added one elsewhere": ({"a": 1, "b": 1, "c": 2}, {2: "c"}, "of id 1, 'a' and 'b'"),
    "hidden by an added one": ({"a": 1, "b": 1, "c": 2}, {1: "a"}, ""),
    "one each": ({"a": 1, "b": 3, "c": 2}, {1: "a"}, ""),
}
"""Vocabulary, added tokens, what is said."""


@pytest.mark.parametrize("kind", SAME_IDS)
def test_two_tokens_of_one_id_are_refused_unless_an_added_one_hides_them(tmp_path: Path, kind: str) -> None:
    vocabulary, added, message = SAME_IDS[kind]
    document = json.loads(tokenizers.Tokenizer(models.WordLevel({}, "[U]")).to_str())
    document["model"]["vocab"] = vocabulary
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"] = [{"id": i, "content": content, **flags} for i, content in added.items()]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    if message:
        with pytest.raises(BundleError, match=f"{message}; use the model's own tokenizer"):
            Tokenizer.open(path)
    else:
        assert {Tokenizer.open(path).alone(1) for _ in range(8)} == {"a"}


NORMALIZED: dict[str, tuple[list[str], bool, str]] = {
    "one text": (
        ["[A]", "[b]", "[a]"],
        True,
        r"one text of its tokens '\[A\]' and '\[a\]'; use the model's own",
    ),
    "not normalised": (["[A]", "[a]"], False, ""),
    "two texts": (["[A]", "[b]"], True, ""),
    "too many": (
        ["[" + "x" * 9000 + str(i) + "]" for i in range(500)],
        True,
        "bytes of its added tokens, more than",
    ),
}
"""Added tokens, whether they are normalised, what is said."""


@pytest.mark.parametrize("kind", NORMALIZED)
def test_added_tokens_that_are_looked_for_as_one_text_are_refused(kind: str) -> None:
    contents, normalized, message = NORMALIZED[kind]
    backend = letters(normalizer=normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC()]))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=normalized) for text in contents])
    if message:
        with pytest.raises(BundleError, match=message):
            Tokenizer(backend)
    else:
        Tokenizer(backend)


def test_unknown_tokenizer_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "NORMALIZERS", {})
    with pytest.raises(
        BundleError, match="normalizer has a step 'NFC', which this version does not know; use a newer"
    ):
        growth.growth_of(letters(normalizer=normalizers.NFC()), ())


@pytest.mark.parametrize("text", ["A", "AA", "aA", "a"])
def test_a_regex_matches_before_and_behind_every_character(text: str) -> None:
    step = normalizers.Replace(Regex("a*"), "☃")
    factor = growth.NORMALIZERS["Replace"](json.loads(step.__getstate__()))
    assert len(step.normalize_str(text).encode()) <= factor * len(text)


def test_a_charsmap_is_bounded_by_the_longest_of_its_texts() -> None:
    assert growth.NORMALIZERS["Precompiled"]({"precompiled_charsmap": CHARSMAP}) == 3
    assert growth.NORMALIZERS["Precompiled"]({"precompiled_charsmap": None}) == 1


# --- what the library raises ---


def unknown() -> Tokenizer:
    """A word that it does not know, and no token for such words."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="nope")))


FAILING = {
    "a word without a token": lambda: unknown().encode("b"),
    "an unknown piece": lambda: Tokenizer(tokenizers.Tokenizer(models.Unigram([("a", 0.0)], None))).encode(
        "b"
    ),
    "a negative token": lambda: unknown().decode([-1]),
    "a token beyond 32 bits": lambda: unknown().alone(2**40),
    "no text": lambda: unknown().id(3),  # type: ignore[arg-type]
    "a number beyond": lambda: unknown().token(2**70),
    "a stream": lambda: IncrementalDetokenizer(unknown()).push(-5),
    "decoding that ends before a text": lambda: Tokenizer(letters(decoder=decoders.Strip("!", 0, 5))).decode(
        [0]
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_library_errors_become_one_line(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        VlmexportError, match=r"the bundle's tokenizer cannot .*; build the bundle again"
    ) as caught:
        FAILING[kind]()
    assert str(caught.value).isprintable()


class Late(TypeError):
    """What a program's handler raises; the library raises TypeError, too."""


@pytest.mark.parametrize("call", ["encode", "decode", "id", "token"])
def test_signal_handler_exception_is_not_translated(call: str) -> None:
    def late(*_: Any) -> None:
        raise Late("your time is over")

    class Backend:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: signal.raise_signal(signal.SIGTERM)

    tokenizer = Tokenizer(handmade_bundle.metaspace_tokenizer())
    tokenizer.backend = Backend()  # type: ignore[assignment]
    before = signal.signal(signal.SIGTERM, late)
    try:
        with pytest.raises(Late, match="your time is over") as caught:
            getattr(tokenizer, call)({"decode": [1], "token": 1}.get(call, "cup"))
        assert caught.value.__cause__ is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_regex_that_gives_up_is_refused(tmp_path: Path) -> None:
    backend = letters(pre_tokenizer=pre_tokenizers.Split(Regex("(a|aa|aaa)+$"), "isolated"))
    backend.save(str(tmp_path / "tokenizer.json"))
    code = f"""
from pathlib import Path
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.images.quiet import quiet_stderr
from vlmexport.runtime.text import growth, regexes
from vlmexport.runtime.text.tokenizer import Tokenizer
growth._work = lambda pattern: regexes.Work(regexes.Steps(1), ())  # it would be refused
tokenizer = Tokenizer.open(Path({str(tmp_path / "tokenizer.json")!r}))
try:
    with quiet_stderr():
        tokenizer.encode("a" * 60 + "b")
except BundleError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot encode" in done.stdout and done.stderr == ""
    assert json.loads(backend.to_str())["pre_tokenizer"]["type"] == "Split"
