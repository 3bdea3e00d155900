"""A linter of prose: `python -m docs.prose` (`make lint`) reads README.md, the docs and the help of every command.

Three strictnesses. All *docs* and all *help* keep to a list of constructions that a reader stumbles over. *Plain* pages also
have short sentences, on average and at most. The *front*, what a newcomer reads first, keeps to a longer list, too. Code, tables' rules and links' targets are not prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FRONT = (
    "README.md", "docs/index.md", "docs/get-started/*.md", "docs/explanation/speculative-decoding.md",
    "docs/explanation/cycle-in-40-lines.md", "docs/how-to/choose-a-draft.md", "docs/how-to/run.md", "docs/how-to/batch.md",
    "docs/how-to/stream.md", "docs/how-to/robot.md", "docs/reference/glossary.md", "CHANGELOG.md",
)  # fmt: skip
DOCS = ("docs/**/*.md", "CONTRIBUTING.md")
PLAIN = ("docs/**/*.md", "CONTRIBUTING.md")
"""Pages of short sentences beside the front; `LONG_PAGES` are exempt."""
MEAN, LONGEST = 16, 32
"""Words of a sentence of the front and of plain pages, on average and at most."""
README_WORDS, PAGE_WORDS = 600, 1500
LONG_PAGES = "docs/results/papers/"
"""The papers' tables, an appendix."""

HARD = {
    r"\bgain(s|ed)? [\d.]+ ?(times|×)": "say `is N times as fast`",
    r"\bother (\w+ )?than (those|that|one) (that|of|which)\b": "say what it is, not what it is other than",
    r"\bthan in one of one\b": "give the number",
    r"\bwhat stands? (there|behind|before)\b": "name the thing",
    r"\b(decides|sets|chooses) (a|the) controller\b": "subject first: `a controller decides`",
    r"\bmeasures? times alone\b": "say `only measures times`",
    r"\btells? nonsense\b": "say `produces nonsense`",
    r"\bonly by its name\b": "name the option",
    r"\bthat did not choose\b": "say `held-out`",
    r"\bwithout a word\b": "say `silently`",
    r"\bneed(s)? a second reading\b": "rewrite",
    r"\bnone decodes plainly\b": "say `none: no speculation`",
    r"\b1 is none\b": "say `1 is off`",
    r"\bas many as are verified\b": "say what the default does",
    r"\bgives? other bits\b": "say `rounds differently`",
    r"\bwhere nothing stood before\b": "say `where it has no match`",
    r"^Of `?--\w": "say `for --option`",
    r"\bthere is (that|which)\b": "name the thing",
    r"\b(utili[sz]e[sd]?|leverage[sd]?|seamless(ly)?|blazing(ly)?|simply|just works|very unique|in order to)\b": "leave it out",
    r"\b(can not|it's|don't|doesn't|isn't|won't)\b": "write `cannot`, `it is`, `do not`",
}
"""Construction → what to write. For all docs and all help; case does not matter."""

FRONT_HARD = {
    r"^(What|How much|How many|Which|Whoever|Whether)\b[^?]*[.:]$": "a clause as subject; begin with a noun",
    r"\b(nobody|none) (knows|has|did)\b": "say who has not done what",
    r"\bof (a|the) \w+ (they|it) (tell|say)s?\b": "subject first",
    r";[^;]*;": "one semicolon in a sentence at most",
    r"\([^)]*\([^)]*\)": "no parentheses in parentheses",
    r"\([^)]*\)[^(]*\([^)]*\)[^(]*\(": "three parentheses in one sentence",
}
"""The same, for the front only."""


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a page, without code blocks, HTML comments, headings, targets of links and rules of tables. An item
    of a list and a cell of a table end a sentence."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        lines = [line for line in block.splitlines() if not re.match(r"#|\|[-| :]*$|:::|    \S", line)]
        rows = [cell for line in lines if line.startswith("|") for cell in line.strip("| ").split(" | ")]
        for piece in [" ".join(line for line in lines if not line.startswith("|")), *rows]:
            clean = re.sub(r"^\s*(?:[-*]|\d+\.) |\*\*", "", piece)
            yield from filter(
                None, (each.strip() for each in re.split(r"(?<=[.!?])(?<!e\.g\.)\s+(?=[A-Z`“\"*])", clean))
            )


def words(text: str) -> int:
    """Words of a sentence; numbers and signs alone are none."""
    return sum(bool(re.search(r"[A-Za-z]", word)) for word in text.split())


def lint(name: str, markdown: str, front: bool, plain: bool = False) -> list[str]:
    """Complaints about one page. `plain`: its sentences must be short, as those of the front."""
    found = []
    told = list(sentences(markdown))
    for sentence in told:
        for pattern, remedy in {**HARD, **(FRONT_HARD if front else {})}.items():
            if match := re.search(pattern, sentence, re.I if pattern in HARD else 0):
                found.append(f"{name}: {match[0][:60]!r}: {remedy}")
        if (front or plain) and words(sentence) > LONGEST:
            found.append(f"{name}: {words(sentence)} words, at most {LONGEST}: {sentence[:80]!r}")
    whole = [sentence for sentence in told if re.search(r"[.!?]$", sentence)]
    if (front or plain) and whole and (mean := mean_words(markdown)) > MEAN:
        found.append(f"{name}: a sentence has {mean:.1f} words on average, at most {MEAN}")
    return found


def mean_words(markdown: str) -> float:
    """Words of a sentence on average; fragments of lists and tables do not count."""
    lengths = [words(each) for each in sentences(markdown) if re.search(r"[.!?]$", each)]
    return sum(lengths) / max(len(lengths), 1)


def sizes(name: str, markdown: str) -> list[str]:
    """Complaints about a page that is too long."""
    most = README_WORDS if name == "README.md" else PAGE_WORDS
    count = len(markdown.split())
    short = count <= most or name.startswith(LONG_PAGES)
    return [] if short else [f"{name}: {count} words, at most {most}: split it"]


def helps() -> Iterator[tuple[str, str]]:
    """What the help of every command says: (its place, text)."""
    import typer
    from vlmexport.runtime.cli import MOUNTED_COMMANDS, RUNTIME_COMMANDS, build_app

    for name, (_, text) in {**RUNTIME_COMMANDS, **MOUNTED_COMMANDS}.items():
        command = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
        yield f"vlmexport {name}", text
        for parameter in command.params:
            yield f"vlmexport {name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
        yield f"vlmexport {name}, end of the help", command.epilog or ""


def named(patterns: Iterable[str]) -> dict[str, str]:
    """Path → text of the pages that match."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(found)}


def complaints() -> list[str]:
    """Everything that is wrong."""
    front = named(FRONT)
    pages = {**named(DOCS), **front}
    plain = {name for name in named(PLAIN) if not name.startswith(LONG_PAGES)}
    return [
        *(line for name, text in pages.items() for line in lint(name, text, name in front, name in plain)),
        *(line for name, text in pages.items() for line in sizes(name, text)),
        *(line for name, text in helps() for line in lint(name, text, front=False)),
    ]


if __name__ == "__main__":
    wrong = complaints()
    print("\n".join(wrong) or "prose: all is well")
    sys.exit(bool(wrong))
