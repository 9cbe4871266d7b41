"""The layer for multi-token prediction (MTP) of a hybrid's checkpoint, as a draft head. Names are those in checkpoints
of Qwen3-Next and Qwen3.5.

The input of position i is fc([norm(embedding of token i+1); norm(feature i)]), the feature being the target's hidden
state after its final norm. After a decoder layer with attention and a final norm, the target's LM head is applied. Of
its own drafts the layer takes its output as the feature of the next position.

Shape suffixes: T packed tokens, R selected tokens, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.models.decoder import CausalModel, PagedModel
from specbatch.models.decoder_layer import ForwardPass
from specbatch.models.eagle_config import EagleConfig, layer_prefix
from specbatch.models.hybrids.layer import HybridLayer
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import completed
from specbatch.models.weight_loader import WeightLoader


class MtpHead(PagedModel):
    """The layer with the interface of `EagleHead`."""

    aux_layers: tuple[int, ...] = ()
    reads_hidden = True
    target_ids: Tensor | None = None

    def __init__(
        self,
        head: EagleConfig,
        weights: WeightLoader,
        target: CausalModel,
        backend: AttentionBackend,
        num_positions: int,
    ) -> None:
        c = head.decoder
        super().__init__(c, weights, backend, num_positions)
        self.feature_size = c.hidden_size
        eps, offset = c.rms_norm_eps, c.norm_offset
        self._embed, self.lm_head = target.embed, target.lm_head
        self._embedding_norm = weights.norm("mtp.pre_fc_norm_embedding", eps, offset)
        self._hidden_norm = weights.norm("mtp.pre_fc_norm_hidden", eps, offset)
        self._norm = weights.norm("mtp.norm", eps, offset)
        self._fc = weights.linear("mtp.fc")
        self._layer = HybridLayer(c, 0, weights, layer_prefix(head.kind), self.rotary_of(0))

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor:
        """Return the target's features (T, E), from what its forward pass returned."""
        return hidden_TE

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """Return hidden states (T, E), or (R, E) of the selected tokens: the next position's features, and what
        `logits` takes."""
        step = ForwardPass(batch, self._backend, cache)
        parts = self._embedding_norm(self._embed(tokens_T)), self._hidden_norm(features_TE)
        x = Residual(self._fc(torch.cat(parts, dim=-1)))
        return self._norm(completed(self._layer.stages(x, step, logits_indices)).x_TE)

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Return draft logits (R, W) in the model's dtype."""
        return self.lm_head(hidden_RE)
