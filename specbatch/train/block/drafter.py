"""A block drafter that can be trained: the arithmetic and the names of `models/blocks`, as a torch module.

It is the backbone of DFlash (Chen et al. 2026, arXiv:2602.06036), and the Markov head of DSpark (DeepSeek-AI 2026,
github.com/deepseek-ai/DeepSpec). `models/blocks/config.py` describes both.

Shape suffixes: N blocks, K positions of a block, Q = N * K queries, T context, S = T + Q keys, E hidden size, F
features, H heads, D head dimension, R drafts, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbatch.models.blocks.config import BlockConfig, MarkovConfig
from specbatch.models.config import ModelConfig
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.train.block.attention import Attend
from specbatch.train.layers import FeedForward, Norm, rotate

_DEVIATION = 0.02  # the standard deviation of random weights, as in Llama
Tables = tuple[Tensor, Tensor]  # cos and sin, (positions, D)


class _Attention(nn.Module):
    """Attention whose keys and values are those of the features and of the blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self._head_dim, self._scale = dim, config.attention_scale
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim, config.rms_norm_eps), Norm(dim, config.rms_norm_eps)

    def forward(self, x_QE: Tensor, features_TE: Tensor, tables_Q: Tables, tables_S: Tables, attend: Attend) -> Tensor:
        both_SE = torch.cat((features_TE.to(x_QE.dtype), x_QE))
        v_GSD = self._heads(self.v_proj(both_SE))
        q_HQD = rotate(self.q_norm(self._heads(self.q_proj(x_QE))), *tables_Q).to(v_GSD.dtype)
        k_GSD = rotate(self.k_norm(self._heads(self.k_proj(both_SE))), *tables_S).to(v_GSD.dtype)
        return self.o_proj(attend(q_HQD, k_GSD, v_GSD, self._scale).transpose(0, 1).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(0, 1)


class _Layer(nn.Module):
    """A layer of the backbone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.mlp = FeedForward(config)

    def forward(self, x_QE: Tensor, features_TE: Tensor, tables_Q: Tables, tables_S: Tables, attend: Attend) -> Tensor:
        x_QE = x_QE + self.self_attn(self.input_layernorm(x_QE), features_TE, tables_Q, tables_S, attend)
        return x_QE + self.mlp(self.post_attention_layernorm(x_QE))


class _MarkovHead(nn.Module):
    """The bias of a draft's logits that depends on the token before it."""

    def __init__(self, config: MarkovConfig, block: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(block.decoder.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, block.draft_vocab_size, bias=False)


class TrainedBlocks(nn.Module):
    """A drafter whose parameters have the names of a checkpoint. Embedding and LM head are the target's."""

    def __init__(self, block: BlockConfig) -> None:
        super().__init__()
        c = block.decoder
        assert block.head is None or isinstance(block.head, MarkovConfig)
        self.block = block
        self.fc = nn.Linear(len(block.aux_layers) * block.feature_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = None if block.head is None else _MarkovHead(block.head, block)

    def forward(
        self, embedded_QE: Tensor, features_TF: Tensor, tables_Q: Tables, tables_T: Tables, attend: Attend
    ) -> Tensor:
        """Compute the hidden states (Q, E) of all blocks, after the final norm."""
        # The residual stream keeps the width of the parameters.
        wide = self.fc.weight.dtype
        features_TE = self.hidden_norm(self.fc(features_TF.to(wide)))
        tables_S = torch.cat((tables_T[0], tables_Q[0])), torch.cat((tables_T[1], tables_Q[1]))
        x_QE = embedded_QE.to(wide)
        for layer in self.layers:
            x_QE = layer(x_QE, features_TE, tables_Q, tables_S, attend)
        return self.norm(x_QE)

    def logits(self, hidden_RE: Tensor, before_R: Tensor, lm_head_VE: Tensor) -> Tensor:
        """Compute draft logits (R, V). `before_R`: the token before each draft."""
        logits_RV = F.linear(hidden_RE.to(lm_head_VE.dtype), lm_head_VE)
        if self.markov_head is None:
            return logits_RV
        return logits_RV + self.markov_head.markov_w2(self.markov_head.markov_w1(before_R))


def initialise(drafter: TrainedBlocks, target: Checkpoint, seed: int) -> None:
    """Initialise weights from the target's last layers where they have a counterpart, and from N(0, 0.02) elsewhere.

    `fc` passes on the highest feature, so that the first keys and values are nearly those of a layer of the target. An
    MLP that is smaller than the target's gets its first neurons. The bias of the Markov head begins at zero.
    """
    c, block = target.config, drafter.block
    num_layers, size = block.decoder.num_layers, c.hidden_size
    generator = torch.Generator().manual_seed(seed)
    stored = target.tensors.shapes()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(torch.empty(parameter.shape).normal_(0, _DEVIATION, generator=generator))
        drafter.fc.weight[:, -size:] += torch.eye(size)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.zero_()
        for i in range(num_layers):
            prefix = f"model.layers.{c.num_layers - num_layers + i}."
            for name, parameter in drafter.layers[i].named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    continue
                # In Gemma 2 and 3 the post_attention_layernorm is that of the attention's output.
                before_mlp = "pre_feedforward_layernorm"
                if name.startswith("post_attention_layernorm") and before_mlp in c.norms:
                    name = f"{before_mlp}.weight"
                if f"{prefix}{name}" not in stored:
                    continue
                found = target.tensors.load(f"{prefix}{name}")
                if len(found.shape) == 1:
                    found = found + c.norm_offset
                if name.endswith(("k_proj.weight", "v_proj.weight")):
                    found = _heads_repeated(found, len(parameter) // c.head_dim, c.head_dim)
                parts = tuple(slice(0, n) for n in parameter.shape)
                if all(a >= b for a, b in zip(found.shape, parameter.shape, strict=True)):
                    parameter.copy_(found[parts])
        first = f"model.layers.{c.num_layers - num_layers}.input_layernorm.weight"
        if first in stored:
            drafter.hidden_norm.weight.copy_(target.tensors.load(first) + c.norm_offset)
        drafter.norm.weight.copy_(target.tensors.load("model.norm.weight") + c.norm_offset)


def _heads_repeated(weight: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return the weights of `num_heads` heads, of which neighbours are equal, or the given ones if they are more."""
    heads = weight.unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(max(num_heads // len(heads), 1), dim=0).flatten(0, 1)
