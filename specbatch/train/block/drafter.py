"""A block drafter that can be trained: the arithmetic and the names of `models/blocks`, as a torch module.

It is the backbone of DFlash (Chen et al. 2026, arXiv:2602.06036), with the Markov head of DSpark (DeepSeek-AI 2026,
github.com/deepseek-ai/DeepSpec) or the head of Domino. `models/blocks/config.py` describes them.

A head has two parts: a *state* of each draft, which depends on the tokens before it in the block, and logits that it
adds. In training all tokens are known, so the states of all drafts are computed at once.

Shape suffixes: N blocks, K positions of a block, J drafts of a block, Q = N * K queries, T context, S = T + Q keys, E
hidden size, F features, H heads, D head dimension, R drafts, X state of a head, V vocabulary of the target, W draft
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbatch.models.blocks.config import BlockConfig, DominoConfig, MarkovConfig
from specbatch.models.config import ModelConfig
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.train.block.attention import Attend
from specbatch.train.checkpoint import vocabulary_maps
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


def _domino_layers(config: DominoConfig, block: BlockConfig) -> tuple[nn.GRU, nn.Sequential]:
    """Return the two parts of Domino's head: a GRU over the tokens of a block, and the logits of its states."""
    hidden = block.decoder.hidden_size
    return nn.GRU(hidden, config.state_size, bias=False, batch_first=True), nn.Sequential(
        nn.Linear(hidden + config.state_size, config.embedding_size, bias=False),
        nn.SiLU(),
        nn.Linear(config.embedding_size, block.draft_vocab_size, bias=False),
    )


class TrainedBlocks(nn.Module):
    """A drafter whose parameters and buffers have the names of a checkpoint. Embedding and LM head are the target's.
    `draft_ids_W`: the target ids of a reduced vocabulary, sorted; None: it is the whole one."""

    d2t: Tensor

    def __init__(self, block: BlockConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__()
        c, head = block.decoder, block.head
        assert head is None or isinstance(head, MarkovConfig | DominoConfig)
        assert block.has_vocab_map == (draft_ids_W is not None)
        self.block = block
        self.fc = nn.Linear(len(block.aux_layers) * block.feature_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = _MarkovHead(head, block) if isinstance(head, MarkovConfig) else None
        if isinstance(head, DominoConfig):
            self.prefix_gru, self.embed_proj = _domino_layers(head, block)
        if draft_ids_W is not None:
            for name, tensor in vocabulary_maps(draft_ids_W, c.vocab_size).items():
                self.register_buffer(name, tensor)

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

    def head_states(self, before_NJ: Tensor, embedding_VE: Tensor) -> Tensor:
        """Compute the states (N, J, X) of the head. `before_NJ`: the token before each draft."""
        if self.markov_head is not None:
            states_NJX: Tensor = self.markov_head.markov_w1(before_NJ)
            return states_NJX
        if isinstance(self.block.head, DominoConfig):
            # Autocast would run a GRU in float16, in which gradients vanish.
            with torch.autocast(before_NJ.device.type, enabled=False):
                embedded = F.embedding(before_NJ, embedding_VE).to(self.fc.weight.dtype)
                states_NJX = self.prefix_gru(embedded)[0]
            return states_NJX
        return self.fc.weight.new_zeros((*before_NJ.shape, 0))

    def logits(self, hidden_RE: Tensor, state_RX: Tensor, lm_head_WE: Tensor) -> Tensor:
        """Compute draft logits (R, W). `state_RX`: the states of the head."""
        logits_RW = F.linear(hidden_RE.to(lm_head_WE.dtype), lm_head_WE)
        if self.markov_head is not None:
            return logits_RW + self.markov_head.markov_w2(state_RX)
        if isinstance(self.block.head, DominoConfig):
            return logits_RW + self.embed_proj(torch.cat((hidden_RE.to(state_RX.dtype), state_RX), dim=-1))
        return logits_RW


def initialise(drafter: TrainedBlocks, target: Checkpoint, seed: int) -> None:
    """Initialise weights from the target's last layers where they have a counterpart, and from N(0, 0.02) elsewhere.

    `fc` passes on the highest feature, so that the first keys and values are nearly those of a layer of the target. An
    MLP that is smaller than the target's gets its first neurons. The logits that the head adds begin at zero.
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
        if isinstance(block.head, DominoConfig):
            # Embeddings are small numbers, and the inputs of gates should be near one.
            scale = target.tensors.load("model.embed_tokens.weight").float().square().mean().sqrt().item()
            drafter.get_parameter("prefix_gru.weight_ih_l0").div_(_DEVIATION * size**0.5 * scale)
            drafter.get_parameter("embed_proj.2.weight").zero_()
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
