"""Draft heads of the EAGLE family: one decoder layer that continues the *target's* features.

EAGLE-1/2 (Li et al. 2024; checkpoint names as in yuhuili/EAGLE-LLaMA3-Instruct-8B): the input of position i is
fc([embedding(token i+1); feature i]), the feature being the target's hidden state after its final norm; the layer
has no input norm, and the target's LM head is applied to its output.

EAGLE-3 (Li et al. 2025; names as in yuhuili/EAGLE3-LLaMA3.1-Instruct-8B): the feature is fc([low; middle; high]) of
three of the target's layers; attention takes [norm(embedding); norm(feature)], twice the hidden size; the head has
its own final norm and LM head, over a reduced draft vocabulary: draft id d means target id d + d2t[d].

Both feed their own output back as the next position's feature. `formats/eagle_files.py` opens heads.

Shape suffixes: T packed tokens, R selected rows, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, DecoderLayer, ForwardPass, PagedModel
from specbatch.models.weight_loader import WeightLoader

EagleKind = Literal["eagle", "eagle3"]


@dataclass(frozen=True)
class EagleTraits:
    """What the tensors of an EAGLE-3 head do not show."""

    aux_layers: tuple[int, ...] | None = None  # as in `EagleConfig`; None: `default_aux_layers`
    norm_before_residual: bool = False


@dataclass(frozen=True)
class EagleConfig:
    """`decoder` describes the head's one layer; `feature_size` is the width of one target feature."""

    kind: EagleKind
    decoder: ModelConfig
    feature_size: int
    draft_vocab_size: int
    has_fc_bias: bool
    has_embedding: bool  # some checkpoints carry a copy of the target's embedding
    has_vocab_map: bool  # d2t and t2d; there even where the vocabulary is not reduced in some checkpoints
    # EAGLE-3: the target's layers, from 0, whose inputs are the low, middle and high feature. The number of layers
    # means the last one's output.
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False  # EAGLE-3: the residual of attention is the feature after its norm
    lacks_lm_head: bool = False  # EAGLE-3: the head's own final norm, then the target's LM head

    @property
    def has_lm_head(self) -> bool:
        """EAGLE-1/2 always use the target's."""
        return self.kind == "eagle3" and not self.lacks_lm_head


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """`EagleConfig.aux_layers` of a head that names none: those of the public code."""
    return 2, num_layers // 2, num_layers - 3


def layer_prefix(kind: EagleKind) -> str:
    """What the names of the layer's tensors start with."""
    return "midlayer." if kind == "eagle3" else "layers.0."


def eagle_config(
    kind: EagleKind,
    config: ModelConfig,
    draft_vocab_size: int,
    shapes: Mapping[str, tuple[int, ...]],
    target: ModelConfig,
    traits: EagleTraits = EagleTraits(),
) -> EagleConfig:
    """Check a head's tensors against its config and the target; raises ModelError naming every difference.

    `config` is the head's parsed config.json, `shapes` the checkpoint's tensors.
    """
    layer = layer_prefix(kind)
    config = replace(
        config,
        # A head has one layer and the traits its tensors show, whatever family its config.json names.
        num_layers=1,
        sliding_windows=(None,),
        qk_norm=False,
        mlp_bias=False,
        qkv_bias=f"{layer}self_attn.q_proj.bias" in shapes,
        output_bias=f"{layer}self_attn.o_proj.bias" in shapes,
    )
    if config.hidden_size != target.hidden_size:
        raise ModelError(
            f"the draft head's hidden size is {config.hidden_size}, the target's {target.hidden_size}",
            hint="a head works only with the target it was trained for",
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"the draft head's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
        )
    head = EagleConfig(
        kind,
        config,
        target.hidden_size,
        draft_vocab_size,
        has_fc_bias="fc.bias" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        has_vocab_map=kind == "eagle3" and (draft_vocab_size != config.vocab_size or "d2t" in shapes),
        aux_layers=_aux_layers(traits.aux_layers, target.num_layers) if kind == "eagle3" else (),
        norm_before_residual=traits.norm_before_residual,
        lacks_lm_head=kind == "eagle3" and "lm_head.weight" not in shapes,
    )
    expected = expected_eagle_tensors(head)
    problems = [f"{n}: missing" for n in expected if n not in shapes]
    problems += [f"{n}: unknown" for n in shapes if n not in expected]
    problems += [
        f"{n}: shape {tuple(shapes[n])}, expected {s}"
        for n, s in expected.items()
        if n in shapes and tuple(shapes[n]) != s
    ]
    if problems:
        raise ModelError(
            f"the draft head is no {kind} checkpoint for this target: "
            + "; ".join(problems[:8])
            + ("; ..." if len(problems) > 8 else ""),
            hint="check speculation.method (eagle or eagle3) and that the head belongs to the target",
        )
    return head


def _aux_layers(given: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if given is None:
        if num_layers < 7:
            raise ModelError(
                f"EAGLE-3 taps three layers of the target, which has only {num_layers}",
                hint="use a target with at least 7 layers, or say which with speculation.aux_layers",
            )
        return default_aux_layers(num_layers)
    if len(given) != 3 or list(given) != sorted(set(given)) or given[-1] > num_layers:
        raise ModelError(
            f"an EAGLE-3 head reads three layers of the target, in rising order and none above {num_layers}, the "
            f"target's number of layers; not {list(given)}",
            hint="set speculation.aux_layers, such as " + str(list(default_aux_layers(max(num_layers, 7)))),
        )
    return given


def expected_eagle_tensors(head: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's checkpoint."""
    c = head.decoder
    eagle3 = head.kind == "eagle3"
    width = c.hidden_size * (2 if eagle3 else 1)
    layer = layer_prefix(head.kind)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, head.feature_size * 3 if eagle3 else c.hidden_size * 2),
        f"{layer}self_attn.q_proj.weight": (q, width),
        f"{layer}self_attn.k_proj.weight": (kv, width),
        f"{layer}self_attn.v_proj.weight": (kv, width),
        f"{layer}self_attn.o_proj.weight": (c.hidden_size, q),
        f"{layer}mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        f"{layer}mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        f"{layer}mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        f"{layer}post_attention_layernorm.weight": (c.hidden_size,),
    }
    if c.qkv_bias:
        shapes |= {f"{layer}self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    if c.output_bias:
        shapes[f"{layer}self_attn.o_proj.bias"] = (c.hidden_size,)
    if head.has_fc_bias:
        shapes["fc.bias"] = (c.hidden_size,)
    if head.has_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, c.hidden_size)
    if eagle3:
        shapes |= {
            "midlayer.hidden_norm.weight": (c.hidden_size,),
            "midlayer.input_layernorm.weight": (c.hidden_size,),
            "norm.weight": (c.hidden_size,),
        }
        if head.has_lm_head:
            shapes["lm_head.weight"] = (head.draft_vocab_size, c.hidden_size)
        if head.has_vocab_map:
            shapes |= {"d2t": (head.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return shapes


def target_ids_of(d2t_W: Tensor, t2d_V: Tensor, vocab_size: int) -> Tensor:
    """(W,) target token of each draft token. Raises ModelError where the checkpoint's two maps are no one-to-one
    map."""
    ids = d2t_W.to(torch.int64) + torch.arange(d2t_W.shape[0])
    if not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size and ids.unique().numel() == ids.numel()):
        raise ModelError("d2t of the draft head does not map draft tokens to distinct target tokens")
    if not torch.equal(t2d_V.bool().nonzero().view(-1), ids.sort().values):
        raise ModelError("d2t and t2d of the draft head do not fit each other")
    return ids


class EagleHead(PagedModel):
    """The head as a model: features and tokens in, draft hidden states and draft logits out."""

    def __init__(
        self, head: EagleConfig, weights: WeightLoader, target: Decoder, backend: AttentionBackend, num_positions: int
    ) -> None:
        c = head.decoder
        super().__init__(c, weights, backend, num_positions)
        self.aux_layers = head.aux_layers
        # Of every token: EAGLE-1/2 read it, and an EAGLE-3 head can read the last layer's output.
        self.reads_hidden = head.kind == "eagle" or target.config.num_layers in head.aux_layers
        self._kind = head.kind
        self._norm_before_residual = head.norm_before_residual
        self._embedding_VE = weights.tensor("embed_tokens.weight") if head.has_embedding else target.embedding_VE
        self._fc = weights.linear("fc", has_bias=head.has_fc_bias)
        self._layer = DecoderLayer(c, 0, weights, layer_prefix(head.kind), input_norm=False)
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

    def features(self, hidden_TE: Tensor, aux_hidden_states: list[Tensor]) -> Tensor:
        """The target's features (T, E), from what its forward pass returned."""
        return self._fc(torch.cat(aux_hidden_states, dim=-1)) if self._kind == "eagle3" else hidden_TE

    def forward(
        self,
        tokens_T: Tensor,
        features_TE: Tensor,
        layout: PagedBatch,
        cache: KVCache,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """Hidden states (T, E), or (R, E) of the selected tokens: the next position's features, and what `logits`
        takes. `features_TE` may be overwritten."""
        step = ForwardPass(layout, self._backend, cache, self._rotary)
        embedded = self._embedding_VE[tokens_T]
        if self._kind == "eagle3":
            normed = self._hidden_norm(features_TE)
            residual = normed if self._norm_before_residual else features_TE
            x = torch.cat((self._input_norm(embedded), normed), dim=-1)
        else:
            residual = x = self._fc(torch.cat((embedded, features_TE), dim=-1))
        return self._layer(x, step, logits_indices, residual)

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Draft logits (R, W) in the model's dtype."""
        return self.lm_head.with_norm(hidden_RE, self._norm) if self._kind == "eagle3" else self.lm_head(hidden_RE)
