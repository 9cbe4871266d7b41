"""Draft methods: one file each, with one protocol (`method.py`, and `host.py` for drafts that the host makes).

A new method is a file here, an entry of `METHODS`, and its name in `config.SpeculationSection.method`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from specbatch.draft.block import BlockDraft
from specbatch.draft.chain import ChainDraft
from specbatch.draft.hybrid import HybridDraft
from specbatch.draft.method import DraftMethod
from specbatch.draft.network import BlockNet, DraftNet, EagleNet, ModelNet
from specbatch.draft.ngram import HostNgramDraft, NgramDraft
from specbatch.draft.none import MAX_ROOM, NoDraft
from specbatch.draft.peagle import ParallelEagleDraft
from specbatch.draft.shape import DraftShape
from specbatch.draft.suffix import SharedTexts, SuffixDraft
from specbatch.draft.tree import TreeDraft


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The parts that draft methods are built from."""

    device: torch.device
    ops: ModuleType  # the device's kernels, see `kernels.ops_for`
    net: DraftNet | None = None  # None: the method has no draft network
    ngram_match: tuple[int, int] = (2, 5)  # the shortest and the longest match, in tokens
    coupled: bool = False  # sampled chains are drawn with the target's random numbers, see `chain`
    has_states: bool = False  # the target is a hybrid: plain rounds have no room for further nodes
    shared: SharedTexts | None = None  # the corpus of `suffix` and `hybrid`; None: the method has none
    scored: bool = False  # chains have scores, by which they share a budget for verification
    min_probability: float = 0.3  # the least probability of a draft of `suffix`


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """A draft method of the configuration."""

    make: Callable[[DraftShape, DraftParts], DraftMethod]
    # The class of the draft network, which speculation.draft names.
    net: type[ModelNet | EagleNet | BlockNet] | None = None
    default_num_steps: int = 3
    chains_only: bool = False  # topk must be 1
    one_pass: bool = False  # one pass of the draft network makes all drafts of a chain, whatever their number
    in_target: bool = False  # the draft network can be a part of the target's checkpoint: speculation.draft is null


def _from_network(shape: DraftShape, parts: DraftParts) -> DraftMethod:
    assert isinstance(parts.net, ModelNet | EagleNet), "the method has such a network"
    if shape.is_chain:
        return ChainDraft(parts.net, shape, parts.ops, parts.coupled)
    return TreeDraft(parts.net, shape, parts.ops)


def _block(shape: DraftShape, parts: DraftParts) -> DraftMethod:
    assert isinstance(parts.net, BlockNet), "the method has a block drafter"
    return BlockDraft(parts.net, shape, parts.ops, parts.coupled)


def _peagle(shape: DraftShape, parts: DraftParts) -> DraftMethod:
    assert isinstance(parts.net, EagleNet), "the method has a P-EAGLE head"
    return ParallelEagleDraft(parts.net, shape, parts.ops, parts.coupled)


def _ngram(shape: DraftShape, parts: DraftParts) -> DraftMethod:
    if parts.device.type == "cpu":
        return HostNgramDraft(shape, *parts.ngram_match)
    return NgramDraft(shape, *parts.ngram_match, parts.ops)


def _room(parts: DraftParts) -> int:
    return 1 if parts.has_states else MAX_ROOM


def _suffix(shape: DraftShape, parts: DraftParts) -> SuffixDraft:
    assert parts.shared is not None, "the method has a corpus"
    # Where shapes are fixed, a draft that is left out costs as much as one that is made.
    least = parts.min_probability if parts.device.type == "cpu" else 0.0
    return SuffixDraft(shape, parts.ngram_match[0], least, parts.shared, parts.ops)


def _hybrid(shape: DraftShape, parts: DraftParts) -> DraftMethod:
    assert isinstance(parts.net, EagleNet), "the method has a head"
    return HybridDraft(_suffix(shape, parts), parts.net, parts.ops, parts.coupled)


METHODS: dict[str, MethodEntry] = {
    "none": MethodEntry(lambda shape, parts: NoDraft(room=_room(parts))),
    "ngram": MethodEntry(_ngram, default_num_steps=5, chains_only=True),
    "suffix": MethodEntry(_suffix, default_num_steps=31, chains_only=True),
    "hybrid": MethodEntry(_hybrid, EagleNet, default_num_steps=31, chains_only=True),
    "draft_model": MethodEntry(_from_network, ModelNet),
    "eagle": MethodEntry(_from_network, EagleNet),
    "eagle3": MethodEntry(_from_network, EagleNet),
    "peagle": MethodEntry(_peagle, EagleNet, default_num_steps=7, one_pass=True),
    "block": MethodEntry(_block, BlockNet, default_num_steps=15, one_pass=True),
    "mtp": MethodEntry(_from_network, EagleNet, default_num_steps=1, chains_only=True, in_target=True),
}


def make_method(name: str, shape: DraftShape | None, parts: DraftParts) -> DraftMethod:
    """Return the draft method for one draft shape.

    `shape` is None for rounds that draft nothing; other rounds of the schedule may draft."""
    if shape is None:
        return NoDraft(parts.net, room=_room(parts) if name == "none" else 1)
    method = METHODS[name].make(shape, parts)
    method.scored = parts.scored
    return method
