"""The backbone of block drafters (DFlash, Chen et al. 2026; `config.py` describes it).

The cache of its layers has two kinds of entries. Those of past positions are computed from *features*: fc of the
target's hidden states of several layers, then a norm. A feature is the same for all layers and has no residual stream
of its own. The entries of a block, the root and mask tokens after it, are computed in the pass that drafts them, and
are written over when the target has accepted tokens.

Shape suffixes: T packed tokens, R selected ones, B requests, K positions of a block, E hidden size, G groups of
features, W draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels import ops_for
from specbatch.models.blocks.config import BlockConfig, ConvolutionConfig
from specbatch.models.blocks.heads import BlockHead, BlockOutput, confidence_of, head_of
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import CausalModel, PagedModel
from specbatch.models.decoder_layer import ForwardPass, PreNormLayer
from specbatch.models.eagle_config import target_ids_of
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import completed
from specbatch.models.weight_loader import WeightLoader


class BlockDrafter(PagedModel):
    """The backbone with its head: features and roots in, hidden states and draft logits of blocks out."""

    def __init__(
        self,
        block: BlockConfig,
        weights: WeightLoader,
        target: CausalModel,
        backend: AttentionBackend,
        num_positions: int,
    ) -> None:
        c = block.decoder
        super().__init__(c, weights, backend, num_positions)
        self.block = block
        self.aux_layers = block.aux_layers
        self.reads_hidden = target.config.num_layers in block.aux_layers
        self._fc = weights.linear("fc")
        self._hidden_norm = weights.norm("hidden_norm", c.rms_norm_eps)
        self._layers = [_Layer(block, i, weights, self.rotary_of(i)) for i in range(c.num_layers)]
        self._norm = weights.norm("norm", c.rms_norm_eps)
        self._embed = weights.embedding(weights.tensor("embed_tokens.weight")) if block.has_embedding else target.embed
        self._lm_head = weights.linear("lm_head") if block.has_lm_head else target.lm_head
        self._mask_embedding_E = weights.tensor("mask_embedding") if block.has_mask_embedding else None
        self._soft_capped = ops_for(weights.device, weights.dtype).soft_capped
        self.target_ids: Tensor | None = None  # (W,) target token of each draft token
        if block.has_vocab_map:
            ids = target_ids_of(weights.stored("d2t"), weights.stored("t2d"), c.vocab_size)
            self.target_ids = ids.to(self.device)
        self.head: BlockHead = head_of(block, weights, self.embedded)
        self.confidence = confidence_of(block, weights, self.head)
        self.feature_size = c.hidden_size if self.head.reads_feature else 0
        self._seen_W = _words_of_ones(block.block_size, self.device)

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor:
        """Return the target's features (T, E), from what its forward pass returned."""
        return self._hidden_norm(self._fc(torch.cat(aux_hidden_states, dim=-1)))

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """Write the keys and values of past positions, which do not depend on the tokens. Return their features, or
        those of the selected ones, as far as the head reads them: (R, feature_size)."""
        step = ForwardPass(batch, self._backend, cache, in_graph=True)  # nothing attends, so there is no plan
        for layer in self._layers:
            layer.attention.queries(features_TE, step, None)
        selected_RE = features_TE if logits_indices is None else features_TE[logits_indices.index_R]
        return selected_RE[:, : self.feature_size]

    def hidden_states(self, root_B: Tensor, batch: PagedBatch, cache: KVCache) -> Tensor:
        """Compute the hidden states (B, K, E) of blocks, after the final norm. `batch` has K new tokens of each request
        and no mask."""
        size, layers = self.block.block_size, self._layers
        tokens_BK = root_B[:, None].repeat(1, size)
        tokens_BK[:, 1:] = self.block.mask_token_id
        x = Residual(self.embedded(tokens_BK.view(-1)))
        passes: dict[bool, ForwardPass] = {}
        for i, layer in enumerate(layers):
            is_causal = self.block.is_causal(i)
            if is_causal not in passes:
                seen = batch if is_causal else batch.masked(self._seen_W.repeat(len(x.x_TE), 1))
                passes[is_causal] = ForwardPass(seen, self._backend, cache)
            next_norm = layers[i + 1].first_norm if i + 1 < len(layers) else self._norm
            x = layer.forward(x, passes[is_causal], next_norm)
        return x.normed(self._norm).view(len(root_B), size, -1)

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """Return the embeddings (T, E) of tokens of the target's vocabulary, and of the mask token."""
        x_TE = self._embed(tokens_T)
        if self._mask_embedding_E is not None:
            x_TE = torch.where((tokens_T == self.block.mask_token_id)[:, None], self._mask_embedding_E, x_TE)
        return x_TE if self.block.embedding_scale == 1 else x_TE * self.block.embedding_scale

    def block_output(
        self,
        root_B: Tensor,
        before_B: Tensor | None,
        feature_BE: Tensor | None,
        batch: PagedBatch,
        cache: KVCache,
        num_drafts: int,
    ) -> BlockOutput:
        """Draft blocks, of which the first `num_drafts` drafts are wanted. `before_B`, `feature_BE`: the token before
        each root, and the feature of its position; None: the head does not read it."""
        hidden_BKE, first = self.hidden_states(root_B, batch, cache), self.block.first
        count = self.block.max_drafts if self.head.reads_all else num_drafts
        drafted_TE = hidden_BKE[:, first : first + count].transpose(0, 1).reshape(-1, hidden_BKE.shape[-1])
        logits_SBW = self.raw_logits(drafted_TE).view(count, len(root_B), -1)
        return BlockOutput(hidden_BKE, logits_SBW, first, root_B, before_B, feature_BE, self.target_ids)

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Return draft logits (R, W) in the model's dtype, without the head's part."""
        logits_RW = self._lm_head(hidden_RE)
        if self.block.logits_scale != 1:
            logits_RW = logits_RW * self.block.logits_scale
        cap = self.block.logits_soft_cap
        return logits_RW if cap is None else self._soft_capped(logits_RW.contiguous(), cap)


def _words_of_ones(count: int, device: torch.device) -> Tensor:
    """Return words (int32) whose first `count` bits are set: each position of a block sees all of them."""
    words = [(1 << min(32, count - first)) - 1 for first in range(0, count, 32)]
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32, device=device)


class _Layer(PreNormLayer):
    """A layer of the backbone. DFlash2 has convolutions over the block in it."""

    def __init__(self, block: BlockConfig, layer: int, weights: WeightLoader, rotary: Rotary) -> None:
        prefix = f"layers.{layer}."
        super().__init__(block.decoder, layer, weights, prefix, rotary)
        self._convolutions: tuple[_Convolution, _Convolution] | None = None
        if block.convolution is not None:
            parts = block.decoder, block.convolution, block.block_size, weights
            self._convolutions = (
                _Convolution(*parts, f"{prefix}attention_conv"),
                _Convolution(*parts, f"{prefix}mlp_conv"),
            )

    def forward(self, x: Residual, step: ForwardPass, next_norm: RMSNorm | None = None) -> Residual:
        """Compute the layer for blocks."""
        if self._convolutions is None:
            return completed(self.stages(x, step, next_norm=next_norm))
        assert self._input_norm is not None
        of_attention, of_mlp = self._convolutions
        normed_TE, kernel = of_attention.before(self._input_norm(x.x_TE))
        attended_THD = step.attend(self.attention, self.attention.queries(normed_TE, step, None))
        x_TE = x.x_TE + of_attention.after(self.attention.output(attended_THD), kernel)
        normed_TE, kernel = of_mlp.before(self._post_norm(x_TE))
        return Residual(x_TE + of_mlp.after(self._mlp(normed_TE), kernel))


class _Convolution:
    """A causal convolution over the positions of a block, before and after a part of a layer. The input of the part
    gives the kernels of both."""

    def __init__(
        self, config: ModelConfig, convolution: ConvolutionConfig, block_size: int, weights: WeightLoader, prefix: str
    ) -> None:
        self._num_taps, self._block_size = convolution.num_taps, block_size
        self._num_groups = config.hidden_size // convolution.group_size
        self._base_2CE = weights.tensor(f"{prefix}.base_kernel")
        self._projection = weights.linear(f"{prefix}.kernel_projection")

    def before(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the part, and the kernels for `after`."""
        kernels = self._projection(x_TE).view(-1, self._block_size, 2, self._num_taps, self._num_groups)
        return self._convolved(x_TE, kernels[:, :, 0], self._base_2CE[0]), kernels[:, :, 1]

    def after(self, y_TE: Tensor, kernel_BKCG: Tensor) -> Tensor:
        """Return the convolved output of the part."""
        return self._convolved(y_TE, kernel_BKCG, self._base_2CE[1])

    def _convolved(self, x_TE: Tensor, kernel_BKCG: Tensor, base_CE: Tensor) -> Tensor:
        x = x_TE.view(-1, self._block_size, self._num_groups, x_TE.shape[-1] // self._num_groups)
        base = base_CE.view(self._num_taps, self._num_groups, -1)
        out = torch.zeros_like(x)
        for tap in range(self._num_taps):
            shifted = F.pad(x, (0, 0, 0, 0, tap, 0))[:, : self._block_size]
            out = out + shifted * (base[tap] + kernel_BKCG[:, :, tap, :, None])
        return out.view_as(x_TE)
