"""BLEU-1 … 4, ROUGE-L, CIDEr, METEOR and SPICE by the package pycocoevalcap, as captions are judged in COCO.

It calls Java for the Penn Treebank tokenizer, METEOR and SPICE. Without a Java that runs, the texts are split by a plain rule (words in
small letters, punctuation left out), which the score notes; METEOR and SPICE are left out. SPICE also needs jars that
pycocoevalcap downloads, which is not done here: `python -m pycocoevalcap.spice.get_stanford_models` does it. With them it has not been
run here; its cache of parsed texts, where it fails by itself on Java 16 and later, is tested alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ....runtime.common.optional_deps import need_extra
from .told import Score, Told

RANKS = False
Texts = Mapping[int, list[str]]
"""By record; of answers one each."""

PLAIN_RULE = "tokenized by a plain rule, figures are not the official ones"
PLAIN = f"{PLAIN_RULE}: without Java there is no Penn Treebank tokenizer"
_SPICE_JAR = "lib/stanford-corenlp-3.6.0.jar"
_JAVA_OPTIONS = "JDK_JAVA_OPTIONS"
_OPENED = (
    "java.base/java.lang", "java.base/java.math", "java.base/java.net", "java.base/java.text", "java.base/java.util",
    "java.base/java.util.concurrent", "java.sql/java.sql",
)  # fmt: skip
"""Packages whose private fields SPICE's serializer (FST 2.47) reads when it starts."""


def score(told: Sequence[Told]) -> Score:
    """BLEU, ROUGE-L and METEOR in 0 … 1, CIDEr in 0 … 10, over the records with references.

    Raises OptionError without the extra [captions].
    """
    need_extra("captions", "--task captions")
    judged = [one for one in told if one.record.references]
    if not judged:
        return Score("captions", 0, len(told), left_out={"CIDEr": "no record has references"})
    answers = {i: [_line(one.text)] for i, one in enumerate(judged)}
    references = {i: [_line(text) for text in one.record.references] for i, one in enumerate(judged)}
    values: dict[str, float] = {}
    left_out: dict[str, str] = {}
    notes: list[str] = []
    java = shutil.which("java")
    if java is None:
        notes.append(PLAIN)
        left_out |= {"METEOR": "needs Java", "SPICE": "needs Java"}
        answers, references = plain_words(answers), plain_words(references)
    else:
        try:
            answers, references = _treebank(answers), _treebank(references)
        except (OSError, ValueError) as error:  # the package writes beside its own files; Java may not run
            notes.append(f"{PLAIN_RULE}: the Penn Treebank tokenizer failed ({error})")
            answers, references = plain_words(answers), plain_words(references)
    _add(values, left_out, "BLEU", lambda: _bleu(references, answers))
    _add(
        values, left_out, "ROUGE-L", lambda: {"ROUGE-L": _scorer("rouge.rouge", "Rouge", references, answers)}
    )
    _add(values, left_out, "CIDEr", lambda: {"CIDEr": _scorer("cider.cider", "Cider", references, answers)})
    if java is not None:
        _add(
            values,
            left_out,
            "METEOR",
            lambda: {"METEOR": _scorer("meteor.meteor", "Meteor", references, answers)},
        )
        if not (_package() / "spice" / _SPICE_JAR).is_file():
            left_out["SPICE"] = (
                f"needs {Path(_SPICE_JAR).name}; python -m pycocoevalcap.spice.get_stanford_models downloads it"
            )
        else:
            with opened_java():
                _add(
                    values,
                    left_out,
                    "SPICE",
                    lambda: {"SPICE": _scorer("spice.spice", "Spice", references, answers)},
                )
    return Score("captions", len(judged), len(told), values, left_out, tuple(notes))


def plain_words(texts: Texts) -> dict[int, list[str]]:
    """Words in small letters, punctuation left out."""
    return {
        i: [" ".join(re.findall(r"\w+(?:['’]\w+)*", text.lower())) for text in captions]
        for i, captions in texts.items()
    }


@contextmanager
def opened_java() -> Iterator[None]:
    """Lets Java programs that are started here read what Java 16 and later close to them. Java 8 knows no such option, and
    does not read this variable."""
    before = os.environ.get(_JAVA_OPTIONS)
    asked = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
    os.environ[_JAVA_OPTIONS] = " ".join([*([before] if before else []), *asked])
    try:
        yield
    finally:
        if before is None:
            del os.environ[_JAVA_OPTIONS]
        else:
            os.environ[_JAVA_OPTIONS] = before


def _line(text: str) -> str:
    """On one line, as the tokenizer and METEOR read texts."""
    return " ".join(text.split())


def _add(
    values: dict[str, float], left_out: dict[str, str], name: str, run: Callable[[], dict[str, float]]
) -> None:
    """A figure, or why the program that gives it did not."""
    try:
        values |= run()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _package() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _treebank(texts: Texts) -> dict[int, list[str]]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # A text without words would be an empty line at the end, which the tokenizer's output has not.
    wrapped = {i: [{"caption": text or "."} for text in captions] for i, captions in texts.items()}
    split = PTBTokenizer().tokenize(wrapped)
    # It looks at no exit status: of a Java that fails it makes one empty text.
    if {i: len(captions) for i, captions in split.items()} != {
        i: len(captions) for i, captions in texts.items()
    }:
        given, wanted = (sum(map(len, each.values())) for each in (split, texts))
        raise ValueError(f"it gave {given} of {wanted} texts; does `java -version` work?")
    return split


def _bleu(references: Texts, answers: Texts) -> dict[str, float]:
    from pycocoevalcap.bleu.bleu import Bleu

    scores, _ = Bleu(4).compute_score(references, answers, verbose=0)
    return {f"BLEU-{n}": float(value) for n, value in enumerate(scores, 1)}


def _scorer(module: str, name: str, references: Texts, answers: Texts) -> float:
    made: Any = getattr(importlib.import_module(f"pycocoevalcap.{module}"), name)()
    try:
        return float(made.compute_score(references, answers)[0])
    except BaseException:
        _let_go(made)
        raise


def _let_go(scorer: Any) -> None:
    """Ends METEOR's process and frees its lock, which a failed score keeps: its `__del__` would wait for it for ever."""
    process = getattr(scorer, "meteor_p", None)
    if process is None:
        return
    process.kill()
    process.wait()
    with suppress(OSError):  # what the process did not read
        process.stdin.close()
    if scorer.lock.locked():
        scorer.lock.release()
