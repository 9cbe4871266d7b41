"""Draft networks: a smaller model, an EAGLE head, or a block drafter. `chain.py` and `tree.py` draft with the first
two, `peagle.py` with EAGLE heads that draft all tokens in one pass, `block.py` with block drafters.

A network has its own KV cache, in the same pages of a sequence as the target's. In the cache of a draft model, slot i
belongs to token i. In the cache of an EAGLE head, it belongs to the pair of token i + 1 and the target's feature of
position i, and in that of a block drafter to this feature alone. Before a round starts, *draft-extend* has run over all
tokens up to the root, and has left the hidden state for the first draft step. Drafts go to the next slots, in the order
in which they are drafted; the next draft-extend overwrites them.

Shape suffixes: T packed tokens, R tokens whose hidden states are returned, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.decoder import CausalModel, Trunk
from specbatch.models.eagle_head import EagleHead
from specbatch.models.hybrids.mtp_head import MtpHead


class DraftNet(Protocol):
    """A draft network with its cache."""

    cache: KVCache
    aux_layers: tuple[int, ...]  # target layers whose inputs `features` takes
    draft_kv_offset: int  # 1 if the root has a slot in this cache before a round, else 0; it has none in the target's
    target_ids: Tensor | None  # (W,) the target token of each draft token; None: the same vocabulary
    feature_size: int  # E
    reads_hidden: bool  # True: `features` reads the target's last hidden states of all tokens

    @property
    def decoder(self) -> CausalModel | None:
        """The draft model. None for a head, which has one layer and so no trunk."""
        ...

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor | None:
        """Compute the network's inputs (T, E) from the target's hidden states. Return None for a network that needs
        none. `hidden_TE`: the target's hidden states after its final norm. `aux_hidden_states`: the inputs of the
        target's layers `aux_layers`, each (T, E)."""
        ...

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor | None,
        layout: PagedBatch,
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
    ) -> Tensor:
        """Compute hidden states (T, E), or (R, E) for the tokens of `logits_indices`. `trunk`: computes the layers
        of `decoder`, see `Decoder.forward`."""
        ...


class SteppedNet(DraftNet, Protocol):
    """A draft network that drafts one token after the other."""

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Compute logits (R, W) in the network's dtype."""
        ...


class ModelNet:
    """A smaller model with the target's tokenizer."""

    draft_kv_offset = 1
    aux_layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, model: CausalModel, cache: KVCache, target_vocab_size: int) -> None:
        self.cache = cache
        self._model = model
        # Embeddings are padded to different sizes within one family; ids past the smaller vocabulary are never
        # drafted.
        self._target_vocab_size = target_vocab_size
        self._width = min(target_vocab_size, model.config.vocab_size)
        self.target_ids: Tensor | None = None
        self.feature_size = model.config.hidden_size

    @property
    def decoder(self) -> CausalModel:
        return self._model

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor | None:
        return None

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor | None,
        layout: PagedBatch,
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
    ) -> Tensor:
        # A token past a smaller embedding is read as the last one. This only makes the draft worse.
        if self._model.config.vocab_size < self._target_vocab_size:
            tokens_T = tokens_T.clamp(max=self._model.config.vocab_size - 1)
        return self._model.forward(tokens_T, layout, self.cache, logits_indices=logits_indices, trunk=trunk)[0]

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        return self._model.raw_logits(hidden_RE)[:, : self._width]


Head = TypeVar("Head", bound=EagleHead | MtpHead | BlockDrafter)


class HeadNet(Generic[Head]):
    """A draft network that reads the target's hidden states: draft-extend makes the entries of its cache from them."""

    draft_kv_offset = 0
    decoder: CausalModel | None = None

    def __init__(self, model: Head, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.aux_layers, self.reads_hidden = model.aux_layers, model.reads_hidden
        self.target_ids, self.feature_size = model.target_ids, model.feature_size

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor | None:
        return self.model.features(hidden_TE, aux_hidden_states)

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor | None,
        layout: PagedBatch,
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
    ) -> Tensor:
        assert features_TE is not None
        assert trunk is None
        return self.model.forward(tokens_T, features_TE, layout, self.cache, logits_indices)


class EagleNet(HeadNet[EagleHead | MtpHead]):
    """An EAGLE-1/2 or EAGLE-3 head, or the layer for multi-token prediction of the target's checkpoint."""

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` mask tokens of a P-EAGLE head and their features (count, E), in new memory."""
        head = self.model
        assert isinstance(head, EagleHead), "the method has such a head"
        assert head.mask_feature_E is not None
        assert head.mask_token_id is not None
        features_TE = head.mask_feature_E.repeat(count, 1)
        return torch.full((count,), head.mask_token_id, dtype=torch.int64, device=features_TE.device), features_TE

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        return self.model.raw_logits(hidden_RE)


class BlockNet(HeadNet[BlockDrafter]):
    """A block drafter. In place of a hidden state, draft-extend leaves the feature of the last committed position for
    the next round, if the head of the drafter reads it."""
