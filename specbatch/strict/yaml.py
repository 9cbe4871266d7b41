"""The strict reader of YAML for configurations, --set and eval tasks. It returns plain data, or raises one clear
error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from specbatch.errors import shown

_MAX_DEPTH, _MAX_NODES, _MAX_DIGITS = 50, 100_000, 100
_MAX_MESSAGE = 300  # characters
_MERGE = "tag:yaml.org,2002:merge"
_BOOL = "tag:yaml.org,2002:bool"
_TRUE_FALSE = re.compile(r"(true|True|TRUE|false|False|FALSE)$")  # as in YAML 1.2: yes, no, on and off are texts
_TEXT_TAGS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")  # dates and "=": no option takes either


class YamlProblem(Exception):
    """An error in a YAML text, in one line."""


def load_yaml(text: str) -> Any:
    """Read a YAML text as dicts, lists and scalars. It raises YamlProblem."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # a subclass of SafeLoader, so it builds plain data only
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as exc:
        message = " ".join(_located(exc).split())
        raise YamlProblem(message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE - 3]}...") from exc


def _located(exc: Exception) -> str:
    """Return the problem and its position, but not the line of the text, which can be long."""
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem and (mark := exc.problem_mark or exc.context_mark):
        return f"{exc.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return str(exc)


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses keys that are given twice, and structures that only an attack or an accident makes."""

    yaml_implicit_resolvers: ClassVar[Any] = {  # type: ignore[misc]
        first: [(tag, _TRUE_FALSE if tag == _BOOL else pattern) for tag, pattern in resolvers if tag not in _TEXT_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _problem(f"nested more than {_MAX_DEPTH} deep", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _num_nodes(node, {}, set())
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace "<<" by the keys of the mappings that it names. The mapping's own keys win, then those of the mapping
        that is named first, as yaml.org/type/merge.html says. PyYAML 6.0.4 lets the last one win
        (github.com/yaml/pyyaml/issues/953), so this is not left to the library."""
        merged, own = [], []
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                own.append((key_node, value_node))
                continue
            others = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for other in reversed(others):
                if not isinstance(other, yaml.MappingNode):
                    raise _problem("expected a mapping or list of mappings for merging", other)
                self.flatten_mapping(other)
                merged += other.value
        if merged:
            # A later pair replaces an earlier pair with the same key.
            pairs = {_key(self, key_node): (key_node, value_node) for key_node, value_node in [*merged, *own]}
            own = list(pairs.values())
        node.value = own


def _num_nodes(node: yaml.Node, known: dict[int, int], inside: set[int]) -> int:
    """Count the values under `node`, with each alias (*name) replaced by the node that it names. `inside`: the nodes
    around `node`."""
    if id(node) in inside:
        raise _problem("an alias (*name) of what it is a part of", node)
    if id(node) not in known:
        parts = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        total = 1 + sum(_num_nodes(part, known, inside | {id(node)}) for part in parts)
        if total > _MAX_NODES:
            raise _problem(f"more than {_MAX_NODES:,} values, aliases (*name) written out", node)
        known[id(node)] = total
    return known[id(node)]


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        # "<<" copies the keys of another mapping; it is not a key.
        key = "<<" if key_node.tag == _MERGE else _key(loader, key_node)
        if key in seen:
            raise _problem(f"the key {shown(key)} is given twice", key_node)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _key(loader: yaml.SafeLoader, node: yaml.Node) -> Hashable:
    key = loader.construct_object(node, deep=True)
    if not isinstance(key, Hashable):
        raise _problem(f"{shown(key)} cannot be a key", node)
    return key


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) > _MAX_DIGITS:
        raise _problem(f"an integer of {len(node.value):,} digits", node)
    try:
        return loader.construct_yaml_int(node)
    except ValueError as exc:
        raise _problem(f"{shown(node.value)} is no integer", node) from exc


def _problem(what: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _integer)
# YAML 1.1 reads 1e-3 as text because it has no dot; nobody who writes it means text.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
