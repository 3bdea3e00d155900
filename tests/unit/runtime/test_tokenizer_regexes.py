"""Regular expressions of a bundle's tokenizer: what they may take of a text is bounded before the library runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from vlmexport.runtime.common.errors import BundleError, PromptError
from vlmexport.runtime.text import growth, regexes
from vlmexport.runtime.text.regex_nodes import UnreadableRegex

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN_UPPER, HAN_LOWER = (f"{kind[:-1]}&&[^\\p{{Han}}]]" for kind in (UPPER, LOWER))
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + BLANKS
)
PUBLISHED: dict[str, str] = {
    "GPT-2": GPT2,
    "CLIP, blanks": r"\s+",
    "CLIP": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Llama 3, GLM 4": LLAMA3,
    "Qwen2": QWEN2,
    "Qwen3.5": QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    "o200k, Command A": O200K,
    "tekken": TEKKEN,
    "DeepSeek V3, digits": r"\p{N}{1,3}",
    "DeepSeek V3, Chinese": r"[一-龥぀-ゟ゠-ヿ]+",
    "DeepSeek V3": DEEPSEEK3,
    "DeepSeek V2, lines": r"[\r\n]",
    "DeepSeek V2, letters": r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ𐐀-𐑏]+",
    "DeepSeek V2, punctuation": r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    "DeepSeek V2, ends": r"\s+$",
    "DeepSeek Coder": r"\s?\p{P}+",
    "Falcon, digits": r"[0-9][0-9][0-9]",
    "Falcon, punctuation": r"[\p{P}\$\+<=>\^~\|`]+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Poro": r" ?[^(\s|.,!?…。，、।۔،)]+",
    "Kimi K2": (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}*{HAN_LOWER}+{SHORT}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}+{HAN_LOWER}*{SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
    ),
    "Command A, digits": r"\d{1,3}(?=(?:\d{3})*\b)",
    "SuperBPE, digits": r"(?=(\d{3})+(?!\d))",
    "Gemma, T5, XLNet": r" {2,}",
    "Gemma 4": r"[^\n]+|[\n]+",
    "Ling": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "EXAONE 4": (
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "Seed": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}" + "\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "marks in words": (
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}|\p{{M}}|\x{{200C}}|\x{{200D}})+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
    ),
    "Chameleon, pictures": "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "Chameleon, sentinels": "<sentinel:[0-9]+>",
    "Chameleon, blanks": r"([\t\n]|    |  )",
    "Chameleon, punctuation": r"[\p{P}!-/:-@\[-`{-~]",
}  # fmt: skip
HOSTILE = [
    r"a*a*b(?!x)", r"(a+)+b", r"(a|a)*b", r"(?:a?){1000}b", r"a{1,2}+b", r"(a|aa|aaa)+$", r"(?>(a|a)*b)", r"(?:(a|a)*b)?+",
    r"(?=(a+)+b)c", r"(?:a{0,1000}){0,1000}b", r"a{0,2000}a{0,2000}b", r"\s*\s*\n", r"(?:a*b*)*c", r"(?i:[ßs])*b", r"a?" * 30 + "b",
    r"(?:a(?=.*x))*", r"(?:a*+b)*", r"a*?a*?b", r"(?x) a * # so \n a *\n b".replace("\\n", "\n"), r"((?>a*)*)*b",
    r"(?=a*)b*c" "(?=.*x)" * 999, r"(?<name>a+)+b", r"(?'name'a+)+b", r"[[a-c]&&[^b]]*[a\]]*x", r"\x{61}*\u0061*\x61", r"(?m:.*)(?-m:.*)x",
]  # fmt: skip
UNREADABLE = {
    r"(a)\1": r"\\\\1", r"\Xa": r"\\\\Xa", r"(?~a)": r"\(\?~a", r"\Qa\E": r"\\\\Q", r"(?<n>a|\g<n>b)": r"\\\\g", r"a(?i)b": r"\(\?i",
    r"a{2}?": r"\{2\}\?", r"a{3,1}": r"\{3,1\}", r"(?<=a+)b": "looks behind", r"(?<!a{0,200})b": "looks behind",
    r"(?<=(?:a{0,20}b){0,20})c": "looks behind", r"(*FAIL)": r"\(\*FAIL", r"(?y{g}:a)": r"\(\?y", r"[]a]": r"\[\]a", r"[\c]]*]": r"\\\\c",
    "(" * 30 + "a" + ")" * 30: "20 deep", "a" + "*" * 30: "too often", "a" * 30_000: "30000 characters",
}  # fmt: skip


def backend(pattern: str = "x", before: tuple[Any, ...] = (), **parts: Any) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordLevel({"[U]": 0}, unk_token="[U]"))
    found.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.Split(Regex(pattern), "isolated")])
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def bounds(*args: Any, **parts: Any) -> growth.Growth:
    made = backend(*args, **parts)
    return growth.growth_of(made, made.get_vocab())


LINES = "The quick brown fox, n° 12345, jumps over\n\n    if (x == 1) { return FOO_BAR[i]; }  // it's 你好，世界。 Straße\r\n\t\t"
PROSE = LINES * (1_000_000 // len(LINES.encode()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_are_accepted_and_read_long_prompts(name: str) -> None:
    found = bounds(PUBLISHED[name])
    (work,) = found.works.values()
    assert work.steps.fixed < 200 and work.steps.per_run <= 15
    found.check(PROSE)
    replaces = backend(normalizer=normalizers.Replace(Regex(PUBLISHED[name]), " "))
    growth.growth_of(replaces, replaces.get_vocab())


@pytest.mark.parametrize("pattern", [GPT2, QWEN2, LLAMA3, TEKKEN, O200K])
def test_known_linear_patterns_read_any_text(pattern: str) -> None:
    for text in (" " * 1_000_000, "漢" * 300_000, "A" * 1_000_000):
        bounds(pattern).check(text)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_slow_patterns_are_refused(pattern: str) -> None:
    for parts in ({"pattern": pattern}, {"normalizer": normalizers.Replace(Regex(pattern), " ")},
                  {"decoder": decoders.Replace(Regex(pattern), " ")}):  # fmt: skip
        with pytest.raises(
            BundleError, match="may try too many ways to match a text; use the model's own"
        ) as caught:
            bounds(**parts)
        assert repr(pattern[:20])[1:-1].replace("ß", "\\xdf") in str(caught.value)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 250


@pytest.mark.parametrize("pattern", UNREADABLE)
def test_unknown_pattern_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(UnreadableRegex, match=UNREADABLE[pattern]):
        regexes.work_of(pattern)


@pytest.mark.parametrize("pattern", [r"(?:[ab]|[bc])*d", r"(?:\w|\d)*;", r"(?:a|a){0,12}(?:a|a){0,12}b"])
def test_choices_that_begin_alike_are_counted_each(pattern: str) -> None:
    with pytest.raises(BundleError, match="may try too many ways"):
        bounds(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"\s*(?:\n|)", r"(?:a|b|c)*", r"(?:a+)+", r"(?x) a {1,2} # (", r"a(?#(\))*", r"[a(?#]+", r"a{,3}b"],
)
def test_patterns_that_cannot_backtrack_are_linear(pattern: str) -> None:
    assert not regexes.work_of(pattern).steps.per_run


@pytest.mark.parametrize("pattern", [r"\s*+\s*+\n", r"(?>\s*)(?>\s*)\n", r"(?:a|b|c)*d", r"(?:a++|b)?c*d"])
def test_repeats_that_are_not_entered_again_do_not_multiply(pattern: str) -> None:
    steps = regexes.work_of(pattern).steps
    assert steps.per_run and not steps.more


def test_an_unreadable_pattern_is_a_refused_bundle() -> None:
    with pytest.raises(
        BundleError, match=r"expression '\(a\)\\\\1' cannot be judged: its part .* use the model's own"
    ):
        bounds(r"(a)\1")


def test_a_decoder_may_be_given_the_whole_text_and_matches_in_linear_time() -> None:
    bounds(decoder=decoders.Replace(Regex(r" {2,}"), " "))
    with pytest.raises(BundleError, match="may try too many ways"):
        bounds(decoder=decoders.Replace(Regex(r"\s+$"), ""))


ENDS = r"\s+$"
LONG = {
    "a run": (bounds(ENDS), " " * 100_000, False),
    "runs that are cut": (bounds(ENDS), (" " * 500 + "x") * 1000, True),
    "a run of another kind": (bounds(ENDS), "x" * 1_000_000, True),
    "a run under folded case": (bounds(r"(?i:a)*b"), "x" * 100_000, False),
    "a run of lines": (bounds(r"(?m:.)*b"), "x\n" * 50_000, False),
    "lines": (bounds(r".*b"), "x\n" * 50_000, True),
    "runs made by a normalizer": (bounds(ENDS, normalizer=normalizers.Replace("x", "")), " x" * 50_000, False),
    "runs cut by a normalizer": (bounds(ENDS, normalizer=normalizers.Replace(" ", "x")), " " * 100_000, True),
    "made by a regex": (bounds(ENDS, normalizer=normalizers.Replace(Regex("[xy]"), "")), " x" * 50_000, False),
    "composed": (bounds(ENDS, normalizer=normalizers.NFC()), "e\u0301 " * 50_000, True),
    "letters of bytes": (
        bounds(r"\p{L}+$", (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),)), " " * 100_000, False,
    ),
    "pieces": (bounds(ENDS, (pre_tokenizers.Digits(),)), "x " * 50_000, True),
    "the first of two": (bounds("x", (pre_tokenizers.Split(Regex(ENDS), "isolated"),)), " " * 100_000, False),
    "a normalizer's": (bounds(normalizer=normalizers.Replace(Regex(ENDS), "")), " " * 100_000, False),
    "many choices": (bounds("a{0,2000}b"), "x" * 1_000_000, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", LONG)
def test_texts_are_refused_by_their_runs_of_characters(kind: str) -> None:
    found, text, fits = LONG[kind]
    if fits:
        found.check(text)
    else:
        with pytest.raises(
            PromptError, match=r"may take too long for a prompt of [\d,]+ characters by its .*: shorten"
        ):
            found.check(text)
        found.check(text[:2000])


def test_pieces_between_added_tokens_may_be_normalised_to_other_runs() -> None:
    made = backend(ENDS, normalizer=normalizers.Replace(" A ", "xxx"))
    made.add_special_tokens(["A"])
    found = growth.growth_of(made, made.get_vocab())
    with pytest.raises(PromptError, match="too long"):
        found.check(" A " * 50_000)


# --- against a matcher that counts ---

Match = Callable[[str, int], Iterator[int]]


class Count:
    steps = 0


def leaf(accepted: str) -> Match:
    def match(text: str, at: int) -> Iterator[int]:
        Count.steps += 1
        if Count.steps > 200_000:
            raise OverflowError
        if at < len(text) and text[at] in accepted:
            yield at + 1

    return match


def chain(*parts: Match) -> Match:
    def match(text: str, at: int) -> Iterator[int]:
        if not parts:
            yield at
            return
        for end in parts[0](text, at):
            yield from chain(*parts[1:])(text, end)

    return match


def choice(*parts: Match) -> Match:
    return lambda text, at: (end for part in parts for end in part(text, at))


def repeat(part: Match, least: int, most: int | None) -> Match:
    def match(text: str, at: int) -> Iterator[int]:
        if least:
            yield from chain(part, repeat(part, least - 1, None if most is None else most - 1))(text, at)
            return
        if most != 0:
            for end in part(text, at):
                if end != at:
                    yield from repeat(part, 0, None if most is None else most - 1)(text, end)
        yield at

    return match


def first(part: Match) -> Match:
    def match(text: str, at: int) -> Iterator[int]:
        for end in part(text, at):
            yield end
            return

    return match


def ahead(part: Match, wanted: bool) -> Match:
    return lambda text, at: iter([at] if any(True for _ in part(text, at)) == wanted else [])


LEAVES = st.sampled_from([("a", leaf("a")), ("b", leaf("b")), ("[ab]", leaf("ab")), ("c", leaf("c"))])
QUANTIFIERS = [("*", 0, None), ("+", 1, None), ("?", 0, 1), ("{2}", 2, 2), ("{0,3}", 0, 3), ("{2,}", 2, None)]
Pair = tuple[str, Match]


def larger(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    def repeated(pair: Pair, kind: tuple[str, int, int | None], possessive: bool) -> Pair:
        sign, least, most = kind
        made = repeat(pair[1], least, most)
        if possessive and sign in "*+?":
            return f"(?:{pair[0]}){sign}+", first(made)
        return f"(?:{pair[0]}){sign}", made

    def joined(pairs: list[Pair]) -> Pair:
        return "".join(f"(?:{p})" for p, _ in pairs), chain(*(m for _, m in pairs))

    def chosen(pairs: list[Pair]) -> Pair:
        return "|".join(p for p, _ in pairs), choice(*(m for _, m in pairs))

    return st.one_of(
        st.builds(repeated, inner, st.sampled_from(QUANTIFIERS), st.booleans()),
        st.lists(inner, min_size=2, max_size=3).map(joined),
        st.lists(inner, min_size=2, max_size=2).map(chosen),
        inner.map(lambda pair: (f"(?>{pair[0]})", first(pair[1]))),
        inner.map(lambda pair: (f"(?={pair[0]})", ahead(pair[1], True))),
        inner.map(lambda pair: (f"(?!{pair[0]})", ahead(pair[1], False))),
    )


def counted(match: Match, text: str) -> int:
    """Steps of finding all matches."""
    Count.steps, at = 0, 0
    while at <= len(text):
        end = next(match(text, at), at)
        at = max(end, at + 1)
    return Count.steps


@settings(max_examples=600, deadline=None)
@given(
    st.recursive(LEAVES, larger, max_leaves=7),
    st.sampled_from(["a" * 40, "ab" * 20, "a" * 20 + "b" * 20, "aab" * 13, "b" * 30 + "c"]),
)
def test_matching_takes_no_more_steps_than_the_pattern_says(pair: Pair, text: str) -> None:
    pattern, match = pair
    work = regexes.work_of(pattern)
    assume(not work.steps.more)
    limit = work.on(len(text) + 1, None)
    assume(limit < 200_000)
    assert counted(match, text) <= limit
