"""What a template's syntax tree is given so that bodies, loops and operators are paid for.

It has no name that a template could use: what pays are calls of the environment's own functions.
"""

from __future__ import annotations

import math
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateAssertionError
from jinja2.sandbox import SecurityError
from jinja2.visitor import NodeTransformer

from .meter import UNIT_BYTES

_OWN = "environment."
"""Begins the names of filters that no parser gives: they become calls of the environment."""


class PayingGenerator(CodeGenerator):
    """Writes what `PayingSyntax` added as a call of the environment's own function, which no template can name."""

    def visit_Filter(self, node: nodes.Filter, frame: Any) -> None:
        if not node.name.startswith(_OWN):
            super().visit_Filter(node, frame)
            return
        assert node.node is not None
        self.write(f"environment.{node.name.removeprefix(_OWN)}(context.eval_ctx, ")
        self.visit(node.node, frame)
        self.write(")")


class PayingSyntax(NodeTransformer):
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
        check_attribute(node.attr)
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


def check_attribute(name: Any) -> None:
    """Names by which Python, Jinja and markupsafe ask an object what it can do, and call it past `BoundedSandbox.call`."""
    if isinstance(name, str) and name.startswith("__"):
        raise SecurityError(f"an attribute {name!r:.40} of a namespace")
