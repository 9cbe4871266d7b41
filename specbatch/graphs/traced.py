"""A decoder's trunk, traced by torch.compile with a backend that splits it at attention and compiles the pieces: see
`piecewise.py`.

Layers whose weights are dense are traced in torch operations. Inductor fuses their norms, activations and residuals,
once for any number of tokens. Layers of other kinds are two opaque operations, before and after attention, which run
our own kernels.

Operations take tensors and numbers. They get everything else through one scoped context, `Scope`.

Shape suffixes: T packed tokens, S padded tokens, E hidden size, H query heads, D head dimension, Z fused projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from specbatch.graphs.piecewise import Between, Launch
from specbatch.models.decoder import Decoder, TrunkOutput
from specbatch.models.decoder_layer import Attention, DecoderLayer, ForwardPass

_EXAMPLE_TOKENS = 16


@dataclass
class Scope:
    """The data that operations need in addition to their arguments."""

    layers: Sequence[DecoderLayer]
    step: ForwardPass
    queries_SHD: Tensor  # the buffer from which attention reads queries
    piece: int = 0  # the running piece: it finishes layer `piece - 1`, and computes the queries of layer `piece`

    def kept(self, queries_SHD: Tensor) -> Tensor:
        self.queries_SHD.copy_(queries_SHD)
        return queries_SHD


_SCOPE: ContextVar[Scope] = ContextVar("scope")


@contextmanager
def scoped(scope: Scope) -> Iterator[None]:
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def _queries(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    scope = _SCOPE.get()
    return scope.kept(scope.layers[scope.piece].queries(x, scope.step))


def _write(qkv: Tensor, num_heads: int, head_dim: int) -> Tensor:
    scope = _SCOPE.get()
    return scope.kept(scope.layers[scope.piece].attention.rotate_and_write(qkv, scope.step))


def _attend(q: Tensor) -> Tensor:
    raise AssertionError("attention is launched between pieces")


def _finish(attended: Tensor, residual: Tensor) -> Tensor:
    scope = _SCOPE.get()
    return scope.layers[scope.piece - 1].finish(attended, residual)


def _fake_queries(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    return x.new_empty(x.shape[0], num_heads, head_dim)


# Operations do not get the number of a layer, so that the pieces of all layers have the same code. Keys and values go
# to the cache of the scope, which the compiler does not see. Attention takes the queries as its argument, so it comes
# after the write. `finish` may write over the residual, which is not read again; Inductor never sees this operation.
_LIBRARY = torch.library.Library("specbatch", "DEF")
for _name, _arguments, _run, _fake in (
    ("queries", "Tensor x, int num_heads, int head_dim", _queries, _fake_queries),
    ("write", "Tensor qkv, int num_heads, int head_dim", _write, _fake_queries),
    ("attend", "Tensor q", _attend, torch.empty_like),
    ("finish", "Tensor attended, Tensor residual", _finish, lambda _, residual: torch.empty_like(residual)),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor")
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specbatch::{_name}", _fake, lib=_LIBRARY)


class _TracedPass:
    """The `ForwardPass` of layers that are traced."""

    def write(self, attention: Attention, qkv_TZ: Tensor) -> Tensor:
        q: Tensor = torch.ops.specbatch.write(qkv_TZ, attention.num_heads, attention.head_dim)
        return q


class _TracedLayer(Protocol):
    """A layer as the trace calls it, see `DecoderLayer`."""

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor: ...

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor: ...


class _OpaqueLayer:
    """A layer that the compiler does not look into."""

    def __init__(self, layer: DecoderLayer) -> None:
        self._num_heads, self._head_dim = layer.attention.num_heads, layer.attention.head_dim

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        out: Tensor = torch.ops.specbatch.finish(attended_THD, residual_TE)
        return out

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        q: Tensor = torch.ops.specbatch.queries(x_TI, self._num_heads, self._head_dim)
        return q


class CompiledPieces:
    """Pieces that Inductor compiles, where layers allow it. See `Pieces`."""

    def __init__(self, model: Decoder, aux_layers: Sequence[int]) -> None:
        assert not model.config.learned_positions, "the trace has no positions"
        self.model, self.aux_layers = model, tuple(i for i in aux_layers if i < len(model.layers))
        self.num_compiled = 0
        self.split, self._arguments, self._order = self._trace(
            [layer.traceable() or _OpaqueLayer(layer) for layer in model.layers]
        )

    def run(
        self, tokens_S: Tensor, step: ForwardPass, between: Between, launch: Launch, attend: Callable[[int], None]
    ) -> TrunkOutput:
        scope = Scope(self.model.layers, step, between.queries_SHD)

        def piece(number: int, function: Callable[[], Any]) -> Any:
            def run() -> Any:
                with scoped(replace(scope, piece=number)):
                    return function()

            return launch(number, run)

        def attention(number: int) -> Tensor:
            attend(number)
            return between.attended_SHD

        # The arguments are the weights, the tokens and their number.
        arguments = [tokens_S if one is _TOKENS else len(tokens_S) if one is _COUNT else one for one in self._arguments]
        flat = _Interpreter(self.split, piece, attention).run(*arguments)
        _, x, *aux_hidden_states = (flat[i] for i in self._order)
        return between.queries_SHD, x, aux_hidden_states

    def _trace(self, layers: Sequence[_TracedLayer]) -> tuple[fx.GraphModule, list[Any], list[int]]:
        """Trace the trunk. Return the split module, its arguments, and for each tensor that the trunk returns its index
        in the module's output."""
        found: list[Any] = []
        tokens = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=self.model.device)
        torch._dynamo.mark_dynamic(tokens, 0)
        step: Any = _TracedPass()

        def trunk(tokens_T: Tensor) -> TrunkOutput:
            """Compute the same as `Decoder.stages`, which is a generator and cannot be traced."""
            x_TE, aux_hidden_states = self.model.embedded(tokens_T, tokens_T), []  # no positions are added here
            for i, layer in enumerate(layers):
                if i in self.aux_layers:
                    aux_hidden_states.append(self.model.auxiliary(x_TE))
                q_THD = layer.queries(x_TE, step)
                if i < len(layers) - 1:
                    x_TE = layer.finish(torch.ops.specbatch.attend(q_THD), x_TE)
            return q_THD, x_TE, aux_hidden_states

        def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., list[Tensor]]:
            split = split_at_attention(graph)
            self.num_compiled = compile_pieces(split)
            (output,) = (node for node in graph.graph.nodes if node.op == "output")
            # This call returns marks in place of tensors, which show the order of the outputs.
            marks = [torch.empty(0, device=tokens.device) for _ in output.args[0]]

            def note(*arguments: Any) -> list[Tensor]:
                found.extend((split, list(arguments), marks))
                return marks

            return note

        # Torch keeps what it has traced, with all weights, and allows few versions of one function. So this resets it.
        # Other compiled functions of this process are compiled again at their next call.
        torch._dynamo.reset()
        with torch.inference_mode():
            q, x, aux = torch.compile(trunk, backend=backend, fullgraph=True)(tokens)
        torch._dynamo.reset()
        assert len(aux) == len(self.aux_layers), "what was traced is another trunk"
        split, arguments, marks = found
        order = [next(i for i, mark in enumerate(marks) if mark is one) for one in (q, x, *aux)]
        kept = [_TOKENS if one is tokens else _COUNT if isinstance(one, int) else one for one in arguments]
        return split, kept, order


class _Interpreter(fx.Interpreter):
    """An interpreter that runs a split module: each piece by `launch`, with its number, and attention by `attend`."""

    def __init__(self, split: fx.GraphModule, launch: Launch, attend: Callable[[int], Tensor]) -> None:
        super().__init__(split)
        self._launch, self._attend, self._number = launch, attend, 0

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target).startswith(_ATTENTION):
            return self._attend(self._number - 1)
        self._number += 1
        module = self.fetch_attr(target)
        return self._launch(self._number - 1, lambda: module(*args))


_ATTENTION = "attention"  # the beginning of the names of attentions in a split module
_TOKENS, _COUNT = object(), object()  # arguments that depend on the tokens


def is_attention(node: fx.Node) -> bool:
    """Return whether this node of a split module is an attention."""
    return node.op == "call_module" and str(node.target).startswith(_ATTENTION)


def split_at_attention(graph: fx.GraphModule) -> fx.GraphModule:
    """Split the graph into a module that calls pieces and attentions alternately."""
    number, numbers = 0, {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target in _ATTEND:
            numbers[node] = number + 1
            number += 2
        else:
            numbers[node] = number
    root = torch.nn.Module()  # empty, because the graph has no modules
    split = split_module(graph, root, lambda node: numbers[node], keep_original_order=True)
    for name, piece in list(split.named_children()):
        assert isinstance(piece, fx.GraphModule)
        if any(node.target in _ATTEND for node in piece.graph.nodes):
            new = name.replace("submod", _ATTENTION)
            split.add_submodule(new, piece)
            for node in split.graph.nodes:
                if node.op == "call_module" and node.target == name:
                    node.target = new
            split.delete_submodule(name)
    split.recompile()
    return split


_ATTEND = (torch.ops.specbatch.attend, torch.ops.specbatch.attend.default)
_FINISH = (torch.ops.specbatch.finish, torch.ops.specbatch.finish.default)


def compile_pieces(split: fx.GraphModule) -> int:
    """Replace each piece by Inductor's code. Pieces that differ in their weights alone are compiled once. Return the
    number of compilations."""
    from torch._inductor.compile_fx import compile_fx

    compiled: dict[str, Any] = {}
    for node in list(split.graph.nodes):
        if node.op != "call_module" or is_attention(node):
            continue
        piece = split.get_submodule(str(node.target))
        assert isinstance(piece, fx.GraphModule)
        if any(one.target in _FINISH for one in piece.graph.nodes):
            continue
        examples = [one.meta["example_value"] for one in piece.graph.nodes if one.op == "placeholder"]
        name = _fingerprint(piece, examples)
        if name not in compiled:
            compiled[name] = compile_fx(piece, examples)
        split.delete_submodule(str(node.target))
        split.add_submodule(str(node.target), _Compiled(compiled[name], _returns_one(piece)))
    return len(compiled)


class _Compiled(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], returns_one: bool) -> None:
        super().__init__()
        self._function, self._returns_one = function, returns_one

    def forward(self, *arguments: Any) -> Any:
        out = self._function(*arguments)
        return out[0] if self._returns_one and isinstance(out, tuple | list) else out


def _returns_one(piece: fx.GraphModule) -> bool:
    (output,) = (node for node in piece.graph.nodes if node.op == "output")
    return isinstance(output.args[0], fx.Node)


def _fingerprint(piece: fx.GraphModule, examples: Sequence[Any]) -> str:
    """Return a fingerprint that is equal for pieces with the same operations on inputs of the same kinds."""
    names = {node: f"n{i}" for i, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda one: names[one])
        lines.append(f"{node.op} {node.target if node.op.startswith('call') else ''} {arguments}")
    kinds = [(tuple(one.shape), one.dtype, one.stride()) if isinstance(one, Tensor) else str(one) for one in examples]
    return hashlib.sha256("\n".join([*lines, str(kinds)]).encode()).hexdigest()
