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

import math
import re
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateAssertionError
from jinja2.filters import ignore_case, make_attrgetter
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer
from markupsafe import escape, soft_str

from .meter import METER, SIZED, UNIT_BYTES, Meter, size_of

_FILTERS_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_FAST_FILTERS = frozenset((
    "abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "first", "float", "forceescape",
    "format", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "replace", "safe", "string",
    "tojson", "trim", "truncate", "upper",
))  # fmt: skip
"""Filters that go over a text in C, or pay for each character by themselves; others go over it in Python."""
_NOT_INTO = ("length", "count", "default", "d", "first", "last")
"""Filters that look at the value itself, not into it."""
_TAKE_ALL = ("join", "sum", "sort", "unique", "groupby", "min", "max", "in")
"""Filters and a test that hash, compare or print elements: lazy ones must all be known, to be paid for."""
_ATTRIBUTE_AT = {
    "map": None, "selectattr": 0, "rejectattr": 0, "groupby": 0, "sum": 0, "unique": 1, "min": 1, "max": 1, "join": 1,
    "sort": 2,
}  # fmt: skip
"""Filters that look up an attribute of every element → its place among their arguments; None: by name only."""
_MOST_PARTS = 32
"""Of such an attribute: "a.b.c" has three."""
_PRINT = ("replace", "format", "trim", "center")
"""Filters that make a text of whatever they are given."""
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


class _Generator(CodeGenerator):
    """Writes what `_Instrument` added as a call of the environment's own function, which no template can name."""

    def visit_Filter(self, node: nodes.Filter, frame: Any) -> None:
        if not node.name.startswith(_OWN):
            super().visit_Filter(node, frame)
            return
        assert node.node is not None
        self.write(f"environment.{node.name.removeprefix(_OWN)}(context.eval_ctx, ")
        self.visit(node.node, frame)
        self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment; `METER` must be set while a template of it runs."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))
    code_generator_class = _Generator

    def __init__(self, **options: Any):
        # Without the optimizer, and with output that needs the context, nothing is computed while compiling.
        super().__init__(optimized=False, finalize=_output, **options)
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["unique"] = _unique
        self.globals |= {"dict": _dict, "namespace": _namespace}

    def seal(self) -> None:
        """Make every filter and test pay; call it when all of them are there."""
        slow = frozenset(self.filters) - _FAST_FILTERS
        self.filters = {name: _paying(name, function, slow) for name, function in self.filters.items()}
        self.tests = {name: _paying(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        tree = _Instrument(tree).visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    # --- what `_Instrument` adds ---

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
        value = _taken(value)
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
            _pay_format(meter, left, (right,))
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
            args = _pay_text(meter, method.__name__, owner, args, kwargs, method=True)
        elif isinstance(owner, list | tuple):  # `count` and `index` compare
            meter.things(owner)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


_OWN = "environment."
"""Begins the names of filters that no parser gives: they become calls of the environment."""


class _Instrument(NodeTransformer):
    """Adds what pays to a syntax tree, and refuses what Jinja would turn into wrong Python."""

    def __init__(self, tree: nodes.Template):
        self._names = sum(1 for name in tree.find_all(nodes.Name) if name.ctx != "load")
        """A block is entered with a copy of all variables."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body.insert(0, _pay_for(node.body, node.lineno))
        units = 0 if node.test is None else _units([node.test])
        self.generic_visit(node)
        node.iter = _through("counted", node.iter)
        if node.test is not None:  # `step` gives None
            paid = nodes.Not(_step(units, node.lineno), lineno=node.lineno)
            node.test = nodes.And(paid, node.test, lineno=node.lineno)
        return node

    def _body(self, node: Any) -> nodes.Node:
        copied = self._names if isinstance(node, nodes.Block) else 0
        defaults = _units(getattr(node, "defaults", []))  # computed at every call
        node.body.insert(0, _pay_for(node.body, node.lineno, copied + defaults))
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("paid", node.expr)
        for operand in node.ops:
            operand.expr = _through("members" if operand.op in ("in", "notin") else "paid", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through("paid", node.node)
        elif not isinstance(node.arg, nodes.Const):  # it is hashed, and printed in an error
            node.arg = _through("paid", node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(pair.key, nodes.Const) for pair in node.items):
            return node
        pairs = [nodes.Tuple([p.key, p.value], "load", lineno=p.lineno) for p in node.items]
        return _through("mapping", nodes.List(pairs, lineno=node.lineno))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, float) and not math.isfinite(node.value):
            # Jinja writes it as `inf` into the Python that it makes, a name that nobody knows there.
            raise TemplateAssertionError(
                "a number is beyond the largest float; write a smaller one", node.lineno
            )
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        _check_attribute(node.attr)
        return node


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, _OWN + name, [], [], None, None, lineno=node.lineno)


def _pay_for(body: list[nodes.Node], line: int, units: int = 0) -> nodes.ExprStmt:
    return nodes.ExprStmt(_step(1 + units + _units(body), line), lineno=line)


def _step(units: int, line: int) -> nodes.Filter:
    return _through("step", nodes.Const(units, lineno=line))


def _units(parts: list[Any]) -> int:
    """What it costs to go through these nodes once."""
    units = 0
    for part in parts:
        for node in (part, *part.find_all(nodes.Node)):
            text = node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", "")
            units += 1 + (len(text) // UNIT_BYTES if isinstance(text, str) else 0)
    return units


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
    found = _dict(*args, **kwargs)
    for name in found:
        _check_attribute(name)
    return Namespace(found)


def _check_attribute(name: Any) -> None:
    """Names by which Python, Jinja and markupsafe ask an object what it can do, and call it past `BoundedSandbox.call`."""
    if isinstance(name, str) and name.startswith("__"):
        raise SecurityError(f"an attribute {name!r:.40} of a namespace")


@pass_environment
def _unique(
    environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None
) -> Iterator[Any]:
    """Jinja's filter; of keys of one hash, few are compared."""
    key_of = make_attrgetter(environment, attribute, None if case_sensitive else ignore_case)
    seen: set[Any] = set()
    hashes: Counter[int] = Counter()
    for item in value:
        key = key_of(item)
        if key not in seen:
            seen.add(key)
            code = hash(key)
            hashes[code] += 1
            METER.get().equal_hashes({code: hashes[code]})
            yield item


def _paying(
    name: str, function: Callable[..., Any], slow: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """The filter or test, which pays for its arguments and its result; a `slow` one for every character."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter, given = METER.get(), args[skip:]
        if name in _TAKE_ALL:
            given = tuple(map(_taken, given))
            kwargs = {key: _taken(each) for key, each in kwargs.items()}
        characters = meter.things(*(given[1:] if name in _NOT_INTO else given), kwargs)
        if name in slow:
            meter.pay(characters)
        if name in _ATTRIBUTE_AT:
            _check_parts(kwargs.get("attribute"), _ATTRIBUTE_AT[name], given[1:])
        if given:
            value, *rest = given
            if name in _PRINT:
                value = soft_str(value)
            given = (value, *_pay_text(meter, name, value, tuple(rest), kwargs))
        return meter.made(function(*args[:skip], *given, **kwargs))

    return run


def _check_parts(attribute: Any, place: int | None, args: tuple[Any, ...]) -> None:
    """Refuse an attribute whose parts take longer to look up than the elements that are paid for."""
    if attribute is None and place is not None and place < len(args):
        attribute = args[place]
    if not isinstance(attribute, str | int | None):
        raise SecurityError(f"an attribute that is {type(attribute).__name__}")
    if isinstance(attribute, str) and len(re.findall("[.,]", attribute)) >= _MOST_PARTS:
        raise SecurityError(f"an attribute of more than {_MOST_PARTS} parts")


def _taken(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _pay_text(
    meter: Meter,
    name: str,
    value: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    method: bool = False,
) -> tuple[Any, ...]:
    """Pay for what a filter or a `method` of a text makes beyond its arguments; returns the arguments to call it with."""
    given = (*args, *kwargs.values())
    size = len(value) if isinstance(value, str) else 0
    # A width, a number of parts, a number of digits: at most as much work as its value says.
    meter.pay(sum(abs(number) for number in given if isinstance(number, int)))
    texts = [len(text) for text in given if isinstance(text, str)]
    if name == "replace":
        words = [soft_str(each) for each in given]  # in any order, where they are given by name
        place = escape(value) if any(hasattr(each, "__html__") for each in (value, *given)) else value
        found = max((place.count(word) for word in words), default=0)
        meter.text(len(place) + (found + 1) * max(map(len, words), default=0))
    elif name in ("rfind", "rindex", "rsplit", "rpartition") or name in (
        "strip",
        "lstrip",
        "rstrip",
        "trim",
    ):  # Python looks from the end without its fast search
        meter.pay(size * max([0, *texts]) // UNIT_BYTES)
    elif name == "indent":
        lines = value.count("\n") + 1 if size else 1
        meter.pay(lines)
        widths = [number for number in given if isinstance(number, int)] or [4]
        meter.text(size + lines * max(*widths, *texts, 0))
    elif name == "join" and method:  # value stands between
        parts = list(args[0]) if args else []
        meter.text(size * len(parts) + meter.things(*parts))
        args = (parts, *args[1:])
    elif name == "join":
        parts = len(value) if isinstance(value, (str, *SIZED)) else 0
        meter.text(max([0, *texts]) * parts + meter.things(value))
    elif name in ("format", "format_map") and isinstance(value, str):
        _pay_format(meter, value, given)
    elif name == "sum" and not all(isinstance(start, int | float | str) for start in given):
        raise SecurityError("sum of anything but numbers")
    elif name == "int" and size > 1000:
        raise SecurityError("a number of more than 1000 digits")
    return args


def _pay_format(meter: Meter, form: str, given: Iterable[Any]) -> None:
    """Pay for `form % given` and `form.format(given)`: every field may be any of the values."""
    # Names in brackets may hold anything, so that the end of a field is not seen behind them.
    named = re.search(r"%\(|\[", form) and re.search(r"\d{4}", form)
    if named or re.search(r"[%][^%a-zA-Z]*(?:\d{4}|\*)|\{[^{}]*(?:\d{4}|\{(?!\{))", form):
        raise SecurityError("a format with a width of four digits, or one that is computed")
    before = meter.left
    characters = meter.things(*given)
    fields = form.count("%") + form.count("{")
    meter.pay((before - meter.left) * fields)
    meter.text(len(form) + (1000 + characters) * fields)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedSandbox`. Raises `TooMuch`, and what the template raises."""
    token = METER.set(Meter())
    try:
        return METER.get().joined(template.generate(variables))
    finally:
        METER.reset(token)
