"""The variables that a Jinja template reads, from its syntax tree.

`jinja2.meta.find_undeclared_variables` also names those that a template sets and then changes in one branch of an `if`;
here a variable is read only if it can be used before the template has set it.
"""

from __future__ import annotations

from collections.abc import Iterable

import jinja2
import jinja2.defaults
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

_FUNCTIONS = ("raise_exception", "strftime_now")  # functions that transformers adds to Jinja's
_IN_MACROS = ("caller", "varargs", "kwargs")


def variables_of(template: str) -> frozenset[str]:
    """Raises jinja2.TemplateSyntaxError for a template that is not valid."""
    reads = _Reads()
    reads.all(parsed(template).body, {*jinja2.defaults.DEFAULT_NAMESPACE, *_FUNCTIONS})
    return frozenset(reads.found)


def parsed(template: str) -> nodes.Template:
    """Raises jinja2.TemplateSyntaxError for a template that is not valid."""
    return jinja2.Environment(extensions=[jinja2.ext.loopcontrols, _Generation]).parse(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Reads:
    """Goes through statements in their order. `known`: names that are set at this point; it grows."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def all(self, statements: Iterable[nodes.Node | None], known: set[str]) -> set[str]:
        for node in statements:
            if node is not None:
                self._one(node, known)
        return known

    def _one(self, node: nodes.Node, known: set[str]) -> None:
        match node:
            case nodes.Name(ctx="load"):
                self.found.update({node.name} - known)
            case nodes.Name():
                known.add(node.name)
            case nodes.Assign():
                self.all([node.node, node.target], known)
            case nodes.AssignBlock():
                self.all([node.filter, *node.body], set(known))
                self._one(node.target, known)
            case nodes.If():
                # What all branches set is set after them.
                self._one(node.test, known)
                branches = [self.all(node.body, set(known))]
                for other in node.elif_:
                    self._one(other.test, known)
                    branches.append(self.all(other.body, set(known)))
                branches.append(self.all(node.else_, set(known)))
                known |= set.intersection(*branches)
            case nodes.For():  # what a loop sets ends with a turn
                self._one(node.iter, known)
                self.all([node.target, node.test, *node.body], known | {"loop"})
                self.all(node.else_, set(known))
            case nodes.Macro() | nodes.CallBlock():
                if isinstance(node, nodes.Macro):
                    known.add(node.name)
                else:
                    self._one(node.call, known)
                self.all([*node.defaults, *node.args, *node.body], known.union(_IN_MACROS))
            case nodes.With():
                self.all(node.values, known)
                self.all([*node.targets, *node.body], set(known))
            case nodes.Scope() | nodes.FilterBlock() | nodes.Block():
                self.all(node.iter_child_nodes(), set(known))
            case _:
                self.all(node.iter_child_nodes(), known)
