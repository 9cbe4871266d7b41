"""A second implementation of block drafters in plain torch, with full attention over all tokens, no cache and no batch;
and checkpoints to load.

It follows the public code: z-lab's `dflash/model.py` (DFlash, DFlash2), DeepSpec's `modeling/dspark` (DSpark),
SpecForge's `modeling/draft/domino.py` (Domino), and speculators' `models/xpress` (XPress).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specbatch.models.blocks.config import (
    BlockConfig,
    DominoConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
)
from specbatch.models.blocks.config import expected_block_tensors as block_tensors

EPS, THETA = 1e-5, 500.0


def random_tensors(block: BlockConfig, seed: int = 5) -> dict[str, Tensor]:
    """Make a random checkpoint with the public names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in block_tensors(block).items():
        noise = torch.randn(shape, generator=generator) * 0.25
        tensors[name] = 1 + noise if name.endswith("norm.weight") else noise
    if block.has_vocab_map:
        vocab, width = block.decoder.vocab_size, block.draft_vocab_size
        ids = torch.randperm(vocab, generator=generator)[:width].sort().values
        tensors["d2t"] = ids - torch.arange(width)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_drafter(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


class BlockReference:
    """The drafter in plain torch, in the dtype of its tensors. `embedding` and `lm_head`: those of the target."""

    def __init__(self, block: BlockConfig, tensors: dict[str, Tensor], embedding: Tensor, lm_head: Tensor) -> None:
        self.block, self.w = block, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.lm_head = tensors.get("lm_head.weight", lm_head)

    def logits(self, tokens: list[int], features: Tensor, before: list[int]) -> Tensor:
        """Return the logits of the drafts after `tokens`, the last of which is the root. `features`: the target's
        hidden states of all tokens but the root, of its layers joined. `before`: the token before each draft."""
        block = self.block
        hidden, context = self._hidden(tokens, features)
        logits = hidden[block.first :] @ self.lm_head.T * block.logits_scale
        if block.logits_soft_cap is not None:
            logits = torch.tanh(logits / block.logits_soft_cap) * block.logits_soft_cap
        if isinstance(block.head, LatticeConfig):
            return self._correlated(block.head, hidden[1:], logits, context[-1], before)
        return self._with_head(tokens, hidden, logits, before)

    def confidences(self, tokens: list[int], features: Tensor, before: list[int]) -> Tensor:
        """Return the estimated probability of each draft. The arguments are those of `logits`."""
        inputs = self._hidden(tokens, features)[0][self.block.first :]
        weight, bias = (self.w[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        if weight.shape[1] > inputs.shape[1]:
            inputs = torch.cat((inputs, self.w["markov_head.markov_w1.weight"][torch.tensor(before)]), dim=-1)
        return F.linear(inputs, weight, bias)[:, 0].sigmoid()

    def _hidden(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the block, and the features of past positions."""
        masks = [self.block.mask_token_id] * (self.block.block_size - 1)
        context = self._norm(features @ self.w["fc.weight"].T, "hidden_norm")
        x = self._embedded(torch.tensor([tokens[-1], *masks]))
        for layer in range(self.block.decoder.num_layers):
            x = self._layer(layer, x, context)
        return self._norm(x, "norm"), context

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        if "mask_embedding" in self.w:
            x = torch.where((tokens == self.block.mask_token_id)[:, None], self.w["mask_embedding"], x)
        return x * self.block.embedding_scale

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def _layer(self, layer: int, x: Tensor, context: Tensor) -> Tensor:
        p = f"layers.{layer}."
        y, kernel = self._before(f"{p}attention_conv", self._norm(x, f"{p}input_layernorm"))
        y = self._attention(layer, y, context)
        x = x + self._after(f"{p}attention_conv", y, kernel)
        y, kernel = self._before(f"{p}mlp_conv", self._norm(x, f"{p}post_attention_layernorm"))
        gate, up = (y @ self.w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        y = (F.silu(gate) * up) @ self.w[f"{p}mlp.down_proj.weight"].T
        return x + self._after(f"{p}mlp_conv", y, kernel)

    def _attention(self, layer: int, x: Tensor, context: Tensor) -> Tensor:
        c, p = self.block.decoder, f"layers.{layer}.self_attn."
        past, size = len(context), len(x)
        positions = torch.arange(past + size)
        angles = torch.outer(positions.double(), THETA ** -(torch.arange(0, c.head_dim, 2).double() / c.head_dim))
        cos, sin = (torch.cat((part, part), -1).to(x.dtype)[:, None] for part in (angles.cos(), angles.sin()))

        def heads(name: str, y: Tensor) -> Tensor:
            y = y @ self.w[f"{p}{name}_proj.weight"].T
            if f"{p}{name}_proj.bias" in self.w:
                y = y + self.w[f"{p}{name}_proj.bias"]
            return y.view(len(y), -1, c.head_dim)

        def rotated(y: Tensor, first: int) -> Tensor:
            low, high = y.chunk(2, -1)
            return y * cos[first : first + len(y)] + torch.cat((-high, low), -1) * sin[first : first + len(y)]

        q = rotated(self._norm(heads("q", x), f"{p}q_norm"), past)
        k = rotated(self._norm(torch.cat((heads("k", context), heads("k", x))), f"{p}k_norm"), 0)
        v = torch.cat((heads("v", context), heads("v", x)))
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, 1).transpose(0, 1) for y in (k, v))
        own = positions[past:, None]
        seen = torch.ones(size, past + size, dtype=torch.bool)
        if self.block.is_causal(layer):
            seen &= positions <= own
        if c.sliding_windows[layer] is not None:
            seen &= own - positions < c.sliding_windows[layer]
        scores = (q.transpose(0, 1) @ k.transpose(1, 2) / c.head_dim**0.5).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(size, -1) @ self.w[f"{p}o_proj.weight"].T
        return out + self.w[f"{p}o_proj.bias"] if f"{p}o_proj.bias" in self.w else out

    def _before(self, name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.block.convolution is None:
            return x, None
        taps = self.block.convolution.num_taps
        kernels = (x @ self.w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)
        return self._convolved(x, kernels[:, 0], self.w[f"{name}.base_kernel"][0]), kernels[:, 1]

    def _after(self, name: str, y: Tensor, kernel: Tensor | None) -> Tensor:
        return y if kernel is None else self._convolved(y, kernel, self.w[f"{name}.base_kernel"][1])

    def _convolved(self, x: Tensor, kernel: Tensor, base: Tensor) -> Tensor:
        assert self.block.convolution is not None
        out = torch.zeros_like(x)
        for position in range(len(x)):
            for tap in range(min(len(base), position + 1)):
                factor = base[tap] + kernel[position, tap].repeat_interleave(self.block.convolution.group_size)
                out[position] += factor * x[position - tap]
        return out

    def _with_head(self, tokens: list[int], hidden: Tensor, logits: Tensor, before: list[int]) -> Tensor:
        head, first = self.block.head, self.block.first
        if isinstance(head, RefinerConfig):
            return self._refined(head, tokens, hidden, logits)
        rows: list[Tensor] = []
        state: Tensor | None = None
        for draft, row in enumerate(logits):
            h = hidden[first + draft]
            if isinstance(head, MarkovConfig):
                latent, state = self._markov(head, h, before[draft], state)
                row = row + latent @ self.w["markov_head.markov_w2.weight"].T
            elif isinstance(head, SelectorConfig):
                values, ids = row.topk(head.top_k)
                projected = h @ self.w["candidate_selector.hidden_projection.weight"].T
                context = self.w["candidate_selector.predecessor_codebook"][before[draft]] * projected
                scores = values + self.w["candidate_selector.successor_codebook"][ids] @ context
                row = torch.full_like(row, -torch.inf).index_copy_(0, ids, scores)
            elif isinstance(head, DominoConfig):
                gru = torch.nn.GRU(len(h), head.state_size, bias=False, dtype=h.dtype)
                gru.weight_ih_l0.data, gru.weight_hh_l0.data = (
                    self.w[f"prefix_gru.weight_{x}h_l0"] for x in ("i", "h")
                )
                embedded = self._embedded(torch.tensor(before[: draft + 1]))
                state = gru(embedded)[0][-1].detach()  # over all tokens of the block so far
                if first + draft >= head.first:
                    inner = torch.cat((h, state)) @ self.w["embed_proj.0.weight"].T
                    row = row + F.silu(inner) @ self.w["embed_proj.2.weight"].T
            rows.append(row)
        return torch.stack(rows)

    def _markov(self, head: MarkovConfig, h: Tensor, before: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        name = "markov_head."
        latent = self.w[f"{name}markov_w1.weight"][before]
        if head.kind == "gated":
            gate = torch.cat((h, latent)) @ self.w[f"{name}gate_proj.weight"].T + self.w[f"{name}gate_proj.bias"]
            return torch.sigmoid(gate) * latent, None
        if head.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            joint = torch.cat((state, latent, h)) @ self.w[f"{name}joint_proj.weight"].T
            gate, new, out = (joint + self.w[f"{name}joint_proj.bias"]).chunk(3)
            gate = torch.sigmoid(gate)
            return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(new)
        return latent, None

    def _refined(self, head: RefinerConfig, tokens: list[int], hidden: Tensor, logits: Tensor) -> Tensor:
        w = {name.removeprefix("refiner_head.").removesuffix(".weight"): value for name, value in self.w.items()}
        mean = hidden.mean(0).expand_as(hidden)
        fixed = torch.cat((hidden @ w["down_h"].T, mean @ w["down_g"].T), -1)
        first, refined = self.block.first, logits
        for _ in range(head.num_passes):
            chosen = [self._to_target(i) for i in refined.argmax(-1).tolist()]
            before = [*tokens[len(tokens) - 1 - first :], *chosen][: len(hidden)]
            x = torch.cat((fixed, w["token_embed"][torch.tensor(before)]), -1) @ w["in_proj"].T
            mixed = x.clone()
            for k in range(len(x)):
                for j in range(k + 1):
                    mixed[k] += w["mix_l"][:, k, j] * x[j]
            mixed = mixed + (F.silu(mixed @ w["mlp_gate"].T) * (mixed @ w["mlp_up"].T)) @ w["mlp_down"].T
            refined = logits + mixed[first:] @ w["readout"].T
        return refined

    def _correlated(
        self, head: LatticeConfig, hidden: Tensor, logits: Tensor, root: Tensor, before: list[int]
    ) -> Tensor:
        w = {name.removeprefix("lilicorr."): value for name, value in self.w.items() if name.startswith("lilicorr.")}

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return self._norm(x, f"lilicorr.{name}")

        values, ids = logits.log_softmax(-1).topk(head.top_k)  # positions, candidates
        rank = torch.arange(head.top_k).to(values.dtype).expand_as(values)
        parts = (
            values,
            values.exp(),
            values - values.amax(-1, keepdim=True),
            rank / (head.top_k - 1),
            (rank == 0).float(),
        )
        inputs = F.layer_norm(torch.stack(parts, -1), (5,), w["feature_mlp.0.weight"], w["feature_mlp.0.bias"])
        x = linear(F.silu(linear(inputs, "feature_mlp.1")), "feature_mlp.3")
        embedded = self._embedded(ids)
        x = x + (linear(embedded, "token_proj") if "token_proj.weight" in w else embedded)
        x = x + linear(hidden, "pass_hidden_proj")[:, None] + w["slot_embedding"][:, None] + w["rank_embedding"]
        x, position = x.flatten(0, 1), torch.arange(len(ids)).repeat_interleave(head.top_k)
        relative = position[:, None] - position
        bias = w["relative_slot_bias"][:, relative + head.block_size - 1]
        bias = bias + (relative == 0) * w["same_slot_bias"][:, None, None]
        for layer in range(head.num_layers):
            p = f"layers.{layer}."
            qkv = norm(x, f"{p}attn_norm") @ w[f"{p}attn.in_proj_weight"].T + w[f"{p}attn.in_proj_bias"]
            q, k, v = (part.view(len(x), head.num_heads, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
            x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{p}attn.out_proj")
            x = x + linear(F.silu(linear(norm(x, f"{p}mlp_norm"), f"{p}mlp.0")), f"{p}mlp.2")
        x = norm(x, "output_norm").view(*ids.shape, -1)
        root = norm(linear(root, "context_proj"), "anchor_norm")
        factors = F.silu(linear(torch.cat((x, root.expand_as(x), x * root), -1), "factor_input_proj"))
        outgoing, incoming = (F.normalize(linear(factors, name), dim=-1) for name in ("out_head", "in_head"))
        first = F.normalize(linear(root, "anchor_out_head"), dim=-1)
        rows = []
        for draft in range(len(ids)):
            source = first if draft == 0 else outgoing[draft - 1, ids[draft - 1].tolist().index(before[draft])]
            row = torch.full_like(logits[draft], -torch.inf)
            rows.append(row.index_copy_(0, ids[draft], incoming[draft] @ source * head.logit_scale))
        return torch.stack(rows)

    def _to_target(self, draft_id: int) -> int:
        return draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id
