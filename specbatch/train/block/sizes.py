"""The description of a block drafter that is trained for a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.errors import ConfigError
from specbatch.models.blocks.config import BlockConfig, DominoConfig, HeadConfig, MarkovConfig
from specbatch.models.config import ModelConfig
from specbatch.train.layers import layer_config
from specbatch.train.start import HeadName


@dataclass(frozen=True)
class BlockSizes:
    """The sizes that a user chooses. None: the default, which follows from the target."""

    num_layers: int = 2
    block_size: int = 8
    num_features: int = 3  # layers of the target that it reads
    intermediate_size: int | None = None  # None: that of the target
    num_kv_heads: int | None = None  # None: as many as the target
    head: HeadName = "domino"  # none: no head, as in DFlash
    markov_rank: int | None = None
    gru_size: int | None = None  # the state of Domino's head
    inner_size: int | None = None  # the width of Domino's logits
    draft_vocab_size: int | None = None  # None: the whole vocabulary

    def head_config(self, hidden_size: int) -> HeadConfig | None:
        """Return the description of the head."""
        if self.head == "none":
            return None
        if self.head == "markov":
            return MarkovConfig(self.markov_rank or max(hidden_size // 16, 1))
        return DominoConfig(self.inner_size or max(hidden_size // 4, 1), self.gru_size or max(hidden_size // 2, 1), 0)


def block_config(target: ModelConfig, sizes: BlockSizes, mask_token_id: int) -> BlockConfig:
    """Return the description of a drafter with the target's sizes, embeddings and LM head. Of a reduced vocabulary the
    LM head is the target's rows.

    As published, a drafter with a Markov head (DSpark) drafts from the root on, and one without (DFlash) from the first
    mask on. Domino's files know both; from the root on a block of the same size has one draft more. Raise
    ConfigError for a target with too few layers, or with a bias of the LM head, which training lacks.
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
    head = sizes.head_config(target.hidden_size)
    draft_vocab_size = min(sizes.draft_vocab_size or target.vocab_size, target.vocab_size)
    is_reduced = draft_vocab_size < target.vocab_size
    layers = feature_layers(target.num_layers, sizes.num_features)
    return BlockConfig(
        decoder,
        sizes.block_size,
        mask_token_id,
        layers,
        target.hidden_size,
        draft_vocab_size,
        first=0 if head else 1,
        head=head,
        has_lm_head=is_reduced,
        has_vocab_map=is_reduced,
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
