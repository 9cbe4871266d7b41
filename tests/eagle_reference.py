"""A second implementation of EAGLE heads in a few lines of plain torch, with full attention, no cache and no batch; and
checkpoints to load.

It follows the public inference code (the authors' `cnets1.py` for EAGLE-1/2 and `cnets.py` with the tapped layers of
`modeling_llama_kv.py` for EAGLE-3, the two Llama EAGLE models of SGLang, and vLLM's for `norm_before_residual`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specbatch.draft.shape import DraftShape
from specbatch.models.decoder import Decoder
from specbatch.models.eagle_config import EagleKind, default_aux_layers
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from tests.oracle.spans import Span, batch_of

E, VOCAB, LAYERS, HEADS, KV_HEADS, DIM, EPS, THETA = 32, 61, 8, 4, 2, 8, 1e-5, 500.0
MLP = 40


def head_tensors(
    kind: EagleKind,
    draft_vocab: int | None = None,
    vocab_map: bool = False,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    embedding: bool = False,
    vocab: int = VOCAB,
    num_layers: int = 1,
    qk_norm: bool = False,
    input_norms: str = "none",
    num_features: int = 3,
) -> dict[str, Tensor]:
    """Make a random checkpoint with the public names. `input_norms`: see `EagleConfig`."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    eagle3 = kind == "eagle3"
    prefix, width = ("midlayer.", 2 * E) if eagle3 else ("layers.0.", E)
    tensors = {"fc.weight": rand(E, num_features * E if eagle3 else 2 * E)}
    for layer in range(num_layers):
        if layer:
            prefix, width = f"layers.{layer}.", E
            tensors[f"{prefix}input_layernorm.weight"] = 1 + rand(E)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = rand(rows, width)
            if qkv_bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = rand(rows)
            if qk_norm and name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + rand(DIM)
        tensors[f"{prefix}self_attn.o_proj.weight"] = rand(E, HEADS * DIM)
        for name, shape in (("gate", (MLP, E)), ("up", (MLP, E)), ("down", (E, MLP))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = rand(*shape)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + rand(E)
    if input_norms == "joined":
        tensors["input_norm.weight"] = 1 + rand(num_features * E)
    if input_norms == "each":
        tensors |= {f"fc_norm.{i}.weight": 1 + rand(E) for i in range(num_features)}
    if fc_bias:
        tensors["fc.bias"] = rand(E)
    if embedding:
        tensors["embed_tokens.weight"] = rand(vocab, E)
    if eagle3:
        tensors["midlayer.hidden_norm.weight"] = 1 + rand(E)
        tensors["midlayer.input_layernorm.weight"] = 1 + rand(E)
        tensors["norm.weight"] = 1 + rand(E)
        tensors["lm_head.weight"] = rand(draft_vocab or vocab, E) * 3
        if draft_vocab and (draft_vocab != vocab or vocab_map):
            ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
            tensors["d2t"] = ids - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_head(path: Path, tensors: dict[str, Tensor], draft_vocab: int | None = None, **changes: Any) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "hidden_size": E,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 32,  # shorter than the target's, as in published heads
    } | changes
    if draft_vocab:
        config["draft_vocab_size"] = draft_vocab
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def random_target(path: Path, **changes: Any) -> Checkpoint:
    """Write a random Llama to `path`."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": E,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
    }
    LlamaForCausalLM(LlamaConfig(**sizes | changes)).save_pretrained(path)
    return open_checkpoint(path)


class Reference:
    """The head in a few lines of plain torch, float64."""

    def __init__(
        self,
        kind: EagleKind,
        tensors: dict[str, Tensor],
        target: Checkpoint,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        self.eagle3 = kind == "eagle3"
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.further = sorted({name.split(".")[1] for name in tensors if name.startswith("layers.")} - {"0"}, key=int)
        self.w = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self.prefix = "midlayer." if self.eagle3 else "layers.0."
        self.embedding = self.w.get("embed_tokens.weight", target.tensors.load("model.embed_tokens.weight").double())
        self.head = self.w["lm_head.weight"] if self.eagle3 else target.tensors.load("lm_head.weight").double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def project(self, aux_hidden_states: list[Tensor]) -> Tensor:
        """Return the features of hidden states of an EAGLE-3 head's layers."""
        if "fc_norm.0.weight" in self.w:
            aux_hidden_states = [self.norm(one, f"fc_norm.{i}.weight") for i, one in enumerate(aux_hidden_states)]
        joined = torch.cat(aux_hidden_states, -1)
        return self.linear(self.norm(joined, "input_norm.weight") if "input_norm.weight" in self.w else joined, "fc")

    def attention(self, x: Tensor, layer: str) -> Tensor:
        prefix, length = layer + "self_attn.", len(x)
        angles = torch.outer(torch.arange(length).double(), THETA ** -(torch.arange(0, DIM, 2).double() / DIM))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def heads(name: str, rotate: bool) -> Tensor:
            y = self.linear(x, prefix + name).view(length, -1, DIM)
            if prefix + name.replace("proj", "norm.weight") in self.w:
                y = self.norm(y, prefix + name.replace("proj", "norm.weight"))
            if rotate:  # pairs (i, i + DIM / 2) as complex numbers
                z = torch.complex(y[..., : DIM // 2], y[..., DIM // 2 :]) * turn
                y = torch.cat((z.real, z.imag), -1)
            return y.repeat_interleave(HEADS * DIM // (y.shape[1] * DIM), 1).transpose(0, 1)

        q, k, v = heads("q_proj", True), heads("k_proj", True), heads("v_proj", False)
        scores = q @ k.transpose(1, 2) / DIM**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1), prefix + "o_proj")

    def forward(self, tokens: list[int], features: Tensor) -> Tensor:
        """Compute hidden states. Row i sees the pairs (tokens[j], features[j]) for j <= i."""
        embedded = self.embedding[torch.tensor(tokens)]
        if self.eagle3:
            p = self.prefix
            normed = self.norm(features, p + "hidden_norm.weight")
            residual = normed if self.norm_before_residual else features
            x = torch.cat((self.norm(embedded, p + "input_layernorm.weight"), normed), -1)
        else:
            residual = x = self.linear(torch.cat((embedded, features), -1), "fc")
        h = self.layer(x, residual, self.prefix)
        for number in self.further:
            prefix = f"layers.{number}."
            h = self.layer(self.norm(h, prefix + "input_layernorm.weight"), h, prefix)
        return self.norm(h, "norm.weight") if self.norm_output else h

    def layer(self, x: Tensor, residual: Tensor, prefix: str) -> Tensor:
        h = residual + self.attention(x, prefix)
        y = self.norm(h, prefix + "post_attention_layernorm.weight")
        m = prefix + "mlp."
        return h + self.linear(F.silu(self.linear(y, m + "gate_proj")) * self.linear(y, m + "up_proj"), m + "down_proj")

    def log_probs(self, hidden: Tensor) -> Tensor:
        is_normed = self.norm_output or not self.eagle3
        return F.log_softmax(F.linear(hidden if is_normed else self.norm(hidden, "norm.weight"), self.head), -1)

    def to_target(self, draft_id: int) -> int:
        return draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id

    def children(self, tokens: list[int], features: Tensor, k: int) -> tuple[list[tuple[int, float]], Tensor]:
        """Return the k most likely tokens after a path with their log-probabilities, and the feature from which they
        continue."""
        hidden = self.forward(tokens, features)[-1]
        values, ids = self.log_probs(hidden).topk(k)
        return [(self.to_target(i), v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)], hidden

    def tree(self, tokens: list[int], features: Tensor, shape: DraftShape) -> dict[tuple[int, ...], float]:
        """Return EAGLE-2's choice: the paths (tokens after the root) of the nodes to verify, with their scores."""
        candidates: dict[tuple[int, ...], float] = {}
        beam: dict[tuple[int, ...], tuple[float, Tensor]] = {(): (0.0, features)}
        for _ in range(shape.num_steps):
            found: dict[tuple[int, ...], tuple[float, Tensor]] = {}
            for path, (score, fed) in beam.items():
                children, hidden = self.children([*tokens, *path], fed, shape.topk)
                for token, value in children:
                    found[*path, token] = score + value, torch.cat((fed, hidden[None]))
            candidates |= {path: score for path, (score, _) in found.items()}
            best = sorted(found, key=lambda path: -found[path][0])[: shape.topk]
            beam = {path: found[path] for path in best}
        kept = sorted(candidates, key=lambda path: -candidates[path])[: shape.num_draft_tokens - 1]
        return {path: candidates[path] for path in kept}


def target_features(
    decoder: Decoder, reference: Reference, tokens: list[int], layers: tuple[int, ...] = default_aux_layers(LAYERS)
) -> Tensor:
    """Compute the target's features that the head gets for each token, in a plain forward pass over all tokens.
    `decoder`: the decoder of the oracle engine, in float64."""
    layout = batch_of([Span([0], 0, len(tokens))], len(tokens), decoder.device)
    cache = decoder.new_cache(len(tokens), torch.float64)
    hidden, aux_hidden_states = decoder.forward(torch.tensor(tokens), layout, cache, layers)
    return reference.project(aux_hidden_states) if reference.eagle3 else hidden
