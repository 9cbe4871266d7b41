"""The trunk of a decoder in pieces, each a CUDA graph: prompts without the host's launches, whatever their chunk is.

A trunk (`decoder.Trunk`) is what is computed for every token, up to the last layer's attention. torch.compile traces it
once, with a backend that splits the graph at attention (`traced.py`). All between two attentions is a *piece*: it
depends on the number of tokens alone. Attention depends on the sequences, which some backends plan on the host. So
pieces are captured for a ladder of token counts, and attention is launched between them. Tokens are padded to the next
size; padding has slot -1, which is written nowhere, and attention leaves it out.

Only prompts are given such a trunk. Rounds call the same model without one, so none of them replays a piece, whatever
its number of tokens.

Shape suffixes: T packed tokens, S padded tokens, E hidden size, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.graphs.traced import ATTENTION, Scope, TracedTrunk, scoped
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.decoder import ForwardPass, TrunkOutput

_SMALLEST = 16  # tokens


def token_ladder(largest: int) -> list[int]:
    """Token counts to capture, ascending: powers of two and the numbers halfway between them, from 16 to the first that
    is `largest` or more."""
    sizes: list[int] = []
    size = _SMALLEST
    while not sizes or sizes[-1] < largest:
        sizes += [size, size * 3 // 2]
        size *= 2
    return sizes if sizes[-2] < largest else sizes[:-1]


class Runner(Protocol):
    """See `GraphRunner`."""

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any: ...

    def replace_output(self, key: tuple[Any, ...], output: Any) -> None: ...

    def drop(self, key: tuple[Any, ...]) -> None: ...

    def replay(self, key: tuple[Any, ...]) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Captured:
    """The pieces for one number of tokens: what each leaves."""

    queries: list[Tensor]  # (S, H, D) of each attention, which is valid until the next piece
    output: TrunkOutput


class PiecewiseTrunk:
    """A `Trunk` for the chunks of prompts of one model, padded to `sizes`. Others run as ever, and so do all where
    nothing is captured yet. `runner` None: pieces are padded and launched. `name`: of its graphs, where models share a
    runner."""

    def __init__(
        self, traced: TracedTrunk, cache: KVCache, sizes: Sequence[int], runner: Runner | None, name: str = "trunk"
    ) -> None:
        model, largest = traced.model, max(sizes)
        self.traced, self._model, self._runner, self._name = traced, model, runner, name
        self.sizes, self._cache = sorted(sizes), cache
        self._captured: dict[int, _Captured] = {}
        self._tokens, self._positions, self._slots = torch.zeros(3, largest, dtype=torch.int64, device=model.device)
        attention, dtype = model.layers[0].attention, model.embedding_VE.dtype
        # Not empty: what is computed of padding should be finite.
        shape = (largest, attention.num_heads, attention.head_dim)
        self._attended = torch.zeros(shape, dtype=dtype, device=model.device)
        self.num_replays = 0  # of a chunk's pieces

    def capture(self, on_progress: Callable[[str], None] = lambda progress: None) -> None:
        """Capture the pieces of all sizes, the largest first: smaller ones fit into what they leave of the pool. No
        prompt is read or written."""
        for number, size in enumerate(reversed(self.sizes), start=1):
            on_progress(f"capturing CUDA graphs of prompts: {number} of {len(self.sizes)}, {size} tokens")
            self.capture_size(size)

    def capture_size(self, size: int) -> None:
        """Leaves the size uncaptured where memory runs out."""
        runner = self._runner
        assert runner is not None
        self._slots[:size].fill_(-1)
        scope, queries = Scope(self._model.layers, self._static_pass(size)), []

        def piece(number: int, function: Callable[[], Any]) -> Any:
            def run() -> Any:
                with scoped(replace(scope, piece=number)):
                    return function()

            output = runner.capture((self._name, size, number), run)
            runner.replace_output((self._name, size, number), None)  # what is needed of it is kept here
            return output

        def attend(q: Tensor) -> Tensor:
            queries.append(_borrowed(q))
            return self._attended[:size]

        try:
            output = self._run(size, piece, attend)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for number in range(self.traced.num_pieces):
                runner.drop((self._name, size, number))
            return
        self._captured[size] = _Captured(queries, output)

    def fits(self, num_tokens: int, aux_layers: Sequence[int]) -> bool:
        size = self._size_for(num_tokens)
        wanted = {i for i in aux_layers if i < len(self._model.layers)}
        has_graphs = self._runner is None or size in self._captured
        return size is not None and has_graphs and wanted <= set(self.traced.aux_layers)

    def _size_for(self, num_tokens: int) -> int | None:
        return next((size for size in self.sizes if size >= num_tokens), None)

    def __call__(self, tokens_T: Tensor, step: ForwardPass, aux_layers: Sequence[int]) -> TrunkOutput:
        count, size = len(tokens_T), self._size_for(len(tokens_T))
        assert size is not None, "see `fits`"
        assert step.cache is self._cache, "graphs hold the addresses of another cache"
        batch = step.batch
        for static, values in (
            (self._tokens, tokens_T), (self._positions, batch.positions_T), (self._slots, batch.slots_T),
        ):  # fmt: skip
            static[:count].copy_(values)
        self._slots[count:size].fill_(-1)  # padding is written nowhere
        self.num_replays += 1
        attended, layers = self._attended[:count], self._model.layers

        def attend(number: int, q_SHD: Tensor) -> None:
            attended.copy_(step.attend(layers[number].attention, q_SHD[:count]))

        q, x, aux = self._launch(size, attend) if self._runner is None else self._replay(size, attend)
        numbers = [self.traced.aux_layers.index(i) for i in aux_layers if i < len(layers)]
        return q[:count], x[:count], [aux[number][:count] for number in numbers]

    def _replay(self, size: int, attend: Callable[[int, Tensor], None]) -> TrunkOutput:
        assert self._runner is not None
        captured = self._captured[size]
        for number, q_SHD in enumerate(captured.queries):
            self._runner.replay((self._name, size, number))
            attend(number, q_SHD)
        self._runner.replay((self._name, size, len(captured.queries)))
        return captured.output

    def _launch(self, size: int, attend: Callable[[int, Tensor], None]) -> TrunkOutput:
        scope = Scope(self._model.layers, self._static_pass(size))

        def piece(number: int, function: Callable[[], Any]) -> Any:
            scope.piece = number
            return function()

        def attention(q_SHD: Tensor) -> Tensor:
            attend(scope.piece, q_SHD)
            return self._attended[:size]

        with scoped(scope):
            return self._run(size, piece, attention)

    def _run(
        self, size: int, piece: Callable[[int, Callable[[], Any]], Any], attend: Callable[[Tensor], Tensor]
    ) -> TrunkOutput:
        interpreter = _Interpreter(self.traced.split, piece, attend)
        return self.traced.output(interpreter.run(*self.traced.arguments(self._tokens[:size])))

    def _static_pass(self, size: int) -> ForwardPass:
        """Of tokens in static buffers. Pieces read nothing else of the batch."""
        none = torch.zeros(1, dtype=torch.int32, device=self._model.device)
        batch = PagedBatch(self._slots[:size], self._positions[:size], none[None], 1, none, none, 1)
        return self._model.static_pass(batch, self._cache)


class _Interpreter(fx.Interpreter):
    """Runs a split module: each piece, with its number, by `piece`, and attention of queries by `attend`."""

    def __init__(
        self,
        split: fx.GraphModule,
        piece: Callable[[int, Callable[[], Any]], Any],
        attend: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(split)
        self._piece, self._attend, self._number = piece, attend, 0

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target).startswith(ATTENTION):
            (q,) = (one for one in args if isinstance(one, Tensor))
            return self._attend(q)
        self._number += 1
        module = self.fetch_attr(target)
        return self._piece(self._number - 1, lambda: module(*args))


class _Memory:
    """Device memory that nobody owns here."""

    def __init__(self, x: Tensor) -> None:
        interface = {"shape": (x.nbytes,), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = interface


def _borrowed(x: Tensor) -> Tensor:
    """The same tensor without keeping its memory: later graphs of the pool can use it."""
    if not x.is_cuda:
        return x
    assert x.is_contiguous(), x.stride()
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype).view(x.shape)
