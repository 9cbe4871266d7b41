"""The trunk of a decoder in pieces, each of which is a CUDA graph. The host launches few kernels for a prompt chunk,
whatever the chunk holds.

A trunk (`decoder.Trunk`) is the part of a decoder that runs for every token, up to the last layer's attention. The part
between two attentions is a *piece*: it depends on the number of tokens alone. Attention depends on the sequences, which
some backends plan on the host. So pieces are captured for a ladder of token counts, and attention is launched between
them. Tokens are padded to the next size. Padding has slot -1, so it is not written, and attention skips it.

All graphs of a runner share one memory pool. A later capture may use memory that an earlier one has freed. So Python
must hold a tensor in the pool until no later graph may write over it: the input of a piece until this piece is
captured, and the output of a trunk as long as the trunk exists. Queries and the output of attention, which no piece
holds, are outside of the pool. Replays follow the order of the captures, on one stream, and the output of a trunk is
read before another trunk runs.

Only prompts get such a trunk. Rounds call the same model without one, so no round replays a piece.

Shape suffixes: T packed tokens, S padded tokens, E hidden size, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.decoder import Decoder, TrunkOutput
from specbatch.models.decoder_layer import ForwardPass

_SMALLEST = 16  # tokens


def token_ladder(largest: int) -> list[int]:
    """List the token counts to capture, ascending: powers of two and the numbers halfway between them, from 16 on, that
    are less than `largest`; and `largest` itself."""
    sizes: list[int] = []
    size = _SMALLEST
    while size < largest:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [*(one for one in sizes if one < largest), max(largest, _SMALLEST)]


def next_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """Return the first of the ascending `sizes` that holds these tokens, or None."""
    return next((size for size in sizes if size >= num_tokens), None)


class Runner(Protocol):
    """A runner of CUDA graphs, see `GraphRunner`."""

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any: ...

    def replace_output(self, key: tuple[Any, ...], output: Any) -> None: ...

    def drop(self, key: tuple[Any, ...]) -> None: ...

    def replay(self, key: tuple[Any, ...]) -> Any: ...


class Between(NamedTuple):
    """The tensors that pieces and attention give each other, at fixed addresses."""

    queries_SHD: Tensor
    attended_SHD: Tensor

    def of_size(self, size: int) -> Between:
        return Between(self.queries_SHD[:size], self.attended_SHD[:size])


# A function that runs a piece, given its number and its function, and returns its result.
Launch = Callable[[int, Callable[[], Any]], Any]


class Pieces(Protocol):
    """A decoder's trunk, cut at attention."""

    model: Decoder
    aux_layers: tuple[int, ...]

    def run(
        self, tokens_S: Tensor, step: ForwardPass, between: Between, launch: Launch, attend: Callable[[int], None]
    ) -> TrunkOutput:
        """Run all pieces by `launch`, with `attend` after each but the last. A piece writes its layer's queries to
        `between`, and `attend` writes the output of that layer's attention there."""
        ...


class PlainPieces:
    """Pieces that run the layers' own kernels: the second half of a layer, and the first half of the next one."""

    def __init__(self, model: Decoder, aux_layers: Sequence[int]) -> None:
        self.model, self.aux_layers = model, tuple(i for i in aux_layers if i < len(model.layers))

    def run(
        self, tokens_S: Tensor, step: ForwardPass, between: Between, launch: Launch, attend: Callable[[int], None]
    ) -> TrunkOutput:
        aux_hidden_states: list[Tensor] = []
        x: Tensor | None = None
        for i in range(len(self.model.layers)):
            if i:
                attend(i - 1)
            x, aux = launch(i, partial(self._piece, i, tokens_S, x, step, between))
            if aux is not None:
                aux_hidden_states.append(aux)
        assert x is not None, "a model has layers"
        return between.queries_SHD, x, aux_hidden_states

    def _piece(
        self, i: int, tokens_S: Tensor, x_SE: Tensor | None, step: ForwardPass, between: Between
    ) -> tuple[Tensor, Tensor | None]:
        """Run piece i. Return the input of layer i, (S, E), and a copy of it if it is an auxiliary hidden state."""
        layers = self.model.layers
        if x_SE is None:
            x_SE = self.model.embedded(tokens_S, step.batch.positions_T)
        else:
            x_SE = layers[i - 1].finish(between.attended_SHD, x_SE)
        aux = self.model.auxiliary(x_SE) if i in self.aux_layers else None
        between.queries_SHD.copy_(layers[i].queries(x_SE, step))
        return x_SE, aux


class PiecewiseTrunk:
    """A `Trunk` for prompt chunks of one model, padded to `sizes`. It does not fit chunks that are longer, nor those of
    a size that is not captured. `runner`: None: pieces are padded, but launched without graphs. `name`: the name of its
    graphs, where models share a runner."""

    def __init__(
        self, pieces: Pieces, cache: KVCache, sizes: Sequence[int], runner: Runner | None, name: str = "trunk"
    ) -> None:
        model, largest = pieces.model, max(sizes)
        self.pieces, self._model, self._runner, self._name = pieces, model, runner, name
        self.sizes, self._cache = sorted(sizes), cache
        self._captured: dict[int, TrunkOutput] = {}
        self._tokens, self._positions, self._slots = torch.zeros(3, largest, dtype=torch.int64, device=model.device)
        attention, dtype = model.layers[0].attention, model.embedding_VE.dtype
        # The tensors begin with zeros, so that the results of padding are finite.
        shape = (2, largest, attention.num_heads, attention.head_dim)
        self._between = Between(*torch.zeros(shape, dtype=dtype, device=model.device))
        self.num_replays = 0  # the number of chunks whose pieces were replayed

    @property
    def has_graphs(self) -> bool:
        return bool(self._captured)

    def capture(self, on_progress: Callable[[str], None] = lambda progress: None) -> None:
        """Capture the pieces of all sizes, the largest first: the smaller ones fit into the memory that the larger ones
        free in the pool. No prompt is read or written."""
        for number, size in enumerate(reversed(self.sizes), start=1):
            on_progress(f"capturing CUDA graphs of prompts: {number} of {len(self.sizes)}, {size} tokens")
            self.capture_size(size)

    def capture_size(self, size: int) -> None:
        """Capture the pieces of one size. If memory runs out, the size stays uncaptured."""
        runner = self._runner
        assert runner is not None
        self._slots[:size].fill_(-1)

        def capture(number: int, piece: Callable[[], Any]) -> Any:
            key = (self._name, size, number)
            output = runner.capture(key, piece)
            runner.replace_output(key, None)  # the trunk holds the tensors that are needed
            return output

        try:
            self._captured[size] = self._run(size, capture, lambda number: None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for number in range(len(self._model.layers)):
                runner.drop((self._name, size, number))

    def fits(self, num_tokens: int, aux_layers: Sequence[int]) -> bool:
        size = next_size(self.sizes, num_tokens)
        wanted = {i for i in aux_layers if i < len(self._model.layers)}
        has_graphs = self._runner is None or size in self._captured
        return size is not None and has_graphs and wanted <= set(self.pieces.aux_layers)

    def __call__(self, tokens_T: Tensor, step: ForwardPass, aux_layers: Sequence[int]) -> TrunkOutput:
        count, size = len(tokens_T), next_size(self.sizes, len(tokens_T))
        assert size is not None, "see `fits`"
        assert step.cache is self._cache, "graphs hold the addresses of another cache"
        batch = step.batch
        for static, values in (
            (self._tokens, tokens_T), (self._positions, batch.positions_T), (self._slots, batch.slots_T),
        ):  # fmt: skip
            static[:count].copy_(values)
        self._slots[count:size].fill_(-1)  # padding is written nowhere
        self.num_replays += 1
        queries_THD, attended_THD = self._between.of_size(count)
        layers = self._model.layers

        def attend(number: int) -> None:
            attended_THD.copy_(step.attend(layers[number].attention, queries_THD))

        if self._runner is None:
            _, x, aux = self._run(size, lambda _, piece: piece(), attend)
        else:
            _, x, aux = self._replay(size, attend)
        numbers = [self.pieces.aux_layers.index(i) for i in aux_layers if i < len(layers)]
        return queries_THD, x[:count], [aux[number][:count] for number in numbers]

    def _replay(self, size: int, attend: Callable[[int], None]) -> TrunkOutput:
        assert self._runner is not None
        for number in range(len(self._model.layers)):
            if number:
                attend(number - 1)
            self._runner.replay((self._name, size, number))
        return self._captured[size]

    def _run(self, size: int, launch: Launch, attend: Callable[[int], None]) -> TrunkOutput:
        step, between = self._static_pass(size), self._between.of_size(size)
        return self.pieces.run(self._tokens[:size], step, between, launch, attend)

    def _static_pass(self, size: int) -> ForwardPass:
        """Return the forward pass for tokens in static buffers. Pieces read nothing else of the batch."""
        none = torch.zeros(1, dtype=torch.int32, device=self._model.device)
        batch = PagedBatch(self._slots[:size], self._positions[:size], none[None], 1, none, none, 1)
        return self._model.static_pass(batch, self._cache)
