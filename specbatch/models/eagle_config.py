"""The description of an EAGLE head: its kind, its traits, and the tensors of its checkpoint.

EAGLE-1/2 (Li et al. 2024; names as in yuhuili/EAGLE-LLaMA3-Instruct-8B) and EAGLE-3 (Li et al. 2025; names as in
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B). `eagle_head.py` computes them. The layer for multi-token prediction ("mtp") that
a hybrid's checkpoint brings along is described in the same way; `hybrids/mtp_head.py` computes it.

Shape suffixes: W draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.checks import tensor_problems
from specbatch.models.config import ModelConfig, layer_tensors

EagleKind = Literal["eagle", "eagle3", "mtp"]


@dataclass(frozen=True)
class EagleConfig:
    """`decoder` describes the head's layers, of which EAGLE-3 can have several. `feature_size`: the width of one target
    feature."""

    kind: EagleKind
    decoder: ModelConfig
    feature_size: int
    draft_vocab_size: int
    has_fc_bias: bool
    has_embedding: bool  # some checkpoints carry a copy of the target's embedding
    has_vocab_map: bool  # d2t and t2d; some checkpoints have them without a reduced vocabulary
    # EAGLE-3: the target's layers, from 0, whose inputs are the low, middle and high feature. The number of layers
    # means the last one's output.
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False  # EAGLE-3: the residual of attention is the feature after its norm
    lacks_lm_head: bool = False  # EAGLE-3: the head's own final norm, then the target's LM head
    # EAGLE-3: norms before fc. `joined`: one over all features together; `each`: one of each feature (EAGLE-3.1).
    input_norms: Literal["none", "joined", "each"] = "none"
    norm_output: bool = False  # EAGLE-3.1: its own output is normed before it is the feature of the next position
    mask_token_id: int | None = None  # P-EAGLE: the token of positions whose token is not drafted yet; None: EAGLE-3

    @property
    def has_lm_head(self) -> bool:
        """EAGLE-1/2 always use the target's."""
        return self.kind == "eagle3" and not self.lacks_lm_head


def mtp_config(target: ModelConfig) -> EagleConfig:
    """Return the description of the layer that predicts further tokens in the checkpoint of a hybrid: a layer of the
    target with attention, between norms and a projection."""
    layer = replace(
        target,
        num_layers=1,
        sliding_windows=(None,),
        num_mtp_layers=0,
        delta=None,
        moe=None if target.moe is None else replace(target.moe, layers=(True,)),
    )
    size, vocab = target.hidden_size, target.vocab_size
    return EagleConfig("mtp", layer, size, vocab, has_fc_bias=False, has_embedding=False, has_vocab_map=False)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """`EagleConfig.aux_layers` of a head that names none: those of the public code."""
    return 2, num_layers // 2, num_layers - 3


def layer_prefix(kind: EagleKind) -> str:
    """Return the prefix of the names of the layer's tensors."""
    return {"eagle3": "midlayer.", "eagle": "layers.0.", "mtp": "model.layers.0."}[kind]


def eagle_config(
    kind: EagleKind,
    config: ModelConfig,
    draft_vocab_size: int,
    shapes: Mapping[str, tuple[int, ...]],
    target: ModelConfig,
    aux_layers: tuple[int, ...] | None = None,
    **traits: Any,
) -> EagleConfig:
    """Check a head's tensors against its config and the target; raise ModelError naming every difference.

    `config` is the head's parsed config.json, `shapes` the checkpoint's tensors. `aux_layers` and `traits`: fields of
    the description of an EAGLE-3 head that its tensors do not show. `aux_layers` None: `default_aux_layers`.
    """
    layer, num_layers = layer_prefix(kind), config.num_layers if kind == "eagle3" else 1
    # A head has the traits that its tensors show, whatever family its config.json names.
    config = replace(
        config.as_head(
            qkv_bias=f"{layer}self_attn.q_proj.bias" in shapes,
            output_bias=f"{layer}self_attn.o_proj.bias" in shapes,
        ),
        num_layers=num_layers,
        sliding_windows=(None,) * num_layers,
        qk_norm=f"{layer}self_attn.q_norm.weight" in shapes,
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
        aux_layers=_aux_layers(aux_layers, target.num_layers) if kind == "eagle3" else (),
        **traits,
        lacks_lm_head=kind == "eagle3" and "lm_head.weight" not in shapes,
    )
    expected = expected_eagle_tensors(head)
    problems, rest = tensor_problems(expected, shapes), {**shapes, "fc.weight": expected.get("fc.weight", ())}
    num_aux, width = len(head.aux_layers), shapes.get("fc.weight", (0, 0))[-1]
    fits_but_for_layers = num_aux and width % head.feature_size == 0 and not tensor_problems(expected, rest)
    if problems and width and fits_but_for_layers:
        raise ModelError(
            f"the draft head does not fit: its fc reads {width // head.feature_size} layers of the target, and "
            f"{num_aux} are named: {list(head.aux_layers)}",
            hint="set speculation.aux_layers to the layers that the head was trained with",
        )
    if problems:
        raise ModelError(
            f"the draft head is no {kind} checkpoint for this target: {problems}",
            hint="check speculation.method (eagle or eagle3) and that the head belongs to the target",
        )
    return head


def _aux_layers(given: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if given is None:
        if num_layers < 7:
            raise ModelError(
                f"EAGLE-3 reads three layers of the target, which has only {num_layers}",
                hint="use a target with at least 7 layers, or set speculation.aux_layers",
            )
        return default_aux_layers(num_layers)
    if not given or list(given) != sorted(set(given)) or given[-1] > num_layers:
        raise ModelError(
            f"an EAGLE-3 head reads layers of the target in rising order, mostly three, and none above {num_layers}, "
            f"the target's number of layers; not {list(given)}",
            hint="set speculation.aux_layers, such as " + str(list(default_aux_layers(max(num_layers, 7)))),
        )
    return given


def expected_eagle_tensors(head: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's checkpoint."""
    c = head.decoder
    if head.kind == "mtp":
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        own: dict[str, tuple[int, ...]] = {f"mtp.{name}.weight": (c.hidden_size,) for name in norms}
        own["mtp.fc.weight"] = (c.hidden_size, 2 * c.hidden_size)
        return own | layer_tensors(c, layer_prefix("mtp"), has_experts=c.moe is not None)
    prefix = layer_prefix(head.kind)
    if head.kind == "eagle":
        shapes = {"fc.weight": (c.hidden_size, 2 * c.hidden_size)} | layer_tensors(c, prefix)
        del shapes[f"{prefix}input_layernorm.weight"]
    else:
        width = len(head.aux_layers or (0, 0, 0)) * head.feature_size
        shapes = {"fc.weight": (c.hidden_size, width)} | layer_tensors(c, prefix, 2 * c.hidden_size)
        shapes |= {f"{prefix}hidden_norm.weight": (c.hidden_size,), "norm.weight": (c.hidden_size,)}
        for layer in range(1, c.num_layers):
            shapes |= layer_tensors(c, f"layers.{layer}.")
        if head.input_norms == "joined":
            shapes["input_norm.weight"] = (width,)
        if head.input_norms == "each":
            shapes |= {f"fc_norm.{i}.weight": (head.feature_size,) for i in range(len(head.aux_layers))}
        if head.mask_token_id is not None:
            shapes["mask_hidden"] = (width,)
    if head.has_fc_bias:
        shapes["fc.bias"] = (c.hidden_size,)
    if head.has_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, c.hidden_size)
    if head.has_lm_head:
        shapes["lm_head.weight"] = (head.draft_vocab_size, c.hidden_size)
    if head.has_vocab_map:
        shapes |= {"d2t": (head.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return shapes


def target_ids_of(d2t_W: Tensor, t2d_V: Tensor, vocab_size: int) -> Tensor:
    """(W,) target token of each draft token. Raises ModelError if the two maps of the checkpoint are not one-to-one."""
    ids = d2t_W.to(torch.int64) + torch.arange(d2t_W.shape[0])
    if not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size and ids.unique().numel() == ids.numel()):
        raise ModelError("d2t of the draft head does not map draft tokens to distinct target tokens")
    if not torch.equal(t2d_V.bool().nonzero().view(-1), ids.sort().values):
        raise ModelError("d2t and t2d of the draft head do not fit each other")
    return ids
