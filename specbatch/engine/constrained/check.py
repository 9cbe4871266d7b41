"""The check that finds which nodes of a draft tree need a mask, from the target's choices without masks.

A greedy request takes the token with the largest logit. If its mask has that token, the token is the same with the mask
and without it. So a mask is needed only where the grammar refuses the target's own choice, and not at nodes that no
token leads to. A sampled request needs all masks: a draw takes the token at a quantile of the whole distribution, which
a mask changes even where the token is legal.

Whether a node gets a mask depends on the tokens before it and on the target's own choice there, and on nothing else. So
the margins of a text, which are those of the logits after the masks, are the same with every draft method.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.constrained.tree import GrammarTree


def refused_nodes(state: GrammarState, tree: GrammarTree, choices: Sequence[int]) -> list[int]:
    """Return the nodes that need a mask. `choices`: the target's choice after each node. The state is after the root.
    It advances along the choices up to the first that the grammar refuses, so that it need not follow them later."""
    node: int | None = 0
    while node is not None:
        token = choices[node]
        if not state.choose(token, _only_token(state, tree, node)):
            found: list[int] = []
            _visit(state, tree, choices, node, found)
            return found
        has_more = node + 1 < len(tree.tokens) and not state.is_end(token)
        node = _child(tree, node, token) if has_more else None
    return []


def find_forced(state: GrammarState, tree: GrammarTree, node: int = 0) -> None:
    """Find the forced tokens after a node, where the state is, and after its descendants. This is the part of a check
    that needs no choices."""
    _only_token(state, tree, node)
    for child in _children(state, tree, node):
        if state.enter(tree.tokens[child]):
            find_forced(state, tree, child)
            state.back(1)


def _visit(state: GrammarState, tree: GrammarTree, choices: Sequence[int], node: int, found: list[int]) -> None:
    """Add the nodes that need a mask, of those that may be reached from this one, where the state is. NO_TOKEN counts
    as refused: a mask can make logits finite."""
    token = choices[node]
    children = _children(state, tree, node)
    if state.takes(token, _only_token(state, tree, node)):
        children = [child for child in children if tree.tokens[child] == token]
    else:
        found.append(node)  # any of its children may be chosen once the mask is applied
    for child in children:
        if state.enter(tree.tokens[child]):
            _visit(state, tree, choices, child, found)
            state.back(1)
        else:
            found.append(child)  # its mask lets nothing come


def _only_token(state: GrammarState, tree: GrammarTree, node: int) -> int:
    if (only := tree.forced[node]) is None:
        only = tree.forced[node] = state.only_token()
    return only


def _children(state: GrammarState, tree: GrammarTree, node: int) -> list[int]:
    """Those after which the request goes on."""
    after = range(node + 1, len(tree.tokens))
    return [child for child in after if tree.parents[child] == node and not state.is_end(tree.tokens[child])]


def _child(tree: GrammarTree, node: int, token: int) -> int | None:
    after = range(node + 1, len(tree.tokens))
    return next((child for child in after if tree.parents[child] == node and tree.tokens[child] == token), None)
