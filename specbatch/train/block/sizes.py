"""The description of a block drafter that is trained for a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.errors import ConfigError
from specbatch.models.blocks.config import BlockConfig, MarkovConfig
from specbatch.models.config import ModelConfig
from specbatch.train.layers import layer_config


@dataclass(frozen=True)
class BlockSizes:
    """The sizes that a user chooses."""

    num_layers: int
    block_size: int
    num_features: int  # layers of the target that it reads
    markov_rank: int  # 0: no head, as in DFlash
    intermediate_size: int | None  # None: that of the target
    num_kv_heads: int | None = None  # None: as many as the target


def block_config(target: ModelConfig, sizes: BlockSizes, mask_token_id: int) -> BlockConfig:
    """Return the description of a drafter with the target's sizes, embeddings and LM head.

    As published, a drafter with a Markov head (DSpark) drafts from the root on, and one without (DFlash) from the first
    mask on. Raise ConfigError for a target with too few layers, or with a bias of the LM head, which training lacks.
    """
    if target.lm_head_bias:
        raise ConfigError(
            f"a block drafter has the target's LM head, and that of {target.model_type} has a bias", "use --kind eagle3"
        )
    inner = sizes.intermediate_size or target.intermediate_size
    kv_heads = sizes.num_kv_heads or target.num_kv_heads
    if target.num_heads % kv_heads:
        raise ConfigError(
            f"--kv-heads {kv_heads} does not divide the {target.num_heads} query heads",
            f"a divisor of {target.num_heads}",
        )
    decoder = replace(
        layer_config(target),
        model_type="qwen3",
        num_layers=sizes.num_layers,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        qk_norm=True,
        sliding_windows=(None,) * sizes.num_layers,
    )
    head = MarkovConfig(sizes.markov_rank) if sizes.markov_rank else None
    layers = feature_layers(target.num_layers, sizes.num_features)
    return BlockConfig(
        decoder,
        sizes.block_size,
        mask_token_id,
        layers,
        target.hidden_size,
        target.vocab_size,
        first=0 if head else 1,
        head=head,
    )


def feature_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` layers from the third to the last but two, at equal distances, as in DFlash."""
    first, last = 2, num_layers - 3
    layers = tuple(first + round(i * (last - first) / max(count - 1, 1)) for i in range(count))
    if last < first or len(set(layers)) < count:
        raise ConfigError(
            f"a drafter cannot read {count} layers of this target, which has {num_layers}",
            f"at most {max(last - first + 1, 0)}: --features",
        )
    return layers
