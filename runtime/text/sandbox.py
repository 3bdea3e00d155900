"""Jinja's immutable sandbox with a bound on work and memory: a chat template comes with the bundle and is untrusted.

Jinja's sandbox keeps a template from Python's internals, not from looping 10^10 times or writing 10^10 characters in one
expression. Here everything that a template does is paid for from one budget per rendering (`meter.py`), before it is done:

- every body that is entered (of a loop, macro, block) by the number of nodes in it, every element that a loop or a lazy
  filter takes by one, every call by one; nesting and recursion change nothing about it;
- every operator, comparison, key, filter, test, call, slice and output by the size of what it is given, counted as deep and
  as often as it is hashed, printed or compared; a string counts one for 256 bytes;
- what makes more than it was given (`*`, `**`, `%`, `~`, widths, `replace`, `join`, `format`, `indent`) by what it will make.

What pays is added to the syntax tree of the template, not to its text, and has no name that a template could use. Filters
and methods whose work cannot be told from their arguments, and that no chat template needs, are missing.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context

from .meter import METER, Meter, size_of
from .sandbox_filters import pay_format, pay_text, paying, taken, unique
from .sandbox_syntax import PayingGenerator, PayingSyntax, check_attribute

_FILTERS_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_FAST_FILTERS = frozenset((
    "abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "first", "float", "forceescape",
    "format", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "replace", "safe", "string",
    "tojson", "trim", "truncate", "upper",
))  # fmt: skip
"""Filters that go over a text in C, or pay for each character by themselves; others go over it in Python."""
_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(
        name
        for name in dir(str)
        if name not in ("encode", "expandtabs", "maketrans", "translate", "format_map") and name[0] != "_"
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}
"""Methods of Python's own types; they have no others here."""
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range, type)


class _Counted:
    """What a loop goes over: elements are paid for, and its length is still known."""

    def __init__(self, values: Any):
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return METER.get().elements(self._values)

    def __len__(self) -> int:
        return len(self._values)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment; `METER` must be set while a template of it runs."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))
    code_generator_class = PayingGenerator

    def __init__(self, **options: Any):
        # Without the optimizer, and with output that needs the context, nothing is computed while compiling.
        super().__init__(optimized=False, finalize=_output, **options)
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["unique"] = unique
        self.globals |= {"dict": _dict, "namespace": _namespace}

    def seal(self) -> None:
        """Make every filter and test pay; call it when all of them are there."""
        slow = frozenset(self.filters) - _FAST_FILTERS
        self.filters = {name: paying(name, function, slow) for name, function in self.filters.items()}
        self.tests = {name: paying(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        tree = PayingSyntax(tree).visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    # --- what `PayingSyntax` adds ---

    @staticmethod
    def counted(_: Any, values: Any) -> _Counted:
        """What a loop goes over."""
        return _Counted(values)

    @staticmethod
    def step(_: Any, units: int) -> None:
        """Pay for a body that is entered."""
        METER.get().pay(units)

    @staticmethod
    def paid(_: Any, value: Any) -> Any:
        """What is compared, cut, printed, or a key."""
        if type(value) is str:
            METER.get().pay(1 + size_of(value))
        else:
            METER.get().things(value)
        return value

    @staticmethod
    def members(_: Any, value: Any) -> Any:
        """What `in` looks through."""
        value = taken(value)
        METER.get().things(value)
        return value

    @staticmethod
    def mapping(_: Any, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """`{key: value, …}`."""
        METER.get().keys([key for key, _ in pairs])
        return dict(pairs)

    @staticmethod
    def joined(eval_context: Any, values: list[Any]) -> str:
        """`value ~ value ~ …`."""
        meter = METER.get()
        meter.text(meter.things(values))
        return meter.made((markup_join if eval_context.autoescape else str_join)(values))

    # --- what Jinja calls ---

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        """The text of a macro or a block that is kept."""
        return METER.get().joined(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _PLAIN):
            allowed = next(
                (names for kind, names in _ATTRIBUTES.items() if isinstance(obj, kind)), frozenset()
            )
            if attr not in allowed:
                return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        meter.pay(1)
        if operator == "%" and isinstance(left, str):
            pay_format(meter, left, (right,))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    meter.text(len(many) * max(times, 0) * (1 if isinstance(many, str) else 64))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            meter.text(len(left) + len(right))
        elif isinstance(left, KeysView | ItemsView) or isinstance(right, KeysView | ItemsView):
            raise SecurityError("arithmetic with the keys or items of a mapping")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
            meter.bits(bits if operator == "**" else bits + right.bit_length())
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.things(__obj, args, kwargs)  # the object, too: what cannot be called is printed
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (_Counted(args[0]), *args[1:])
        method: Any = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            meter.things(owner)
            args = pay_text(meter, method.__name__, owner, args, kwargs, method=True)
        elif isinstance(owner, list | tuple):  # `count` and `index` compare
            meter.things(owner)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


@pass_context
def _output(_context: Any, value: Any) -> Any:
    return BoundedSandbox.paid(_context, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Python's `dict`, which pays for its keys before it hashes them."""
    if len(args) == 1 and not isinstance(args[0], Mapping):
        pairs = [tuple(pair) for pair in args[0]]
        METER.get().keys([pair[0] for pair in pairs if pair])
        args = (pairs,)
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = _dict(*args, **kwargs)
    for name in attributes:
        check_attribute(name)
    return Namespace(attributes)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedSandbox`. Raises `TooMuch`, and what the template raises."""
    token = METER.set(Meter())
    try:
        return METER.get().joined(template.generate(variables))
    finally:
        METER.reset(token)
