"""The models that compute prompts: by pieces that are CUDA graphs (`graphs/piecewise.py`), or kernel by kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from specbatch.cache.pages import KVCache
from specbatch.draft.network import DraftNet
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.graphs.piecewise import Pieces, PiecewiseTrunk, PlainPieces, Runner, token_ladder
from specbatch.graphs.traced import CompiledPieces
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.catalog import cache_dir
from specbatch.models.decoder import CausalModel, Decoder, Trunk
from specbatch.models.pass_weights import PassWeights

PromptGraphMode = Literal["off", "whole", "piecewise", "both"]


class PromptTrunks(NamedTuple):
    """The parts of the target and of a draft model that compute prompts. None: kernel by kernel, as in a round."""

    target: Trunk | None = None
    draft: Trunk | None = None


EAGER = PromptTrunks()


class PromptPieces(NamedTuple):
    """The pieces of the target and of a draft model, before there is a cache to read."""

    target: Pieces
    draft: Pieces | None

    @staticmethod
    def of_models(
        target: CausalModel,
        net: DraftNet | None,
        *,
        compiled: bool,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> PromptPieces:
        def make(name: str, model: CausalModel, aux_layers: Sequence[int]) -> Pieces:
            assert isinstance(model, Decoder), "other models have no pieces"
            if not compiled or model.config.learned_positions:
                return PlainPieces(model, aux_layers)
            # A later start finds the compiled code there. Torch sets this, too, as soon as it traces.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
            on_progress(f"compiling the pieces of the {name} for prompts")
            return CompiledPieces(model, aux_layers)

        with torch.inference_mode():
            of_target = make("target", target, () if net is None else net.aux_layers)
            draft = None if net is None else net.decoder
            return PromptPieces(of_target, None if draft is None else make("draft model", draft, ()))


def token_sizes(target: CausalModel, prefill_chunk_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture. These are chunks that the GPU computes in less time than the host takes
    to launch them (`ChunkCost`). For larger chunks a graph gains nothing, and padding costs time."""
    config = target.config
    cost = ChunkCost.of_model(config.num_layers, PassWeights.of_layers(config), prefill_chunk_tokens, graphs=True)
    return token_ladder(cost.graph_tokens)


def piecewise_trunks(
    pieces: PromptPieces,
    cache: KVCache,
    net: DraftNet | None,
    sizes: Sequence[int],
    runner: Runner | None,
    *,
    on_progress: Callable[[str], None] = lambda progress: None,
) -> PromptTrunks:
    """Make the trunks, and capture them if there is a `runner`. A model whose graphs do not fit into memory gets no
    trunk then. `cache`: the target's KV cache. `sizes`: the numbers of tokens to capture."""

    def make(name: str, pieces: Pieces, cache: KVCache) -> PiecewiseTrunk | None:
        try:
            trunk = PiecewiseTrunk(pieces, cache, sizes, runner, name)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        if runner is None:
            return trunk
        trunk.capture(on_progress)
        return trunk if trunk.has_graphs else None

    with torch.inference_mode():
        of_target = make("target", pieces.target, cache)
        of_draft = None
        if pieces.draft is not None and net is not None:
            of_draft = make("draft model", pieces.draft, net.cache)
    return EAGER if of_target is None and of_draft is None else PromptTrunks(of_target, of_draft)
