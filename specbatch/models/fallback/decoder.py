"""A decoder that transformers' modelling code computes, over a paged cache.

Its attention modules call `attention.PagedLayer`; everything between two attentions is transformers' code. Sequences of
a batch are packed into one line of tokens with their positions, which is enough: attention knows the sequences, and
nothing else of a supported model looks at other tokens.

Shape suffixes: T packed tokens, R selected tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache, KVScales
from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Trunk
from specbatch.models.fallback.attention import PagedLayer, PagedPass
from specbatch.models.fallback.check import StartCheck, blocks_of, first_tensor, hidden_of
from specbatch.models.fallback.modules import replace_modules
from specbatch.models.fallback.probe import AttentionCall
from specbatch.models.fallback.rotary import replace_rotation
from specbatch.models.fallback.source import TransformersSource
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.linears.linear import Linear
from specbatch.models.routing_counter import RoutingCounter


def transformers_decoder(
    config: ModelConfig,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    num_positions: int,
) -> TransformersDecoder:
    """Read the weights, make the decoder, and check it. Raise ModelError if it does not compute what transformers'
    own attention does."""
    assert isinstance(tensors, TransformersSource)
    model, calls = tensors.model(dtype, device), tensors.probed.calls
    check = StartCheck(model, config, calls)
    decoder = TransformersDecoder(model, config, calls, backend, num_positions)
    check.compare(decoder, model)
    return decoder


class _Output:
    """The output of a model's layers: hidden states, and None for all else that a head may look at."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Takes the place of a model's layers where only its head is computed: the hidden states are the input."""

    @property
    def decoder(self) -> _Given:  # some models call the layers by this name
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        return _Output(inputs_embeds)


class TransformersDecoder:
    """A causal language model of transformers with the interface of `Decoder`. `model`: the model with its weights.
    `calls`: its calls of attention, in the order of its layers. `num_positions`: see `PagedModel`."""

    routing: RoutingCounter | None = None

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        calls: Sequence[AttentionCall],
        backend: AttentionBackend,
        num_positions: int,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        self.model, self.config, self.num_positions, self._kv_scales = model, config, num_positions, kv_scales
        self.embedding_VE: Tensor = model.get_input_embeddings().weight
        self.device = self.embedding_VE.device
        dtype = self.embedding_VE.dtype
        ops = ops_for(self.device, dtype)
        self._state = PagedPass(backend, ops, dtype, self.device)
        self.replaced = replace_modules(model, dtype, self.device) | {"rotations": 0}
        for layer, call in enumerate(calls):
            assert config.attention_scale is not None
            place = PagedLayer(self._state, layer, call.window, call.scale / config.attention_scale)
            module = model.get_submodule(call.name)
            module.place = place
            self.replaced["rotations"] += replace_rotation(module, ops, call.head_dim)
        self._base = model.base_model
        self._blocks = [model.get_submodule(name) for name in blocks_of(model, [call.name for call in calls])]
        self._watched: dict[int, Any] = {}  # hooks at layers whose inputs are auxiliary hidden states
        self._aux_hidden_states: dict[int, Tensor] = {}
        self._head = copy(model)
        self._head._modules = dict(model._modules) | {model.base_model_prefix: _Given()}

    def forward(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
        *,
        is_even: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the same as `Decoder.forward`. There are no ranks, so `is_even` changes nothing."""
        assert trunk is None
        for layer in aux_layers:
            self._watch(layer)
        self._state.begin(batch, cache)
        # Slots that speculation writes after the longest sequence have later positions than tables of positions.
        positions_T = batch.positions_T.clamp(max=self.config.max_position_embeddings - 1)
        output = self._base(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        hidden_TE = output.last_hidden_state[0]
        aux_hidden_states = [self._aux_hidden_states.pop(layer) for layer in aux_layers]
        return (hidden_TE if logits_indices is None else hidden_TE[logits_indices.index_R]), aux_hidden_states

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the embeddings (T, E)."""
        return F.embedding(tokens_T, self.embedding_VE)

    @property
    def lm_head(self) -> Linear:
        """Return the LM head as draft heads use it. Raise ModelError if it is no linear layer."""
        head = getattr(self.model.get_output_embeddings(), "function", None)
        if head is None:
            raise ModelError(
                f"the draft head has no LM head, and that of {self.config.model_type} is no linear layer",
                hint="use a draft head with an LM head, or speculation.method: ngram",
            )
        return cast(Linear, head)

    def _watch(self, layer: int) -> None:
        """Keep the input of a layer, or the output of the last one, at each forward pass from now on."""
        if layer in self._watched:
            return

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
            x = hidden_of(args, kwargs) if layer < len(self._blocks) else first_tensor(output)
            if x.ndim != 3:
                raise ModelError(
                    f"layers of {self.config.model_type} have several hidden states, and a draft head reads one",
                    hint="use speculation.method: ngram or draft_model",
                )
            self._aux_hidden_states[layer] = x[0].clone()

        if layer < len(self._blocks):
            self._watched[layer] = self._blocks[layer].register_forward_pre_hook(keep, with_kwargs=True)
        else:
            self._watched[layer] = self._blocks[-1].register_forward_hook(keep, with_kwargs=True)

    def take_part(self) -> None:
        raise AssertionError("one process computes the model")

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) of selected hidden states, in the model's dtype."""
        logits: Tensor = self._head(inputs_embeds=hidden_RE[None], use_cache=False).logits[0]
        return logits

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return `raw_logits` in float32 (in float64 if the model is in float64)."""
        out = self.raw_logits(hidden_RE)
        return out if out.dtype == torch.float64 else out.float()

    def best_tokens(self, hidden_RE: Tensor, ops: ModuleType) -> tuple[Tensor, Tensor] | None:
        """Return None: the best tokens are found from `raw_logits`."""
        return None

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache:
        c = self.config
        scales = self._kv_scales if dtype == torch.float8_e4m3fn else ()
        return KVCache(c.num_layers, num_slots, c.num_kv_heads, c.head_dim, dtype, self.device, scales)
