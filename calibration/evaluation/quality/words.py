"""Answers made comparable, as the official VQA evaluation does it (Antol et al., arXiv 1505.00468): punctuation, case,
number words, articles, contractions. The contractions are its list, less those with capitals, which never meet a word
in small letters."""

from __future__ import annotations

import re

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = {"none": "0", **{word: str(n) for n, word in enumerate(
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
)}}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_CONTRACTED = [
    "ain't",
    "aren't",
    "can't",
    "could've",
    "couldn't",
    "couldn't've",
    "didn't",
    "doesn't",
    "don't",
    "hadn't",
    "hadn't've",
    "hasn't",
    "haven't",
    "he'd",
    "he'd've",
    "he's",
    "how'd",
    "how'll",
    "how's",
    "isn't",
    "it'd",
    "it'd've",
    "it'll",
    "ma'am",
    "mightn't",
    "mightn't've",
    "might've",
    "mustn't",
    "must've",
    "needn't",
    "not've",
    "o'clock",
    "oughtn't",
    "shan't",
    "she'd've",
    "should've",
    "shouldn't",
    "shouldn't've",
    "somebody'd've",
    "somebody'll",
    "somebody's",
    "someone'd",
    "someone'd've",
    "someone'll",
    "someone's",
    "something'd",
    "something'd've",
    "something'll",
    "that's",
    "there'd",
    "there'd've",
    "there're",
    "there's",
    "they'd",
    "they'd've",
    "they'll",
    "they're",
    "they've",
    "wasn't",
    "we'd've",
    "we've",
    "weren't",
    "what'll",
    "what're",
    "what's",
    "what've",
    "when's",
    "where'd",
    "where's",
    "where've",
    "who'd",
    "who'd've",
    "who'll",
    "who's",
    "who've",
    "why'll",
    "why're",
    "why's",
    "won't",
    "would've",
    "wouldn't",
    "wouldn't've",
    "y'all",
    "y'all'll",
    "y'all'd've",
    "you'd",
    "you'd've",
    "you'll",
    "you're",
    "you've",
]


def _short_forms() -> dict[str, str]:
    """Each contraction by every way to leave out some of its apostrophes."""
    found = {"somebody'd": "somebodyd", "twas": "'twas"}
    for word in _CONTRACTED:
        parts = word.split("'")
        for kept in range(2 ** (len(parts) - 1) - 1):
            marks = ["'" if kept >> at & 1 else "" for at in range(len(parts) - 1)]
            found["".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))] = word
    return found


_SHORT = _short_forms()


def normalised(answer: str) -> str:
    """An answer as it is compared."""
    said = answer.replace("\n", " ").replace("\t", " ").strip()
    bare = said
    thousands = re.search(r"\d,\d", said)
    for mark in _PUNCTUATION:
        touching = f"{mark} " in said or f" {mark}" in said
        bare = bare.replace(mark, "" if touching or thousands else " ")
    bare = re.sub(r"\.(?!\d)", "", bare)
    words = (_NUMBERS.get(word, word) for word in bare.lower().split())
    return " ".join(_SHORT.get(word, word) for word in words if word not in _ARTICLES)
