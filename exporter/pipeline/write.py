"""Writes the graphs of a bundle."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ..families.common.parts import GraphSpec
from ..graphs.check import check_graph
from .request import Progress


def write_graphs(folder: Path, graphs: list[GraphSpec], progress: Progress | None = None) -> None:
    """Writes every graph next to the (written) weights and checks it."""
    for done, spec in enumerate(graphs, 1):
        for name, model in spec.files.items():
            ir.save(model, folder / name)
            check_graph(folder / name)
        if progress:
            progress("checks", done, len(graphs))
