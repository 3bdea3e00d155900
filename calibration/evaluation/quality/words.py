"""Answers made comparable, as the official VQA evaluation does it with a model's (Antol et al., arXiv 1505.00468; vqaEval.py of
GT-Vision-Lab/VQA): punctuation, case, number words, articles, contractions. The contractions are its list, less those
with capitals, which never meet a word in small letters."""

from __future__ import annotations

import re

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = {"none": "0", **{word: str(n) for n, word in enumerate(
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
)}}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_CONTRACTED = [
    "'ow's'at",
    "'twas",
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
    """Each contraction without one of its apostrophes."""
    forms = {"somebody'd": "somebodyd"}
    for word in _CONTRACTED:
        forms |= {word[:at] + word[at + 1 :]: word for at, mark in enumerate(word) if mark == "'"}
    return forms


_SHORT = _short_forms()


def punctuated(text: str) -> str:
    """Punctuation left out, or a space in its place."""
    bare = text
    thousands = re.search(r"\d,\d", text)
    for mark in _PUNCTUATION:
        touching = f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if touching or thousands else " ")
    # The official code gives `sub` a flag where it takes a count.
    return re.sub(r"\.(?!\d)", "", bare, count=32)


def normalised(answer: str) -> str:
    """An answer as it is compared."""
    bare = punctuated(answer.replace("\n", " ").replace("\t", " ").strip())
    words = (_NUMBERS.get(word, word) for word in bare.lower().split())
    return " ".join(_SHORT.get(word, word) for word in words if word not in _ARTICLES)
