"""A decoder whose weights are divided among ranks (tensor parallelism; Shoeybi et al. 2019, "Megatron-LM").

A rank holds some heads of each attention, a part of each MLP's inner features and a part of the vocabulary. The layers
that read what is divided (`o_proj`, `down_proj`) give a part of a sum, which the ranks add up: twice in a layer. Of a
mixture of experts, each rank has a part of the inner features of every expert and all of the router; or, with expert
parallelism, some of the experts as a whole. The ranks add the outputs of the mixture. The embedding of a token is on
one rank, and each rank's logits are those of its part of the vocabulary. Where only the most likely token is asked for,
ranks exchange their best one; else all logits.

Of a draft head each rank has the whole vocabulary: a sum, or logits that are gathered, would take as long as they save.
Its `fc` layer reads hidden states that each rank has whole, and is divided by its inputs.

Ranks with requests of their own divide the experts only (`dispatch.py`).

Shape suffixes: T packed tokens, I input features, O output features, V vocabulary (of a rank: a part of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.kernels.quantised import GROUP
from specbatch.kernels.torch.sampling import finite_peak, is_possible
from specbatch.models.config import PROJECTIONS, ModelConfig, MoeConfig
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import Linear, Residual
from specbatch.parallel.group import Group
from specbatch.parallel.shares import Division, HeadShare, even_shares, head_shares

# On a GPU, logits of fewer bytes are gathered whole. With 8 MiB both ways take 55 us on two H200s
# (docs/bench/2026-11-26-h200x2-best-tokens.json).
_GATHERED_BYTES = 8 << 20

MlpKind = Literal["mlp", "expert", "shared"]  # an MLP, one of many experts, the expert that all tokens take


@dataclass(frozen=True)
class ModelShard:
    """The part of a decoder that one rank holds. `config`: the model's, with the rank's number of heads and inner
    features; the vocabulary's size is that of the model. `inner`: the inner features of each kind of MLP. `vocab` None:
    each rank has all of it. `experts`: the numbers of the experts that the rank has as a whole; None: it has a part of
    every expert."""

    group: Group
    config: ModelConfig
    heads: HeadShare
    inner: Mapping[MlpKind, range]
    vocab: VocabShare | None
    division: Division = "tensors"
    experts: range | None = None

    @staticmethod
    def of(
        config: ModelConfig, group: Group, division: Division = "tensors", *, divides_vocab: bool = True
    ) -> ModelShard:
        """Compute this rank's part. `config`: the configuration of the whole model. Raise ValueError if a rank would
        have no head, or nothing of an expert."""
        rank, size = group.rank, group.size
        parts, local = even_shares(config.vocab_size, size), local_config(config, rank, size, division)
        vocab = VocabShare(parts[rank], len(parts[0])) if divides_vocab and division != "requests" else None
        return ModelShard(
            group,
            local,
            _heads(config, rank, size, division),
            {kind: _inner_share(kind, config, rank, size, division) for kind in _inner_sizes(config)},
            vocab,
            division,
            None if division == "tensors" or config.moe is None else even_shares(config.moe.num_experts, size)[rank],
        )

    @staticmethod
    def of_head(config: ModelConfig, group: Group | None) -> ModelShard | None:
        """Compute this rank's part of a draft head. None: each rank has all of it, because there is one process, or
        there are more ranks than it has heads for."""
        if group is None or part_of_head(config, group.rank, group.size) is None:
            return None
        return ModelShard.of(config, group, divides_vocab=False)


class VocabShare(NamedTuple):
    """`width`: logits that each rank computes, of the largest part."""

    tokens: range
    width: int


def local_config(config: ModelConfig, rank: int, size: int, division: Division = "tensors") -> ModelConfig:
    """Return the sizes of a rank's part. Raise ValueError if it would have no head, or nothing of an expert. If a rank
    has whole experts, all of them are counted with a part of their inner features, which is as much."""
    heads = _heads(config, rank, size, division)
    inner = {kind: len(_inner_share(kind, config, rank, size, division)) for kind in _inner_sizes(config)}
    moe = config.moe
    if moe is not None:
        divided = {"tensors": (moe.expert_size, moe.shared_size), "experts": (moe.shared_size,), "requests": ()}
        smallest = min((part for part in divided[division] if part), default=size)
        if smallest < size:
            raise ValueError(f"an expert has {smallest} inner features")
        if division != "tensors":
            if moe.num_experts < size:
                raise ValueError(f"a layer has {moe.num_experts} experts")
            held = len(even_shares(moe.num_experts, size)[rank])
            inner["expert"] = -(-held * moe.expert_size // moe.num_experts)
        moe = replace(moe, expert_size=inner["expert"], shared_size=inner["shared"])
    return replace(
        config, num_heads=len(heads.query), num_kv_heads=len(heads.kv), intermediate_size=inner["mlp"], moe=moe
    )


def _heads(config: ModelConfig, rank: int, size: int, division: Division) -> HeadShare:
    if division == "requests":
        return HeadShare(range(config.num_heads), range(config.num_kv_heads))
    return head_shares(config.num_heads, config.num_kv_heads, size)[rank]


def _inner_share(kind: MlpKind, config: ModelConfig, rank: int, size: int, division: Division) -> range:
    """Return the inner features of a kind of MLP that a rank has."""
    whole = range(_inner_sizes(config)[kind])
    is_whole = division == "requests" or (division == "experts" and kind == "expert")
    return whole if is_whole else even_shares(len(whole), size)[rank]


def part_of_head(config: ModelConfig, rank: int, size: int) -> ModelConfig | None:
    """Return the sizes of a rank's part of a draft head. None: each rank has all of it, see `ModelShard.of_head`."""
    try:
        return local_config(config, rank, size)
    except ValueError:
        return None


def part_of(name: str, tensor: Tensor, shard: ModelShard) -> Tensor:
    """The rank's part of a checkpoint's tensor, as a copy: the whole one can be freed. A bias that is added to a sum
    over ranks is the first rank's; it is zero on the others."""
    layer, _, kind = name.rpartition(".")
    layer = layer or name
    if kind == "sinks" and shard.division != "requests":
        return tensor[shard.heads.query.start : shard.heads.query.stop].clone()
    if (inputs := _inputs_of_part(layer, shard, tensor.shape[-1])) is not None:
        if kind == "bias":
            return tensor.clone() if shard.group.rank == 0 else torch.zeros_like(tensor)
        return tensor[:, inputs.start : inputs.stop].clone()
    outputs = _outputs_of_part(layer, shard)
    return tensor if outputs is None else tensor[outputs.start : outputs.stop].clone()


def scale_part_of(layer: str, scale_OG: Tensor, shard: ModelShard, group: int = GROUP) -> Tensor:
    """The rank's part of a weight's scales: (O, 1), or (O, G) for each `group` inputs, which `check_group_borders` has
    found to be on one rank each."""
    inputs = _inputs_of_part(layer, shard, scale_OG.shape[1])
    if inputs is not None and scale_OG.shape[1] > 1:
        return scale_OG[:, inputs.start // group : -(-inputs.stop // group)].clone()
    outputs = _outputs_of_part(layer, shard)
    return scale_OG if outputs is None else scale_OG[outputs.start : outputs.stop].clone()


def check_group_borders(
    layers: Sequence[str], config: ModelConfig, size: int, group: int = GROUP, division: Division = "tensors"
) -> None:
    """Layers with a scale for each `group` inputs. Raises ValueError if a group would be on two ranks."""
    if division == "requests":
        return
    heads = [part.query.stop * config.head_dim for part in head_shares(config.num_heads, config.num_kv_heads, size)]
    for layer in layers:
        kind = _projection_of(layer, config.moe)
        if division == "experts" and _mlp_kind(layer, config.moe) == "expert":
            continue
        if kind == "o_proj":
            ends = heads
        elif kind == "down_proj":
            ends = [part.stop for part in even_shares(_inner_sizes(config)[_mlp_kind(layer, config.moe)], size)]
        else:
            continue
        if (cut := next((end for end in ends[:-1] if end % group), None)) is not None:
            raise ValueError(f"{kind} has {ends[-1]} inputs, and {cut} of them is no multiple of {group}")


def _projection_of(layer: str, moe: MoeConfig | None) -> str:
    """Return the last part of a layer's name, and for the projections of experts, which have other names in some
    families, that of an MLP's."""
    kind = layer.rpartition(".")[2]
    if moe is not None and _mlp_kind(layer, moe) == "expert":
        return dict(zip(moe.projections, PROJECTIONS, strict=True)).get(kind, kind)
    return kind


def _mlp_kind(layer: str, moe: MoeConfig | None) -> MlpKind:
    """Return the kind of MLP that a layer belongs to, by its name."""
    if moe is None or f".{moe.block}." not in f".{layer}":
        return "mlp"
    if f"{moe.block}.experts." in layer:
        return "expert"
    return "shared" if f"{moe.block}.{moe.shared_name}." in layer else "mlp"


def _inner_sizes(config: ModelConfig) -> dict[MlpKind, int]:
    """Return the number of inner features by kind of MLP."""
    moe = config.moe
    expert, shared = (0, 0) if moe is None else (moe.expert_size, moe.shared_size)
    return {"mlp": config.intermediate_size, "expert": expert, "shared": shared}


def _inputs_of_part(layer: str, shard: ModelShard, num_inputs: int) -> range | None:
    """Return this rank's range of input features of a layer; None: its inputs are not divided. `layer`: its name.
    `num_inputs`: the input features of the whole layer."""
    kind = _projection_of(layer, shard.config.moe)
    if _is_whole(layer, shard):
        return None
    if kind == "fc":
        return even_shares(num_inputs, shard.group.size)[shard.group.rank]
    if kind == "down_proj":
        return shard.inner[_mlp_kind(layer, shard.config.moe)]
    return _features(shard.heads.query, shard.config.head_dim) if kind == "o_proj" else None


def _outputs_of_part(layer: str, shard: ModelShard) -> range | None:
    """Return this rank's range of output features of a layer; None: its outputs are not divided."""
    head_dim, inner = shard.config.head_dim, shard.inner[_mlp_kind(layer, shard.config.moe)]
    if _is_whole(layer, shard):
        return None
    return {
        "q_proj": _features(shard.heads.query, head_dim),
        "k_proj": _features(shard.heads.kv, head_dim),
        "v_proj": _features(shard.heads.kv, head_dim),
        "gate_proj": inner,
        "up_proj": inner,
        **({} if shard.vocab is None else dict.fromkeys(("embed_tokens", "lm_head"), shard.vocab.tokens)),
    }.get(_projection_of(layer, shard.config.moe))


def _is_whole(layer: str, shard: ModelShard) -> bool:
    """Return whether a rank that has the layer has all of it."""
    is_expert = _mlp_kind(layer, shard.config.moe) == "expert"
    return shard.division == "requests" or (shard.division == "experts" and is_expert)


def _features(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def start_sum(group: Group, part_TO: Tensor, residual_TO: Tensor, next_norm: RMSNorm | None) -> Callable[[], Residual]:
    """Start the sum of all ranks' parts, with the residual, and with the norm of the layer that reads it."""
    if next_norm is None:
        total = group.start_sum(part_TO, residual_TO)
        return lambda: Residual(total())
    both = group.start_normed_sum(part_TO, residual_TO, next_norm)
    return lambda: Residual(*both())


class SummedLinear(Linear):
    """A layer whose input features are divided. A residual is added to the sum. `has_whole_input`: the rank is given
    all features, and takes its own."""

    def __init__(self, part: Linear, group: Group, *, has_whole_input: bool = False) -> None:
        self._part, self._group, self._has_whole_input = part, group, has_whole_input

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._group.sum(self._part(self._own(x_TI)))

    def start_with_residual(
        self, x_TI: Tensor, residual_TO: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        return start_sum(self._group, self._part(self._own(x_TI)), residual_TO, next_norm)

    def _own(self, x_TI: Tensor) -> Tensor:
        if not self._has_whole_input:
            return x_TI
        own = even_shares(x_TI.shape[1], self._group.size)[self._group.rank]
        return x_TI[:, own.start : own.stop].contiguous()


class GatheredLinear(Linear):
    """A layer whose output features are divided: the LM head. `total`: features of all ranks."""

    def __init__(self, part: Linear, group: Group, vocab: VocabShare, total: int) -> None:
        self._part, self._group, self._vocab, self._total = part, group, vocab, total

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self._part(x_TI)
        width = self._vocab.width
        parts = self._group.gather(torch.nn.functional.pad(y_TO, (0, width - y_TO.shape[1])))
        if width * self._group.size == self._total:
            return parts.transpose(0, 1).reshape(len(x_TI), self._total)
        sizes = even_shares(self._total, self._group.size)
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, sizes, strict=True)], dim=1)

    def exchanges_best(self, x_TI: Tensor) -> bool:
        """Return whether `best` is the better way if the caller needs no logits."""
        return x_TI.device.type == "cpu" or len(x_TI) * self._total * x_TI.itemsize >= _GATHERED_BYTES

    def best(self, x_TI: Tensor, ops: ModuleType) -> tuple[Tensor, Tensor]:
        """Return `argmax_and_margin` of the logits (see `kernels.torch.sampling`); NO_TOKEN if they are not finite. The
        ranks exchange three numbers for each row."""
        y_TO = self._part(x_TI)
        token_T, margin_T = ops.argmax_and_margin(y_TO)
        wide = torch.promote_types(y_TO.dtype, torch.float32)
        assert self._total <= 1 << 24, "float32 does not hold the number of each token"
        token_T = token_T + self._vocab.tokens.start
        found_3T = torch.stack((y_TO.amax(dim=1).to(wide), margin_T.to(wide), token_T.to(wide)))
        return best_of_parts(*self._group.gather(found_3T).unbind(dim=1))


def best_of_parts(peak_GT: Tensor, margin_GT: Tensor, token_GT: Tensor) -> tuple[Tensor, Tensor]:
    """(T,) int64 and (T,) float32: `argmax_and_margin` of rows whose G parts have these largest values (NaN where there
    is one), margins and tokens. Margins and tokens count only where their part's largest value is that of the row."""
    peak_T = peak_GT.amax(dim=0)
    token_T = torch.where(peak_GT == peak_T, token_GT, torch.inf).amin(dim=0)
    to_others_GT = torch.where(is_possible(peak_GT), peak_T - peak_GT, torch.inf)
    margin_T = torch.where(token_GT == token_T, margin_GT, to_others_GT).amin(dim=0)
    is_finite = finite_peak(peak_T)
    return (
        torch.where(is_finite, token_T, NO_TOKEN).long(),
        torch.where(is_finite, margin_T, torch.inf).float(),
    )


class Embedding:
    """The embeddings of tokens. `shard` None: this process holds all of them."""

    def __init__(self, weight_VE: Tensor, shard: ModelShard | None = None) -> None:
        self._weight, self._shard = weight_VE, shard

    def __call__(self, tokens_T: Tensor) -> Tensor:
        if self._shard is None or self._shard.vocab is None:
            return self._weight[tokens_T]
        own = tokens_T - self._shard.vocab.tokens.start
        is_own = (own >= 0) & (own < len(self._weight))
        # Zeros of the other ranks are added, which changes no bit but the sign of a zero.
        return self._shard.group.sum(self._weight[torch.where(is_own, own, 0)] * is_own[:, None])
