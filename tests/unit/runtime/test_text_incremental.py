"""The streaming detokenizer: pieces joined equal the whole decoding, and nothing is handed out too early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from vlmexport.runtime.text.incremental import IncrementalDetokenizer
from vlmexport.runtime.text.tokenizer import Tokenizer

from tests.support import handmade_bundle


def _word_piece() -> Backend:
    pieces = ["[UNK]", "the", "cup", "##s", "##ing", ".", "is", "n't", "'", "s"]
    tokenizer = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _no_decoder() -> Backend:
    return Backend(models.WordLevel({"a": 0, "b": 1, "": 2, " ": 3, "[UNK]": 4}, unk_token="[UNK]"))


TOKENIZERS = {
    "metaspace": Tokenizer(handmade_bundle.metaspace_tokenizer()),
    "byte level": Tokenizer(handmade_bundle.byte_level_tokenizer()),
    "byte fallback": Tokenizer(handmade_bundle.byte_fallback_tokenizer()),
    "word piece": Tokenizer(_word_piece()),
    "no decoder": Tokenizer(_no_decoder()),
}


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_tokens_join_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)
    )  # rows without a token, too
    skip = data.draw(st.booleans())
    pieces = stream(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["metaspace", "byte level", "byte fallback"])
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30))
def test_encoded_text_joins_to_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).tolist()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["metaspace", "byte level", "byte fallback"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_the_first_is_complete(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text(alphabet="abhet €é", max_size=30))
    stop = data.draw(st.lists(st.text(alphabet="abhet €é", min_size=1, max_size=4), max_size=3))
    ids = tokenizer.encode(text).tolist()
    whole = tokenizer.decode(ids)
    # The stop string that is complete first wins; of two complete at the same character, the longer.
    ends = [(end, end - len(s)) for end in range(len(whole) + 1) for s in stop if whole[:end].endswith(s)]
    expected = whole[: min(ends)[1]] if ends else whole
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    joined = ""
    for i in ids:
        joined += detokenizer.push(i)
        assert expected.startswith(joined), "text was handed out that had to be taken back"
    joined += detokenizer.finish()
    assert joined == expected
    assert detokenizer.stopped == bool(ends)


def test_no_half_character_is_ever_handed_out() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("a€🙂b").tolist()
    assert len(ids) == 9  # the euro sign is 3 tokens, the smile 4
    assert stream(tokenizer, ids) == ["a", "", "", "€", "", "", "", "🙂", "b", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_id_without_a_token_does_not_end_byte_tokens(skip: bool) -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    low, high = (tokenizer.backend.token_to_id(token) for token in ("<0x01>", "<0xB5>"))
    ids = [low, tokenizer.vocab_size, high]
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids) == "\ufffd\ufffd"


@pytest.mark.parametrize("hold", [True, False])
def test_a_special_token_is_left_out_under_each_of_its_ids(hold: bool) -> None:
    backend = Backend(models.Unigram([("</s>", 0.0), ("a", 0.0), ("</s>", 0.0)], 1))
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend)
    assert list(tokenizer.special_tokens) == [2] and tokenizer.decode([0, 1, 2]) == "a"
    detokenizer = IncrementalDetokenizer(tokenizer)
    take = detokenizer.hold if hold else detokenizer.push
    assert "".join([*map(take, (0, 1, 2)), detokenizer.finish()]) == "a"


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    euro = [tokenizer.id(f"<0x{value:02X}>") for value in "€".encode()]
    good = [tokenizer.id("a"), *euro, tokenizer.id("b")]
    assert stream(tokenizer, good) == ["a", "", "", "", "€b", ""]
    # One more bad byte turns the finished character before it into replacement characters, too.
    bad = [tokenizer.id("a"), *euro, tokenizer.id("<0xFF>"), tokenizer.id("b")]
    assert tokenizer.decode(bad) == "a\ufffd\ufffd\ufffd\ufffdb"
    assert "".join(stream(tokenizer, bad)) == tokenizer.decode(bad)


def test_words_are_emitted_one_by_one() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = tokenizer.encode("the red cup").tolist()
    assert stream(tokenizer, ids) == ["the", " red", " cup", "", ""]


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("hi thx").tolist()
    assert "".join(stream(tokenizer, ids, [" the"])) == "hi thx"
    detokenizer = IncrementalDetokenizer(tokenizer, [" the"])
    assert [detokenizer.push(i) for i in ids] == ["h", "i", "", "", " thx"]
    assert detokenizer.push(tokenizer.id("Ġthe")) == ""
    assert detokenizer.stopped
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.finish() == ""


def test_cost_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["metaspace"]
    longest, decode = 0, tokenizer.backend.decode

    class Spy:
        def decode(self, ids: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids, **options)

        id_to_token = staticmethod(tokenizer.backend.id_to_token)

    monkeypatch.setattr(tokenizer, "backend", Spy())
    ids = [tokenizer.special_ids and 3, 4, 5] * 300
    stream(tokenizer, ids)
    assert longest <= 3


# --- stop strings that are or hold special tokens ---

SPECIAL = {"metaspace": ["<image>", "</s>"], "byte level": ["<|im_start|>", "<|im_end|>"], "byte fallback": ["<s>", "</s>"]}  # fmt: skip


def stopped_at(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> tuple[int | None, str]:
    """(the first token behind which the text has ended, None where it has not; the text)."""
    detokenizer, joined = IncrementalDetokenizer(tokenizer, stop), ""
    for at, token in enumerate(ids):
        joined += detokenizer.push(token)
        if detokenizer.stopped:
            return at, joined
    return None, joined + detokenizer.finish()


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_in_stop_strings_stop_as_in_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    criteria = transformers.generation.stopping_criteria.StopStringCriteria
    tokenizer, (one, other) = TOKENIZERS[name], SPECIAL[name]
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    words = [
        tokenizer.encode(word, add_special_tokens=False).tolist()[-1] for word in ("a", "the", "b", " the")
    ]
    drawn = [*words, tokenizer.id(one), tokenizer.id(other)]

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        ids = [words[0], *data.draw(st.lists(st.sampled_from(drawn), max_size=9))]
        piece = st.sampled_from([one, other, "a", "b", "the", " the"])
        stop = "".join(data.draw(st.lists(piece, min_size=1, max_size=3).filter({one, other}.intersection)))
        judge = criteria(reference, stop)
        ends = [bool(judge(torch.tensor([ids[: end + 1]]), None)[0]) for end in range(len(ids))]
        at, text = stopped_at(tokenizer, ids, [stop])
        assert at == (ends.index(True) if any(ends) else None), (stop, ids)
        if at is not None:
            before = stop[: min(place for token in (one, other) if (place := stop.find(token)) >= 0)]
            whole = tokenizer.decode(ids[: at + 1])
            assert whole.startswith(text)
            assert whole[len(text) :].startswith(before), "the text ends before the stop string"
        else:
            assert text == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize(
    ("stop", "text", "at"),
    [
        (["<|im_end|>"], "a€", 4),
        (["a€<|im_end|>"], "", 4),
        (["€<|im_end|>b"], "a", 5),
        (["<|im_end|>b<|im_start|>"], "a€", 6),
        (["€b"], "a", 5),  # without a special token: what is shown
        (["<|im_end|>", "€"], "a", 3),
        (["<|im_end|>a"], "a€b", None),
        (["im_end"], "a€b", None),
    ],
)
def test_special_token_stop_position(stop: list[str], text: str, at: int | None) -> None:
    tokenizer = TOKENIZERS["byte level"]
    end, start = tokenizer.id("<|im_end|>"), tokenizer.id("<|im_start|>")
    ids = [*tokenizer.encode("a€").tolist(), end, *tokenizer.encode("b").tolist(), start]
    assert stopped_at(tokenizer, ids, stop) == (at, text)


def test_special_token_flushes_unfinished_bytes() -> None:
    tokenizer = TOKENIZERS["byte level"]
    euro, end = tokenizer.encode("€").tolist(), tokenizer.id("<|im_end|>")
    assert stopped_at(tokenizer, [*euro[:2], end], ["<|im_end|>"]) == (2, "\ufffd")
    assert stopped_at(tokenizer, [*euro[:2], end, euro[2]], ["<|im_end|>x"]) == (None, "€")
    fallback = TOKENIZERS["byte fallback"]
    line, close = fallback.id("<0x0A>"), fallback.id("</s>")
    ids = [fallback.id("a"), line, close, line, fallback.id("b")]
    assert stopped_at(fallback, ids, ["\n</s>\n"]) == (4, "a")
    assert stopped_at(fallback, ids, ["\n</s>"]) == (2, "a")
