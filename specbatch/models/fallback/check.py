"""The check at the start: two prompts and three tokens after each, by transformers' own attention and by the paged one.

The model's own forward pass runs before its modules are replaced. The paged pass gets the own one's input at each
layer, so an error is found where it is made, and rounding does not add up over layers. A layer is compared by what it
adds to its input.

Shape suffixes: N prompts of the check, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specbatch.batch import PagedBatch
from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import CausalModel
from specbatch.models.fallback.attention import PAGED
from specbatch.models.fallback.probe import AttentionCall

_LENGTHS, _NUM_DECODED = (21, 13), 3  # tokens of the prompts; tokens after each, computed one by one
_LONGEST = 160  # prompts are so long that windows bind, if that is not more than this
_PAGE = 16
# The largest error of what a layer adds, as a part of it. Another order of the same sums differs by less. In float64,
# transformers computes norms and softmax in float32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.006, torch.bfloat16: 0.03}
_HALF = (torch.float16, torch.bfloat16)


@dataclass
class _Seen:
    """Inputs and outputs of the layers, (..., T, E), and the logits, of all tokens of a pass."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    hidden_TE: Tensor = field(default_factory=lambda: torch.empty(0))
    logits_TV: Tensor = field(default_factory=lambda: torch.empty(0))


class StartCheck:
    """Runs the model's own forward pass; `compare` runs the paged one. `calls`: its calls of attention by layer."""

    def __init__(self, model: Any, config: ModelConfig, calls: Sequence[AttentionCall]) -> None:
        self._blocks = blocks_of(model, [call.name for call in calls])
        longest = min(_LONGEST, config.max_position_embeddings - _NUM_DECODED)
        windows = [window + 8 for window in config.sliding_windows if window is not None and window + 8 <= longest]
        self._lengths = [min(longest, max([length, *windows])) for length in _LENGTHS]
        generator = torch.Generator().manual_seed(0)
        device = model.get_input_embeddings().weight.device
        self._texts = [
            torch.randint(0, config.vocab_size, (length + _NUM_DECODED,), generator=generator).to(device)
            for length in self._lengths
        ]
        model.set_attn_implementation("eager")
        try:
            self._own = [self._own_pass(model, text) for text in self._texts]
        finally:
            model.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def _own_pass(self, model: Any, tokens_T: Tensor) -> _Seen:
        seen, hooks = _Seen(), []
        for name in self._blocks:
            module = model.get_submodule(name)

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                seen.inputs[name], seen.outputs[name] = hidden_of(args, kwargs).clone(), first_tensor(output).clone()

            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        try:
            positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
            arguments = {"input_ids": tokens_T[None], "position_ids": positions_T[None], "use_cache": False}
            seen.hidden_TE = model.base_model(**arguments).last_hidden_state[0]
            seen.logits_TV = model(**arguments).logits[0]
        finally:
            for hook_ in hooks:
                hook_.remove()
        return seen

    @torch.inference_mode()
    def compare(self, decoder: CausalModel, model: Any) -> None:
        """Run the paged pass. Raise ModelError, which names the layer that differs first."""
        lengths, dtype = self._lengths, decoder.embedding_VE.dtype
        _check("a prompt", dtype, [self._ratios(decoder, model, [(0, length) for length in lengths])])
        steps = range(_NUM_DECODED)
        spans = [[(length + step, length + step + 1) for length in lengths] for step in steps]
        _check("tokens after a prompt", dtype, [self._ratios(decoder, model, one) for one in spans])

    def _ratios(self, decoder: CausalModel, model: Any, spans: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Run the tokens [start, end) of each text. Return the errors of each part of the model, in their order."""
        num_pages = [-(-len(text) // _PAGE) for text in self._texts]
        if spans[0][0] == 0:
            self._cache = decoder.new_cache((sum(num_pages) + 1) * _PAGE, decoder.embedding_VE.dtype)
        batch, tokens_T = _batch(self._texts, spans, num_pages)
        of_both = _joined(self._own, spans)
        seen, hooks = _Seen(), []
        for name, own in of_both.inputs.items():
            module = model.get_submodule(name)

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name, own: Tensor = own) -> Any:
                seen.inputs[name] = hidden_of(args, kwargs).clone()
                return _with_input(args, kwargs, own)

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                seen.outputs[name] = first_tensor(output).clone()

            hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        try:
            hidden_TE, _ = decoder.forward(tokens_T, batch, self._cache)
        finally:
            for hook in hooks:
                hook.remove()
        first = self._blocks[0]
        found = {"the input of layer 0": _ratio(seen.inputs[first], of_both.inputs[first])}
        for layer, name in enumerate(self._blocks):
            ratio_T = _ratio(seen.outputs[name], of_both.outputs[name], of_both.inputs[name])
            found[f"layer {layer} ({name})"] = ratio_T
        found["the part after the last layer"] = _ratio(hidden_TE, of_both.hidden_TE)
        found["the head"] = _ratio(decoder.raw_logits(of_both.hidden_TE), of_both.logits_TV)
        return found


def _ratio(found_TE: Tensor, expected_TE: Tensor, inputs_TE: Tensor | None = None) -> Tensor:
    """Return the error of each token (T,), as a part of the largest error that rounding makes. `inputs_TE`: the input
    of the layer; None: all of the output counts."""
    dtype = expected_TE.dtype
    found_TE, expected_TE = found_TE.double(), expected_TE.double()
    added_TE = expected_TE if inputs_TE is None else expected_TE - inputs_TE.double()
    rounding_T = 2 * torch.finfo(dtype).eps * expected_TE.norm(dim=-1)
    limit_T = _TOLERANCE[dtype] * added_TE.norm(dim=-1) + rounding_T
    ratio_T = (found_TE - expected_TE).norm(dim=-1) / limit_T.clamp(min=1e-30)
    return ratio_T.reshape(-1, ratio_T.shape[-1]).amax(0)


def _check(what: str, dtype: torch.dtype, passes: Sequence[dict[str, Tensor]]) -> None:
    """Raise ModelError, which names the first part that differs. `what`: the tokens of these passes."""
    for part in passes[0]:
        ratio_T = torch.cat([one[part] for one in passes])
        # With less precision, a router can choose another expert for some tokens: then the others tell.
        worst = float(ratio_T.median() if dtype in _HALF else ratio_T.max())
        if not worst <= 1:  # NaN, too
            raise ModelError(
                "model.backend: transformers does not compute what transformers' own attention does: for "
                f"{what}, {part} is the first that differs, by {_TOLERANCE[dtype] * worst:.1e} of what it adds",
                hint="please report it with the versions of specbatch and transformers; another dtype may not have it",
            )


def blocks_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of the layers that hold these attention modules: elements of the model's list of layers."""
    blocks = []
    for name in names:
        parts = name.split(".")
        prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        of_list = (p for p in prefixes if isinstance(model.get_submodule(p.rpartition(".")[0]), nn.ModuleList))
        blocks.append(next(of_list, name))
    return blocks


def _batch(
    texts: Sequence[Tensor], spans: Sequence[tuple[int, int]], num_pages: Sequence[int]
) -> tuple[PagedBatch, Tensor]:
    """Pack the tokens [start, end) of each text. Its pages are out of order; the last page of the cache is spare."""
    device, positions, slots, tokens = texts[0].device, [], [], []
    table = torch.zeros((len(texts), max(num_pages) + 1), dtype=torch.int32)
    for number, (start, end) in enumerate(spans):
        first = sum(num_pages[:number])
        pages = torch.arange(first, first + num_pages[number]).flip(0)
        table[number, : len(pages)] = pages
        at = torch.arange(start, end)
        positions.append(at)
        slots.append(pages[at // _PAGE] * _PAGE + at % _PAGE)
        tokens.append(texts[number][start:end])
    ends = np.cumsum([0, *(end - start for start, end in spans)]).astype(np.int32)
    batch = PagedBatch(
        torch.cat(slots).to(device),
        torch.cat(positions).to(device),
        table.to(device),
        _PAGE,
        torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device),
        torch.from_numpy(ends).to(device),
        max(end - start for start, end in spans),
        host_query_starts=ends,
    )
    return batch, torch.cat(tokens)


def _joined(seen: Sequence[_Seen], spans: Sequence[tuple[int, int]]) -> _Seen:
    def join(values: Callable[[_Seen], Tensor]) -> Tensor:
        return torch.cat(
            [values(one)[..., start:end, :] for one, (start, end) in zip(seen, spans, strict=True)], dim=-2
        )

    names = seen[0].inputs
    return _Seen(
        {name: join(lambda one, name=name: one.inputs[name]) for name in names},  # type: ignore[misc]
        {name: join(lambda one, name=name: one.outputs[name]) for name in names},  # type: ignore[misc]
        join(lambda one: one.hidden_TE),
        join(lambda one: one.logits_TV),
    )


def hidden_of(args: Any, kwargs: Any) -> Tensor:
    """Return the hidden states (1, T, E) that a layer gets. Some models have several streams of them."""
    return first_tensor(args[0] if args else kwargs["hidden_states"])


def _with_input(args: Any, kwargs: Any, x: Tensor) -> tuple[Any, Any]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def first_tensor(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(found, Tensor), type(found)
    return found
