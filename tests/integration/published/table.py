"""Writes what the library holds into docs/reference/published-checkpoints.md: `python -m tests.integration.published.table`; `--check` only compares.

The text between the two marks is this script's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from docs.generate.marked import refresh, replace_between
from tests.support.published.layouts import Layout, layouts

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "published-checkpoints.md"
BEGIN, END = "<!-- published layouts: begin -->", "<!-- published layouts: end -->"


def table(found: Iterable[Layout]) -> str:
    """What builds, by family and kind of draft, and what is refused, by the line that says so."""
    found = sorted(found, key=lambda layout: layout.name)
    lines = ["| | checkpoints whose published files build |", "| --- | --- |"]
    kinds = sorted({(layout.draft is not None, _kind(layout)) for layout in found if layout.refused is None})
    for _, kind in kinds:
        taken = [layout for layout in found if layout.refused is None and _kind(layout) == kind]
        lines.append(f"| {kind} | {_named(taken)} |")
    lines += ["", "| refused by name | what the line names |", "| --- | --- |"]
    said: dict[str, list[Layout]] = {}
    for layout in found:
        if layout.refused is not None:
            said.setdefault(layout.refused, []).append(layout)
    for line, refused in sorted(said.items(), key=lambda item: item[1][0].name):
        lines.append(f"| {_named(refused)} | {line} |")
    return "\n".join(lines)


def _kind(layout: Layout) -> str:
    return f"`{layout.family}`" if layout.draft is None else f"`{layout.draft}` drafts"


def _named(found: list[Layout]) -> str:
    """Ids, each once, with the releases of its files where there are several."""
    releases: dict[str, list[str | None]] = {}
    needs: dict[str, str] = {}
    read = {layout.checkpoint for layout in found if any(one.startswith("http") for one in layout.source)}
    for layout in found:
        releases.setdefault(layout.checkpoint, []).append(layout.release)
        if layout.needs:
            needs[layout.checkpoint] = f" ({layout.needs})"
    return ", ".join(
        f"`{name}`{'' if name in read else chr(42)}{_releases(of)}{needs.get(name, '')}"
        for name, of in releases.items()
    )


def _releases(found: list[str | None]) -> str:
    named = ", ".join(release.replace("-by-", " by ") for release in found if release is not None)
    return f" ({'also ' if None in found else ''}{named})" if named else ""


def written(text: str) -> str:
    """The document with today's table between its marks."""
    return replace_between(text, BEGIN, END, f"\n{table(layouts())}\n")


def main() -> None:
    """See the module."""
    refresh([DOCUMENT], written, "tests.integration.published.table")


if __name__ == "__main__":
    main()
