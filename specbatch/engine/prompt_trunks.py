"""How prompts are computed: by pieces that are CUDA graphs (`graphs/piecewise.py`), or kernel by kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from specbatch.cache.pages import KVCache
from specbatch.draft.network import DraftNet
from specbatch.engine.gathering import ChunkCost
from specbatch.graphs.piecewise import PiecewiseTrunk, Runner, token_ladder
from specbatch.graphs.traced import TracedTrunk
from specbatch.models.catalog import cache_dir
from specbatch.models.config import num_layer_weights
from specbatch.models.decoder import Decoder, Trunk

PromptGraphMode = Literal["off", "whole", "piecewise"]


class PromptTrunks(NamedTuple):
    """Of the target and of a draft model. None: as in a round, kernel by kernel."""

    target: Trunk | None = None
    draft: Trunk | None = None


EAGER = PromptTrunks()


def token_sizes(target: Decoder, prefill_chunk_tokens: int) -> list[int]:
    """Numbers of tokens to capture: of chunks that the GPU computes in less time than the host takes to launch them.
    With more tokens nothing is gained, and padding would be lost."""
    config = target.config
    cost = ChunkCost.of_model(config.num_layers, num_layer_weights(config), prefill_chunk_tokens, graphs=True)
    return token_ladder(cost.graph_tokens)


def piecewise_trunks(
    target: Decoder,
    cache: KVCache,
    net: DraftNet | None,
    sizes: Sequence[int],
    runner: Runner | None,
    *,
    compiled: bool,
    on_progress: Callable[[str], None] = lambda progress: None,
) -> PromptTrunks:
    """Traced, and captured where there is a `runner`. `cache`: of the target. `sizes`: numbers of tokens. `compiled`:
    see `TracedTrunk`."""
    # A later start finds the compiled code there. Torch sets this, too, as soon as it traces.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))

    def make(name: str, model: Decoder, cache: KVCache, aux_layers: Sequence[int]) -> PiecewiseTrunk:
        on_progress(f"tracing the {name} for prompts" + ", compiling its pieces" * compiled)
        trunk = PiecewiseTrunk(TracedTrunk(model, aux_layers, compiled=compiled), cache, sizes, runner, name)
        if runner is not None:
            trunk.capture(on_progress)
        return trunk

    of_target = make("target", target, cache, () if net is None else net.aux_layers)
    if net is None or net.decoder is None:
        return PromptTrunks(of_target)
    return PromptTrunks(of_target, make("draft model", net.decoder, net.cache, ()))
