"""Jinja's immutable sandbox with a bound on work and memory: a chat template comes with the bundle and is untrusted.

Jinja's sandbox keeps a template from Python's internals, not from looping 10^10 times or writing 10^10 characters in one
expression. Here everything that a template does is paid for from one budget per rendering, before it is done:

- every body that is entered (of a loop, macro, block) by the number of nodes in it, every element that a loop or a lazy
  filter takes by one, every call by one; nesting and recursion change nothing about it;
- every operator, comparison, filter, test, call, slice and output by the size of what it is given, counted as deep and as
  often as it is printed or compared; a string counts one for 256 characters;
- what makes more than it was given (`*`, `**`, `%`, `~`, widths, `replace`, `join`, `format`, `indent`) by what it will make.

The statements are added to the syntax tree of the template, not to its text. Filters and methods whose work cannot be told
from their arguments, and that no chat template needs, are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context, pass_eval_context
from jinja2.visitor import NodeTransformer

from ..errors import PromptError

WORK = 2_000_000
"""Units of one rendering: seconds at most, also on a small board. A conversation of 100 messages takes some thousands."""

LONGEST = 4_000_000
"""Characters of a rendered prompt, and of any text on the way to it."""

_MOST_BITS = 2048
_TEXT = 256
"""Characters for one unit."""

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
_MANY = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_SIZED = (range, Mapping, *_MANY)


class TooMuch(PromptError):
    """A template that does more than it may."""


class Meter:
    """What a rendering may still do."""

    def __init__(self, work: int = WORK):
        self.left = work

    def pay(self, units: int) -> None:
        """Raise `TooMuch` when the budget is spent."""
        self.left -= units
        if self.left < 0:
            raise TooMuch(
                f"the chat template does more than {WORK:,} steps of work for these messages; shorten them, or build the "
                "bundle with another template"
            )

    def text(self, characters: int) -> None:
        """Pay for a text that will be made."""
        if characters > LONGEST:
            raise TooMuch(f"the chat template wrote more than {LONGEST} characters")
        self.pay(1 + characters // _TEXT)

    def things(self, *values: Any) -> None:
        """Pay for values as deep as they go, shared parts as often as they appear."""
        waiting: list[Any] = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self.pay(1 + len(value) // _TEXT)
            elif isinstance(value, range):
                self.pay(1 + len(value))
            elif isinstance(value, _MANY):
                self.pay(1 + len(value))
                waiting.extend(value)
            else:
                self.pay(1)
                if isinstance(value, Namespace):
                    value = value._Namespace__attrs  # type: ignore[attr-defined]
                if isinstance(value, Mapping):
                    self.pay(len(value))
                    waiting.extend(value)
                    waiting.extend(value.values())

    def joined(self, parts: Iterable[str]) -> str:
        """One text of many, each paid for when it is there."""
        found: list[str] = []
        size = 0
        for part in parts:
            found.append(part)
            size += len(part)
            self.text(len(part))
            if size > LONGEST:
                self.text(size)
        return "".join(found)

    def made(self, value: Any) -> Any:
        """The result of an operation, paid for; a lazy one pays for every element that is taken."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, Iterator):
            return self.elements(value)
        elif isinstance(value, _SIZED):
            self.pay(1 + len(value) // 16)
        return value

    def elements(self, values: Iterable[Any]) -> Iterator[Any]:
        """The elements, each paid for when it is taken."""
        for value in values:
            self.pay(1)
            yield value


METER: ContextVar[Meter] = ContextVar("vlmexport_template_meter")
"""Of the rendering that runs."""


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

    def __init__(self, **options: Any):
        # Without the optimizer, and with output that needs the context, nothing is computed while compiling.
        super().__init__(optimized=False, finalize=_output, **options)
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]

    def seal(self) -> None:
        """Make every filter and test pay; call it when all of them are there."""
        slow = frozenset(self.filters) - _FAST_FILTERS
        self.filters = {name: _paying(name, function, slow) for name, function in self.filters.items()}
        self.tests = {name: _paying(name, function) for name, function in self.tests.items()}
        self.filters |= {"_step": _step, "_paid": _paid, "_counted": _Counted, "_concat": _concat}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

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
            _pay_format(meter, left, (right,))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    meter.text(len(many) * max(times, 0) * (1 if isinstance(many, str) else 64))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            meter.text(len(left) + len(right))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
            _check_bits(bits if operator == "**" else bits + right.bit_length())
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.things(args, kwargs)
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (_Counted(args[0]), *args[1:])
        method: Any = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            meter.things(owner)
            args = _pay_text(meter, method.__name__, owner, args, kwargs)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


class _Instrument(NodeTransformer):
    """Adds what pays to a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body.insert(0, _pay_for(node.body, node.lineno))
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def _body(self, node: Any) -> nodes.Node:
        node.body.insert(0, _pay_for(node.body, node.lineno))
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("_paid", node.expr)
        for operand in node.ops:
            operand.expr = _through("_paid", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through("_paid", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("_concat", nodes.List(node.nodes, lineno=node.lineno))


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _pay_for(body: list[nodes.Node], line: int) -> nodes.ExprStmt:
    units = 1
    for part in body:
        for node in (part, *part.find_all(nodes.Node)):
            text = node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", "")
            units += 1 + (len(text) // _TEXT if isinstance(text, str) else 0)
    return nodes.ExprStmt(_through("_step", nodes.Const(units, lineno=line)), lineno=line)


def _step(units: int) -> None:
    METER.get().pay(units)


def _paid(value: Any) -> Any:
    METER.get().things(value)
    return value


@pass_eval_context
def _concat(context: Any, values: list[Any]) -> str:
    meter = METER.get()
    meter.things(values)
    meter.text(sum(len(value) for value in values if isinstance(value, str)))
    return meter.made((markup_join if context.autoescape else str_join)(values))


@pass_context
def _output(_context: Any, value: Any) -> Any:
    METER.get().things(value)
    return value


def _paying(
    name: str, function: Callable[..., Any], slow: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """The filter or test, which pays for its arguments and its result; a `slow` one for every character."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter, given = METER.get(), args[skip:]
        # These look at the value itself, not into it.
        meter.things(
            *(given[1:] if name in ("length", "count", "default", "d", "first", "last") else given), kwargs
        )
        if given:
            value, *rest = given
            if isinstance(value, str) and name in slow:
                meter.pay(len(value))
            if name in ("join", "sum", "list") and isinstance(value, Iterator):
                value = list(value)  # each element was paid for; now the whole is known
                meter.things(value)
            args = (*args[:skip], value, *_pay_text(meter, name, value, tuple(rest), kwargs))
        return meter.made(function(*args, **kwargs))

    return run


def _pay_text(
    meter: Meter, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Pay for what a filter or a method of a text makes beyond its arguments; returns the arguments to call it with."""
    given = (*args, *kwargs.values())
    size = len(value) if isinstance(value, str) else 0
    # A width, a number of parts, a number of digits: at most as much work as its value says.
    meter.pay(sum(abs(number) for number in given if isinstance(number, int)))
    texts = [len(text) for text in given if isinstance(text, str)]
    if name == "replace":
        old = given[0] if given and isinstance(given[0], str) else ""
        found = value.count(old) if size else 0
        meter.text(size + (found + 1) * max([0, *texts]))
    elif name in ("strip", "lstrip", "rstrip", "trim"):
        meter.pay(size * max([0, *texts]) // _TEXT)
    elif name == "indent":
        lines = value.count("\n") + 1 if size else 1
        meter.pay(lines)
        widths = [number for number in given if isinstance(number, int)] or [4]
        meter.text(size + lines * max(*widths, *texts, 0))
    elif name == "join" and isinstance(value, str) and args:  # the method: value stands between
        parts = list(args[0])
        meter.text(size * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
        args = (parts, *args[1:])
    elif name == "join":
        parts = list(value) if isinstance(value, _SIZED) else []
        between = max([0, *texts])
        meter.text(between * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
    elif name in ("format", "format_map") and isinstance(value, str):
        _pay_format(meter, value, given)
    elif name == "sum" and not all(isinstance(start, int | float | str) for start in given):
        raise SecurityError("sum of anything but numbers")
    elif name == "int" and size > 1000:
        raise SecurityError("a number of more than 1000 digits")
    return args


def _pay_format(meter: Meter, form: str, given: Iterable[Any]) -> None:
    """Pay for `form % given` and `form.format(given)`: every field may be any of the values."""
    if re.search(r"\d{4}|%[^%a-zA-Z]*\*|\{[^{}]*\{(?!\{)", form):
        raise SecurityError("a format with a width of four digits, or one that is computed")
    before = meter.left
    meter.things(*given)
    fields = form.count("%") + form.count("{")
    meter.pay((before - meter.left) * fields)
    meter.text(len(form) + 1000 * fields)


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TooMuch(f"the chat template computes a number of more than {_MOST_BITS} bits")


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedSandbox`. Raises `TooMuch`, and what the template raises."""
    token = METER.set(Meter())
    try:
        return METER.get().joined(template.generate(variables))
    finally:
        METER.reset(token)
