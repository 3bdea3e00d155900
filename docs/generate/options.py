"""The page of the options of a request, from their declaration (`runtime/session/options.py`)."""

from __future__ import annotations

from vlmexport.runtime.common.options import GROUPS, Option, declared_options, default_text
from vlmexport.runtime.session.options import GenerateOptions

from docs.generate.markdown import cell, code, table

HEAD = (
    "# Options of a request\n\n"
    "`Session.generate`, `Session.stream`, `Session.generate_batch` and `Conversation.say` take these options by name. "
    "`vlmexport run` and `vlmexport bench` have flags for most of them. "
    "`vlmexport.runtime.common.options.json_schema(GenerateOptions)` gives them as a JSON schema."
)


def pages() -> dict[str, str]:
    """One page with a table for each group."""
    options = declared_options(GenerateOptions)
    parts = [HEAD]
    for group in GROUPS:
        rows = [_row(name, option) for name, option in options.items() if option.group == group]
        if rows:
            parts.append(f"## {group}\n\n" + table(("option", "flag", "meaning"), rows))
    return {"reference/request-options.md": "\n\n".join(parts) + "\n"}


def _row(name: str, option: Option) -> tuple[str, str, str]:
    flags = ", ".join(option.flags(name))
    flag = code(f"{flags} {option.metavar or ''}".strip()) if flags else ""
    return code(name), flag, cell(f"{option.help} {default_text(option)}".strip())
