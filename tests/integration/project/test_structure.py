"""How the product's modules stand to each other: folders form a directed graph, few modules name each other, none is long.

Counted are the modules of `runtime/`, `exporter/` and `calibration/`, and every `import` and `from … import` anywhere in
their text. An import is at module level, lazy (inside a function), or for typing (under `if TYPE_CHECKING`). Of
`from package import name` the module `package.name` is meant where there is one, else `package`. A registry that names its
members by strings (`importlib.import_module`) imports none: it is what a new member is added to, and no member's code
depends on another's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("runtime", "exporter", "calibration")

MOST_CYCLES = 3
"""Groups of modules that reach each other, by imports of all three sorts."""
MOST_LOOSE = 2
"""Modules of `runtime/` in no folder: `cli`, the command's door, and `errors`, a deprecated name."""
LONGEST, LONG, MOST_LONG = 450, 300, 12
"""Lines of the longest module; modules above so many lines, and how many these may be."""

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """By dotted name; a package by its own."""
    found = {}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert len(found) > 400, "the rooms are not where this test looks for them"
    return found


def imports(tree: ast.AST, package: str, sort: str = "module") -> Iterator[tuple[str, str]]:
    """(sort, absolute name) of all imports; `package` is what relative ones begin at."""
    for node in ast.iter_child_nodes(tree):
        inside = sort
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = "lazy"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = "typing"
        if isinstance(node, ast.Import):
            yield from ((sort, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((sort, f"{base}.{name.name}") for name in node.names)
        yield from imports(node, package, inside)


def graph(sources: Mapping[str, tuple[str, bool]], sorts: Iterable[str]) -> Graph:
    """Modules and what they import by imports of these sorts. `sources`: name → (text, whether it is a package)."""
    found: Graph = {name: set() for name in sources}
    for name, (text, is_package) in sources.items():
        package = name if is_package else name.rpartition(".")[0]
        for sort, target in imports(ast.parse(text), package):
            target = target.removeprefix("vlmexport.")
            while target and target not in sources:
                target = target.rpartition(".")[0]
            if sort in sorts and target and target != name:
                found[name].add(target)
    return found


def cycles(edges: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for node in edges[waiting.pop()]:
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
        return seen

    reach = {node: reached(node) for node in edges}
    found = {
        frozenset(other for other in reach[node] if node in reach[other]) | {node}
        for node in edges
        if node in reach[node]
    }
    return sorted(sorted(group) for group in found)


def folders(edges: Graph, packages: Iterable[str]) -> Graph:
    """Folders and what they import of other folders."""
    known = set(packages)
    folder = lambda name: name if name in known else name.rpartition(".")[0]  # noqa: E731
    found: Graph = {}
    for name, targets in edges.items():
        found.setdefault(folder(name), set()).update(map(folder, targets))
    for name, targets in found.items():
        targets.discard(name)
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[str, bool]]:
    return {name: (path.read_text(), path.name == "__init__.py") for name, path in modules().items()}


def test_folders_form_a_directed_graph(sources: dict[str, tuple[str, bool]]) -> None:
    """Of imports at module level: what is imported before it is needed."""
    packages = [name for name, (_, is_package) in sources.items() if is_package]
    assert cycles(folders(graph(sources, ("module",)), packages)) == []


def test_modules_import_no_one_who_imports_them(sources: dict[str, tuple[str, bool]]) -> None:
    assert cycles(graph(sources, ("module",))) == []


def test_few_modules_name_each_other(sources: dict[str, tuple[str, bool]]) -> None:
    found = cycles(graph(sources, ("module", "lazy", "typing")))
    assert len(found) <= MOST_CYCLES, "\n".join(map(str, found))


def test_modules_lie_in_folders_and_are_short(sources: dict[str, tuple[str, bool]]) -> None:
    loose = [
        name
        for name, (_, is_package) in sources.items()
        if name.startswith("runtime.") and name.count(".") == 1 and not is_package
    ]
    assert len(loose) <= MOST_LOOSE, loose
    lines = {name: text.count("\n") for name, (text, _) in sources.items()}
    longest = max(lines, key=lines.__getitem__)
    assert lines[longest] < LONGEST, f"{longest}: {lines[longest]} lines"
    long = [name for name in lines if lines[name] > LONG]
    assert len(long) <= MOST_LONG, sorted(long)


def test_every_sort_of_import_is_seen() -> None:
    """The counter itself, on four modules: a cycle at module level, one by typing, one by a lazy import."""
    texts = {
        "runtime": ("", True),
        "runtime.a": ("", True),
        "runtime.a.one": ("from ..b.two import x\n", False),
        "runtime.a.three": ("def f():\n    from . import one\n", False),
        "runtime.b": ("", True),
        "runtime.b.two": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vlmexport.runtime.a import three\n", False),
    }  # fmt: skip
    packages = [name for name, (_, is_package) in texts.items() if is_package]
    assert cycles(graph(texts, ("module",))) == []
    assert cycles(folders(graph(texts, ("module",)), packages)) == []
    assert cycles(folders(graph(texts, ("module", "typing")), packages)) == [["runtime.a", "runtime.b"]]
    everything = graph(texts, ("module", "typing", "lazy"))
    assert cycles(everything) == [["runtime.a.one", "runtime.a.three", "runtime.b.two"]]
