"""The docs: links resolve, every page is in the menu, the generated pages hold what the code has, the prose is plain."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from vlmexport.calibration.data import formats
from vlmexport.exporter import drafts
from vlmexport.runtime import families
from vlmexport.runtime.cli import MOUNTED_COMMANDS, RUNTIME_COMMANDS
from vlmexport.runtime.graphs.registry import graph_role, graph_roles

from docs import prose
from docs.generate import graphs
from docs.generate.pages import pages

ROOT = Path(__file__).resolve().parents[3]
GENERATED = pages()
WRITTEN = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    generated = {ROOT / "docs" / path for path in GENERATED}
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            place = (page.parent / target).resolve()
            assert place.exists() or place in generated, (
                f"{page.name} links to {target}, which does not exist"
            )


def test_every_path_that_code_names_exists() -> None:
    """`docs/….md` in the rooms, benchmarks and tests."""
    rooms = ("runtime", "exporter", "calibration", "recipes", "examples", "benchmarks", "tests")
    named = {
        (str(path.relative_to(ROOT)), page)
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        for page in re.findall(r"(?<![\w/.-])docs/[\w./-]+\.md", path.read_text("utf-8"))
    }
    others = {"docs/operators.md", "docs/Changelog.md"}  # of onnx-tensorrt
    assert len(named) > 20
    assert [each for each in sorted(named) if each[1] not in others and not (ROOT / each[1]).exists()] == []


def test_every_module_that_pages_name_exists() -> None:
    """`runtime/x.py` with its folder; a bare file name is one beside what the sentence is about."""
    rooms = "runtime|exporter|calibration|recipes|tests|benchmarks|docs|examples"
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*PAGES, ROOT / "tests" / "contract" / "README.md"]
        for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file() and not re.search(r"/x\.py$|NAME|\.xxx", name)
    ]
    assert missing == []


def test_every_page_is_in_the_menu_once() -> None:
    menu = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2])
    assert sorted(menu) == sorted(WRITTEN | GENERATED.keys())


def test_no_page_is_written_and_generated() -> None:
    assert not WRITTEN & GENERATED.keys()


@pytest.mark.parametrize("command", [*RUNTIME_COMMANDS, *MOUNTED_COMMANDS])
def test_a_commands_page_has_its_options(command: str) -> None:
    import typer
    from vlmexport.runtime.cli import build_app

    page = GENERATED[f"reference/cli/{command}.md"]
    found = typer.main.get_command(build_app(command)).commands[command].params  # type: ignore[attr-defined]
    shown = [option for option in found if not getattr(option, "hidden", False)]
    flags = [flag for option in shown for flag in option.opts if flag.startswith("-")]
    assert flags and [flag for flag in flags if f"<code>{flag}</code>" not in page] == []


def test_reference_pages_hold_the_registries() -> None:
    supported = GENERATED["reference/supported.md"]
    named = [*families.FAMILIES, *drafts.KINDS, "onnxruntime", "tensorrt"]
    assert [name for name in named if f"| `{name}` |" not in supported] == []
    assert [
        name for name in formats.names() if f"## {name}\n" not in GENERATED["reference/data-formats.md"]
    ] == []
    assert all(
        f"<code>{field}</code>" in GENERATED["reference/manifest.md"]
        for field in ("graphs", "limits.max_length")
    )


def test_the_tables_of_graphs_are_what_their_roles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [document.read_text("utf-8") for document in graphs.DOCUMENTS]
    assert [graphs.written(text) for text in texts] == texts, "stale: python -m docs.generate.graphs"
    assert all(any(graphs.BEGIN.format(section) in text for text in texts) for section in graphs.SECTIONS)
    assert {role.name for roles in graphs.SECTIONS.values() for role in roles} == set(graph_roles())
    named = {
        name
        for roles in graphs.SECTIONS.values()
        for role in roles
        if role.interface is not None
        for side in graphs.interfaces(role)
        for value in side
        for name in (role.name, value, f"{role.name} {value}")
    }
    assert graphs.NOTES.keys() <= named
    head = graph_role("head")
    assert head.interface is not None
    inputs, outputs = head.interface(next(graphs.manifests()), "head", None)
    changed = dataclasses.replace(
        head, interface=lambda *given: (inputs | {"bias": ("int64", ("rows",))}, outputs)
    )
    others = [role for role in graphs.SECTIONS["the model"] if role is not head]
    monkeypatch.setitem(graphs.SECTIONS, "the model", [*others, changed])
    assert "| `bias` | i64 [rows] |" in graphs.written(texts[0])


def test_the_glossary_has_the_words_of_the_cycle() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8")
    terms = re.findall(r"^\| \*\*(.+?)\*\* \| .", text, re.M)
    assert len(terms) >= 40 and terms == sorted(terms, key=str.lower)


# --- prose ---


def test_the_prose_is_plain() -> None:
    assert prose.complaints() == []


BAD = {
    "Chat prompts gain 1.4 times.": "is N times as fast",
    "It runs in a pass of six rows rather than in one of one.": "give the number",
    "The model tells nonsense about photos.": "produces nonsense",
    "A file is overwritten without a word.": "silently",
    "It is simply the best.": "leave it out",
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_sentence_fails_everywhere(sentence: str) -> None:
    (complaint,) = prose.lint("page.md", f"# Title\n\nAll is well. {sentence}\n", front=False)
    assert complaint.startswith("page.md: ") and BAD[sentence] in complaint


def test_the_front_and_plain_pages_are_held_to_short_sentences() -> None:
    long = " ".join(["word"] * (prose.LONGEST + 1)).capitalize() + "."
    found = prose.lint("README.md", long, front=True)
    assert len(found) == 2 and "at most 32" in found[0] and "on average, at most 16" in found[1]
    assert prose.lint("other.md", long, front=False) == []
    assert len(prose.lint("plain.md", long, front=False, plain=True)) == 2
    clause = "What it predicts was measured on requests."
    assert prose.lint("README.md", clause, front=True) and not prose.lint("other.md", clause, front=False)


def test_every_pattern_of_plain_pages_names_some() -> None:
    assert [pattern for pattern in prose.PLAIN if not prose.named([pattern])] == []


def test_code_and_links_are_not_prose() -> None:
    text = "A [word](https://example.org/simply) and `simply`.\n\n```\nsimply\n```\n\n<!-- simply -->\n"
    assert prose.lint("page.md", text, front=True) == []


def test_long_pages_fail() -> None:
    assert prose.sizes("page.md", "word " * 1501) and not prose.sizes("page.md", "word " * 1500)
    assert prose.sizes("README.md", "word " * 601) and not prose.sizes(
        f"{prose.LONG_PAGES}x.md", "word " * 9000
    )
