"""Answers in a grammar: what is accepted, what is said of errors, and that every answer keeps to it."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer as Backend
from vlmexport.runtime import GrammarError, Memory, Session
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.cli import main
from vlmexport.runtime.common import optional_deps
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.grammars.grammar import Grammar, of_regex, of_schema
from vlmexport.runtime.grammars.matcher import KEPT, GrammarMatcher, compile_grammar
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.sampling.logits_processors import Processors
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.text.tokenizer import Tokenizer

from tests.support import handmade_bundle

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

pytest.importorskip("torch", reason="building the bundles needs [export]")
pytest.importorskip("llguidance", reason="grammars need [grammar]")
pydantic = pytest.importorskip("pydantic")

Bundles = Callable[[str], "TinyBundle"]

GRASP = {
    "type": "object",
    "properties": {
        "object": {"enum": ["red mug", "cup"]},
        "graspable": {"type": "boolean"},
        "x": {"type": "integer", "minimum": -9, "maximum": 99},
        "note": {"type": "string", "maxLength": 4},
    },
    "required": ["object", "graspable", "x", "note"],
    "additionalProperties": False,
}


class Grasp(pydantic.BaseModel):
    """What is to be taken hold of."""

    object: str = pydantic.Field(max_length=5)
    graspable: bool
    model_config = {"extra": "forbid"}


@pytest.fixture(scope="module")
def session(tiny_bundle: Bundles) -> Any:
    with Session.load(tiny_bundle("llama").path, max_batch=3) as opened:
        yield opened


# --- options ---


def test_an_answer_keeps_to_its_schema_whatever_drafts(session: Session) -> None:
    for prompt in ("the red cup", "a table"):
        asked: dict[str, Any] = {"prompt": prompt, "schema": GRASP, "max_new_tokens": 120}
        plain = session.generate(**asked, draft="none")
        assert plain.finish_reason == "eos" and plain.parsed == json.loads(plain.text)
        jsonschema.validate(plain.parsed, GRASP)
        memory = Memory()
        for more in (
            {},
            {"draft": "grammar"},
            {"memory": memory},
            {"memory": memory},
            {"draft": "imitation"},
        ):
            found = session.generate(**asked, **more)
            assert found.tokens == plain.tokens and found.stats.accepted > 0, more
        streamed = session.stream(**asked)
        assert "".join(streamed) == plain.text and streamed.result.parsed == plain.parsed
        turn = session.chat().say(prompt, schema=GRASP, max_new_tokens=120)
        jsonschema.validate(turn.parsed, GRASP)
        batch = session.generate_batch([asked, {**asked, "draft": "none"}, {"prompt": prompt}, asked])
        assert [each.tokens == plain.tokens for each in batch] == [True, True, False, True]


def test_drafts_of_requests_come_before_others(session: Session) -> None:
    def drafted(**options: Any) -> str | None:
        return session.generate(prompt="cup", max_new_tokens=4, **options).stats.draft

    regex = {"regex": "[a-z ]+"}
    assert drafted(**regex, draft="medusa") == "grammar+medusa"
    assert drafted(**regex, draft="medusa", memory="a") == "memory+grammar+medusa"
    assert drafted(**regex, draft="medusa", speculative=False) is None
    assert drafted(**regex, draft="none", memory="a") is None
    assert drafted(**regex, draft="imitation") == "imitation@1", (
        "it drafts on the target's layers, in the grammar"
    )
    assert drafted(**regex, draft="memory+medusa", memory="a") == "memory+medusa", "as it was asked for"
    with pytest.raises(OptionError, match="proposes from the request's `grammar`; give that too"):
        drafted(draft="grammar+medusa")


def test_a_class_of_pydantics_is_a_schema(session: Session) -> None:
    found = session.generate(prompt="cup", schema=Grasp, max_new_tokens=120)
    assert isinstance(found.parsed, Grasp) and len(found.parsed.object) <= 5
    assert found.to_dict()["parsed"] == json.loads(found.text) == found.parsed.model_dump()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"choices": ["yes", 'no, "never"\n', "é"]}, {"yes", 'no, "never"\n', "é"}),
        ({"regex": "(red|blue) cup"}, {"red cup", "blue cup"}),
        ({"grammar": 'start: colour " cup"\ncolour: "red" | "blue"'}, {"red cup", "blue cup"}),
        ({"schema": {"const": [1, {"a": None}]}}, {'[1, {"a": null}]'}),
        ({"schema": '{"enum": ["a"]}'}, {'"a"'}),
        ({"schema": {"const": [1, 2], "x-guidance": {"item_separator": ","}}}, {"[1,2]"}),
    ],
)
def test_every_kind_of_grammar(session: Session, options: dict[str, Any], texts: set[str]) -> None:
    for temperature in (0.0, 2.0):
        found = session.generate(prompt="cup", **options, temperature=temperature, seed=3, max_new_tokens=60)
        assert found.text in texts and found.finish_reason == "eos"
        assert found.parsed == (json.loads(found.text) if "schema" in options else found.text)


def test_a_cut_answer_is_not_presented_as_whole(session: Session) -> None:
    for more in ({"max_new_tokens": 3}, {"stop": ["bj"], "max_new_tokens": 99}):
        found = session.generate(prompt="cup", schema=GRASP, **more)
        assert found.finish_reason in ("length", "stop") and found.parsed is None
        assert found.to_dict()["parsed"] is None
    plain = session.generate(prompt="cup", max_new_tokens=3)
    assert plain.parsed is None and "parsed" not in plain.to_dict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": 3}, "schema: 3 is no JSON schema; give a dict"),
        ({"schema": "{"}, "schema: '{' is no JSON schema"),
        ({"schema": {"type": "objekt"}}, "schema: Invalid type: objekt"),
        ({"schema": {"not": {}}}, r'schema: Unimplemented keys: \["not"\]'),
        ({"schema": {"x-guidance": 3}}, "is no JSON schema"),
        ({"schema": {"$ref": "#/nowhere"}}, "schema: Pointer '/nowhere' does not exist"),
        ({"schema": {"enum": []}}, "schema: Unsatisfiable schema"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": ""}, "regex: '' is no text of a grammar"),
        ({"regex": "a" * (1 << 21)}, "a grammar may have 1,048,576"),
        ({"grammar": "start: x"}, "grammar: .*unknown name"),
        ({"choices": []}, r"choices: \[\] is no list of texts"),
        ({"choices": "yes"}, "choices: 'yes' is no list of texts"),
        ({"choices": ["a", ""]}, "none of them empty"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices both say what the answer must be; choose one"),
        ({"regex": "a", "ignore_eos": True}, "leave ignore_eos out"),
    ],
)
def test_what_is_no_grammar_is_one_line(session: Session, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        session.stream(prompt="cup", **options)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_without_the_extra_the_command_is_named(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optional_deps.MODULES, "grammar", ("no_such_module",))
    with pytest.raises(OptionError, match=r"schema= needs the extra \[grammar\] .*pip install"):
        session.generate(prompt="cup", schema=GRASP)


def test_run_takes_a_schema_from_a_file(tiny_bundle: Bundles, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(GRASP))
    line = ["run", str(tiny_bundle("llama").path), "--prompt", "cup", "--schema", str(file)]
    assert main([*line, "--json", "--max-new-tokens", "120"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report["parsed"], GRASP)
    assert main([*line, "--max-new-tokens", "3"]) == 0
    assert "The answer was cut (length): it is not whole" in capsys.readouterr().err
    assert main([*line[:-1], str(tmp_path / "none")]) == 2
    file.write_text("[]")
    assert main(line) == 2


def test_compiled_grammars_are_kept_for_a_while(session: Session) -> None:
    """More than are kept; the first is compiled again, and threads may compile together."""
    for number in [*range(KEPT + 2), 0]:
        assert session.generate(prompt="cup", choices=[f"{number}"], max_new_tokens=9).text == f"{number}"
    found: list[Any] = []

    def compile_many() -> None:
        for number in range(60):
            grammar = of_regex("regex", f"a{number % 20}")
            found.append(compile_grammar(session.bundle, grammar).forced((), 9))

    threads = [threading.Thread(target=compile_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 240 and all(found)


# --- tokenizers ---


def _published(name: str) -> Backend:
    from tests.support.published import vocabularies

    return getattr(vocabularies, name)(["<|im_end|>"])


TOKENIZERS: dict[str, Callable[[], Backend]] = {
    "metaspace": handmade_bundle.metaspace_tokenizer,
    "byte level": handmade_bundle.byte_level_tokenizer,
    "byte fallback": handmade_bundle.byte_fallback_tokenizer,
    "gpt2": lambda: _published("gpt2"),
    "qwen2": lambda: _published("qwen2"),
    "llama3": lambda: _published("llama3"),
    "smollm2": lambda: _published("smollm2"),
}


def end_of(tokenizer: Tokenizer) -> int:
    end = tokenizer.id("<|endoftext|>")
    assert end is not None
    return end


def matcher_of(
    name: str, grammar: Grammar, folder: Path, vocabulary: int | None = None
) -> tuple[GrammarMatcher, Tokenizer, int]:
    """A request's state with one of `TOKENIZERS`, whose last special token ends it; and how many tokens there are."""
    backend = TOKENIZERS[name]()
    backend.add_special_tokens(["<|endoftext|>"])
    (folder / "tokenizer.json").write_text(backend.to_str())
    tokenizer = Tokenizer(backend)
    size = vocabulary or tokenizer.vocab_size
    text = SimpleNamespace(tokenizer="tokenizer.json", eos_token_ids=[end_of(tokenizer)], vocab_size=size)
    bundle: Any = SimpleNamespace(path=folder, tokenizer=tokenizer, manifest=SimpleNamespace(text=text))
    return compile_grammar(bundle, grammar), tokenizer, size


def walk(matcher: GrammarMatcher, size: int, end: int, rng: random.Random, limit: int) -> list[int]:
    """Tokens drawn among those that may follow, long ones and ends more often."""
    tokens: list[int] = []
    while len(tokens) < limit and tokens[-1:] != [end]:
        barred = matcher.barred((), size)
        assert barred is not None
        open_to = np.flatnonzero(~barred).tolist()
        tokens.append(end if end in open_to and rng.random() < 0.3 else rng.choice(open_to))
        matcher.extend(tokens[-1:])
    return tokens


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_every_tokenizer_are_in_the_grammar(name: str, tmp_path: Path) -> None:
    """What the tokens are decoded to, the space that some decoders drop included."""
    pattern, whole = "(red|blue) (cup|table)(, (red|blue) (cup|table)){0,2}", 0
    for seed in range(20):
        matcher, tokenizer, size = matcher_of(name, of_regex("regex", pattern), tmp_path)
        tokens = walk(matcher, size, end_of(tokenizer), random.Random(seed), 80)
        if tokens[-1] == end_of(tokenizer):
            whole += 1
            assert re.fullmatch(pattern, tokenizer.decode(tokens[:-1])), tokenizer.decode(tokens)
    assert whole > 10


def test_characters_that_no_token_writes_end_the_request(tmp_path: Path) -> None:
    matcher, tokenizer, size = matcher_of("metaspace", of_regex("regex", "cup[{]"), tmp_path)
    token = tokenizer.id("▁cup")
    assert token is not None
    assert not matcher.barred((), size)[token]  # type: ignore[index]
    matcher.extend([token])
    with pytest.raises(GrammarError, match="no token of this model writes what must follow"):
        matcher.barred((), size)


def test_a_head_of_more_rows_than_the_tokenizer_has_tokens(tmp_path: Path) -> None:
    matcher, tokenizer, _ = matcher_of("qwen2", of_regex("regex", "[a-z]+"), tmp_path, vocabulary=2000)
    barred = matcher.barred((), 2000)
    assert barred is not None and len(barred) == 2000 and barred[tokenizer.vocab_size :].all()
    assert 0 < (~barred).sum() < tokenizer.vocab_size


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import decoders

    def word_pieces() -> Backend:
        backend = handmade_bundle.metaspace_tokenizer()
        backend.decoder = decoders.WordPiece()
        return backend

    monkeypatch.setitem(TOKENIZERS, "word pieces", word_pieces)
    with pytest.raises(OptionError, match="a tokenizer with the decoder WordPiece is not supported"):
        matcher_of("word pieces", of_regex("regex", "a"), tmp_path)


# --- masks ---


def test_walking_to_paths_and_back_changes_no_mask(tmp_path: Path) -> None:
    matcher, tokenizer, size = matcher_of("byte level", of_schema("schema", GRASP), tmp_path)
    end = end_of(tokenizer)
    other, _, _ = matcher_of("byte level", of_schema("schema", GRASP), tmp_path)
    rng, paths = random.Random(0), [()]
    tokens: list[int] = []
    while tokens[-1:] != [end]:
        for _ in range(6):  # as a tree of drafts is walked
            path = rng.choice(paths)
            barred = matcher.barred(path, size)
            if barred is not None and path[-1:] != (end,):
                paths.append((*path, rng.choice(np.flatnonzero(~barred).tolist())))
            matcher.forced(path, 4)
        wanted = other.barred((), size)
        assert (matcher.barred((), size) == wanted).all()  # type: ignore[union-attr]
        token = rng.choice(np.flatnonzero(~wanted).tolist())  # type: ignore[operator]
        tokens.append(token)
        matcher.extend([token])
        other.extend([token])
        paths = [(), *(path[1:] for path in paths if path[:1] == (token,))]
    assert matcher.barred((), size) is None, "anything behind the end"


def test_the_grammar_has_the_last_word(tmp_path: Path) -> None:
    """Where other processors leave nothing of what it allows, they do not count."""
    matcher, tokenizer, size = matcher_of("byte level", of_regex("regex", "a"), tmp_path)
    only, end = tokenizer.id("a"), end_of(tokenizer)
    info = GenerationInfo(suppress_tokens=[only], min_new_tokens=9, repetition_penalty=2.0)  # type: ignore[list-item]
    processors = Processors.from_info(info, [end], [5], matcher)
    assert processors is not None and processors.on_device is None and not processors.idle
    logits = np.linspace(-1, 1, size, dtype=np.float32)
    for token in (only, end):
        assert np.flatnonzero(processors.apply(logits) > -np.inf).tolist() == [token]
        processors.extend([token])


def test_a_dead_end_ends_its_request_alone(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("t5").path, max_batch=3) as session:
        image = Image.fromarray(synthetic_image(32, 32))
        asked: dict[str, Any] = {"image": image, "prompt": "cup", "max_new_tokens": 9}
        dead = {**asked, "regex": "cup[é]"}
        for more in ({}, {"draft": "none"}, {"draft": "imitation"}):
            with pytest.raises(GrammarError, match="no token of this model writes what must follow"):
                session.generate(**dead, **more)
        with pytest.raises(GrammarError, match=r"requests\[1\]: the answer cannot go on in its grammar"):
            session.generate_batch([asked, dead])
        outcomes = dict(session.generate_many([asked, dead, asked]))
        assert [isinstance(outcomes[at], GrammarError) for at in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "pattern", ["b|a{1000000}", pytest.param("b|a(c{1000}){1000}", marks=pytest.mark.slow)]
)
def test_a_draft_that_goes_where_llguidance_gives_up_changes_nothing(pattern: str, tmp_path: Path) -> None:
    """It gives up for all that it compiled, without a word: what the answer itself may be is still right."""
    matcher, tokenizer, size = matcher_of("byte level", of_regex("regex", pattern), tmp_path)
    a, b = tokenizer.id("a"), tokenizer.id("b")
    assert a is not None and b is not None
    for _ in range(2):
        matcher.fit(TokenTree.chain([5, a, a, a]), Budget.chain(3))
        for depth in (2, 1):
            with contextlib.suppress(GrammarError):
                matcher.barred([a] * depth, size)
            matcher.forced([a] * depth, 9)
        assert np.flatnonzero(~matcher.barred((b,), size)).tolist() == [end_of(tokenizer)]  # type: ignore[operator]
    matcher.extend([b])
    assert np.flatnonzero(~matcher.barred((), size)).tolist() == [end_of(tokenizer)]  # type: ignore[operator]


# --- hypothesis: whatever the schema ---

TEXT = st.text('abcXYZ äé{}[]:,"\\/', max_size=6)


def schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas of what robots are asked for, and worse."""
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 99))
    leaves: list[st.SearchStrategy[Any]] = [
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        bounds.map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[0] + b[1] + 1}),
        st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
        st.sampled_from(("[a-c]{1,3}", "(up|down)", "[0-9]{2}-[0-9]{2}")).map(
            lambda p: {"type": "string", "pattern": f"^{p}$"}
        ),
        st.lists(st.one_of(TEXT, st.integers(-5, 5), st.booleans(), st.none()), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        TEXT.map(lambda text: {"const": text}),
        st.just({"type": "string"}),
    ]
    if depth == 0:
        return st.one_of(leaves)
    inner = schemas(depth - 1)
    objects = st.dictionaries(TEXT, st.tuples(inner, st.booleans()), max_size=4).map(
        lambda each: {
            "type": "object",
            "properties": {name: value for name, (value, _) in each.items()},
            "required": [name for name, (_, needed) in each.items() if needed],
            "additionalProperties": False,
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]}
    )
    return st.one_of(
        *leaves, objects, objects, arrays, st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
    )


def check_answers(session: Session, schema: dict[str, Any], temperature: float) -> str:
    """Drafted and plain say the same, and a whole answer is valid. Returns the finish reason."""
    asked: dict[str, Any] = {
        "prompt": "cup", "schema": schema, "max_new_tokens": 90, "temperature": temperature, "seed": 5,
    }  # fmt: skip
    found = session.generate(**asked)
    assert found.tokens == session.generate(**asked, draft="none").tokens
    assert found.finish_reason in ("eos", "length")
    if found.finish_reason == "eos":
        jsonschema.validate(found.parsed, schema)
    return found.finish_reason


@settings(max_examples=25, deadline=None)
@given(schemas(), st.sampled_from((0.0, 0.7, 2.0)))
def test_every_whole_answer_is_valid(session: Session, schema: dict[str, Any], temperature: float) -> None:
    check_answers(session, schema, temperature)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, database=None)
@given(schemas())
def test_answers_of_a_thousand_schemas_are_valid(session: Session, schema: dict[str, Any]) -> None:
    for temperature in (0.0, 0.7, 2.0):
        check_answers(session, schema, temperature)
