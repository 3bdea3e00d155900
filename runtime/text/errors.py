"""Errors of a library as one line, and whose an error is."""

from __future__ import annotations

_LONGEST = 300


def one_line(error: object, longest: int = _LONGEST) -> str:
    """What an error says, in one line: white space and control characters come from whoever wrote the bundle."""
    words = " ".join(str(error).split())
    shown = words if len(words) <= longest else words[: longest - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown) or type(error).__name__


def raised_in(error: BaseException, *modules: str | None) -> bool:
    """Whether an error comes from one of the modules, or from what these call in C; a name stands for its package, too.

    Signal handlers of a program run between any two steps of Python: an error of theirs is not the library's, and is to
    reach the program as it is. It comes from a function of the handler's module, the last one of its traceback.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = None if trace is None else trace.tb_frame.f_globals.get("__name__")
    return any(name == module or (module and name and name.startswith(f"{module}.")) for module in modules)
