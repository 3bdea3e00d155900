"""The hook of mkdocs: adds the generated pages. Start mkdocs in the checkout's root with `python -m mkdocs`."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.generate.pages import pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files of docs/."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
