"""Draft heads of the EAGLE family: one decoder layer that continues the *target's* features.

EAGLE-1/2 (Li et al. 2024; checkpoint names as in yuhuili/EAGLE-LLaMA3-Instruct-8B): the input of position i is
fc([embedding(token i+1); feature i]), the feature being the target's hidden state after its final norm; the layer
has no input norm, and the target's LM head is applied to its output.

EAGLE-3 (Li et al. 2025; names as in yuhuili/EAGLE3-LLaMA3.1-Instruct-8B): the feature is fc([low; middle; high]) of
three of the target's layers; attention takes [norm(embedding); norm(feature)], twice the hidden size; the head has
its own final norm and LM head, over a reduced draft vocabulary: draft id d means target id d + d2t[d]. It can have
further layers, which are ordinary ones.

Both take their own output as the feature of the next position. P-EAGLE (2026) is an EAGLE-3 head that drafts all tokens
in one pass: positions after the root have a mask token and one learned feature. `eagle_config.py` describes a head,
`formats/eagle_files.py` opens one.

Shape suffixes: T packed tokens, R selected tokens, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.models.decoder import CausalModel, PagedModel
from specbatch.models.decoder_layer import ForwardPass, PreNormLayer
from specbatch.models.eagle_config import EagleConfig, layer_prefix, target_ids_of
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import completed
from specbatch.models.weight_loader import WeightLoader


class EagleHead(PagedModel):
    """The head as a model: features and tokens in, draft hidden states and draft logits out. `head`: its description,
    with the sizes of the part of its layer that `weights` loads."""

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
        self.aux_layers = head.aux_layers
        # Of every token: EAGLE-1/2 read it, and an EAGLE-3 head can read the last layer's output.
        self.reads_hidden = head.kind == "eagle" or target.config.num_layers in head.aux_layers
        self.feature_size = c.hidden_size
        self._kind = head.kind
        self._norm_before_residual = head.norm_before_residual
        self._embed = weights.embedding(weights.tensor("embed_tokens.weight")) if head.has_embedding else target.embed
        self._fc = weights.fc(head.has_fc_bias)
        self._layer = PreNormLayer(c, 0, weights, layer_prefix(head.kind), self.rotary_of(0), input_norm=False)
        self._further = [PreNormLayer(c, i, weights, f"layers.{i}.", self.rotary_of(i)) for i in range(1, c.num_layers)]
        self._norm_output = head.norm_output
        self._joined_norm = weights.norm("input_norm", c.rms_norm_eps) if head.input_norms == "joined" else None
        count = len(head.aux_layers) if head.input_norms == "each" else 0
        self._norms = [weights.norm(f"fc_norm.{i}", c.rms_norm_eps) for i in range(count)]
        self.lm_head = weights.linear("lm_head") if head.has_lm_head else target.lm_head
        # (W,) target token of each draft token; None where the two vocabularies are equal
        self.target_ids: Tensor | None = None
        if head.kind == "eagle3":
            self._hidden_norm = weights.norm("midlayer.hidden_norm", c.rms_norm_eps)
            self._input_norm = weights.norm("midlayer.input_layernorm", c.rms_norm_eps)
            self._norm = weights.norm("norm", c.rms_norm_eps)
            if head.has_vocab_map:
                ids = target_ids_of(weights.stored("d2t"), weights.stored("t2d"), c.vocab_size)
                self.target_ids = ids.to(self.device)
        self.mask_token_id = head.mask_token_id
        self.mask_feature_E: Tensor | None = None
        if head.mask_token_id is not None:
            parts = weights.tensor("mask_hidden")[None].chunk(len(head.aux_layers), dim=-1)
            self.mask_feature_E = self._projected(list(parts))[0]

    def _projected(self, aux_hidden_states: list[Tensor]) -> Tensor:
        """Return the feature (T, E) of hidden states of EAGLE-3's layers."""
        if self._norms:
            aux_hidden_states = [norm(one) for norm, one in zip(self._norms, aux_hidden_states, strict=True)]
        joined = torch.cat(aux_hidden_states, dim=-1)
        return self._fc(joined if self._joined_norm is None else self._joined_norm(joined))

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor:
        """The target's features (T, E), from what its forward pass returned."""
        return self._projected(aux_hidden_states) if self._kind == "eagle3" else hidden_TE

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """Hidden states (T, E), or (R, E) of the selected tokens: the next position's features, and what `logits`
        takes. `features_TE` may be overwritten."""
        step = ForwardPass(batch, self._backend, cache)
        embedded = self._embed(tokens_T)
        if self._kind == "eagle3":
            normed = self._hidden_norm(features_TE)
            residual = normed if self._norm_before_residual else features_TE
            x = torch.cat((self._input_norm(embedded), normed), dim=-1)
        else:
            residual = x = self._fc(torch.cat((embedded, features_TE), dim=-1))
        layers = [self._layer, *self._further]
        out = Residual(x)
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1
            next_norm = None if is_last else layers[i + 1].first_norm
            indices, first = logits_indices if is_last else None, residual if i == 0 else None
            out = completed(layer.stages(out, step, indices, residual_TE=first, next_norm=next_norm))
        return self._norm(out.x_TE) if self._norm_output else out.x_TE

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Draft logits (R, W) in the model's dtype."""
        if self._kind == "eagle" or self._norm_output:
            return self.lm_head(hidden_RE)
        return self.lm_head.with_norm(hidden_RE, self._norm)
