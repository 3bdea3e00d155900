"""The page of data formats, from the modules of `calibration/data/formats`."""

from __future__ import annotations

import importlib

from vlmexport.calibration.data import formats

from docs.generate.markdown import cell, code, table


def pages() -> dict[str, str]:
    """One page with a section for each format."""
    rows, sections = [], []
    for name in formats.names():
        module = importlib.import_module(f"{formats.__name__}.{name.replace('-', '_')}")
        usage, task = f"{name}:{module.USAGE}", module.TASK or ""
        rows.append((f"[`{name}`](#{name})", code(usage), f"`{task}`" if task else ""))
        sections.append(f"## {name}\n\n`--data {usage}`\n\n{_told(module.__doc__ or '')}")
    head = (
        "# Data formats\n\nWhat may stand behind `--data`, beside JSONL files and folders of pictures "
        "([Data](../how-to/data.md), [Your own data](../how-to/your-own-data.md)). Parts in brackets may be left out.\n\n"
    )
    return {
        "reference/data-formats.md": head
        + table(("format", "usage", "judged by"), rows)
        + "\n\n"
        + "\n\n".join(sections)
        + "\n"
    }


def _told(text: str) -> str:
    return "\n\n".join(cell(part).replace("\\|", "|") for part in text.strip().split("\n\n"))
