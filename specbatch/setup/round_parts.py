"""Makes the rounds of a schedule, with the tables and caches that they share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from specbatch.cache.pages import KVCache
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.cache.request_table import RequestTable
from specbatch.cache.states import StateCache
from specbatch.draft.method import DraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.overlap.lanes import LaneLimits, LaneSizes
from specbatch.engine.overlap.two_lanes import TwoLanes
from specbatch.engine.round import MAX_FORCED, Round
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels import ops_for
from specbatch.kernels.card_checks import CardChecks
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import CausalModel, Decoder
from specbatch.models.stages import TwoPasses
from specbatch.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Rounds:
    """The round of each draft shape."""

    items: ByBatch[Round]
    caches: list[KVCache]  # caches of the target and the draft network
    lanes: LaneSizes | None = None  # None: rounds have one lane

    def with_two_lanes(self, two_lanes: TwoLanes | None) -> Rounds:
        return replace(self, items=self.items.map(lambda round_: round_.with_two_lanes(two_lanes)))

    def resize_caches(self, num_slots: int) -> None:
        for cache in self.caches:
            cache.resize(num_slots)


@dataclass(frozen=True)
class RoundParts:
    """The parts of which rounds are made. `methods`: the draft methods, all with the same draft network or with none.
    `simulate`, `fixed_shapes`: see `Round`. `group`: the ranks that share the target. `first_part`: the sizes of the
    part that the first of them holds. `lanes`: the sizes from which there are two lanes; None: there is one everywhere.
    `cascade`: see `RequestTable`; rounds with two lanes have none. `num_checkpoints`: checkpoints of states, for a
    hybrid. `budget`: the nodes that rounds verify; None: all. `checks`: those of a deterministic run, which have not
    run yet."""

    target: CausalModel
    methods: ByBatch[DraftMethod]
    kv_dtype: torch.dtype
    page_size: int
    eos_token_ids: tuple[int, ...]
    simulate: float | None = None
    fixed_shapes: bool | None = None
    lanes: LaneLimits | None = None
    cascade: GroupLimits | None = None
    group: Group | None = None
    first_part: ModelConfig | None = None
    num_checkpoints: int = 0
    budget: VerifyBudget | None = None
    checks: CardChecks = field(default_factory=CardChecks)

    @property
    def largest_part(self) -> ModelConfig:
        """All ranks decide by it, not by their own part of the target."""
        return self.first_part or self.target.config

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def num_lookahead(self) -> int:
        return max(method.num_lookahead for method in self.methods.items)

    @property
    def max_nodes(self) -> int:
        """The most nodes of a round's chain, with those that a grammar adds where shapes are not fixed."""
        is_fixed = self.device.type != "cpu" if self.fixed_shapes is None else self.fixed_shapes
        return max(method.num_nodes for method in self.methods.items) + (0 if is_fixed else MAX_FORCED)

    def make(self, max_batch_size: int, max_length: int, num_slots: int) -> Rounds:
        """Make the rounds and caches. `max_length`: the length of the longest row. `num_slots`: the slots of each
        cache; its last page is spare."""
        net, methods, dtype = self.methods.items[0].net, self.methods.items, self.target.embedding_VE.dtype
        least = None if self.lanes is None else self.lanes.requests
        assert least is None or self.cascade is None, "groups are of one lane"
        table = RequestTable(
            max_batch_size,
            -(-(max_length + self.num_lookahead) // self.page_size),
            max_length + 1,
            self.target.config.hidden_size if net is None else net.feature_size,
            any(method.reads_tokens for method in methods),
            dtype,
            self.device,
            max(method.num_host_columns for method in methods),
            self.cascade,
        )
        ops, cache = ops_for(self.device, dtype), self.target.new_cache(num_slots, self.kv_dtype)
        if (delta := self.target.config.delta) is not None:
            state_sizes = delta.state_sizes(self.max_nodes)
            cache.states = StateCache(state_sizes, max_batch_size, self.num_checkpoints, dtype, self.device)
        sizes = None if least is None else LaneSizes.up_to(max_batch_size, least)
        two_lanes = None
        if self.lanes is not None:
            passes = TwoPasses(self.device, self.group)
            assert isinstance(self.target, Decoder), "other models have one lane"
            two_lanes = TwoLanes(self.target, cache, passes, self.lanes.prompt_tokens)
        if net is not None:
            net.cache.resize(num_slots)

        reports_scores = self.budget is not None and self.budget.changes

        def make(method: DraftMethod) -> Round:
            return Round(
                self.target, cache, method, table, self.page_size, self.eos_token_ids, ops, self.simulate,
                self.fixed_shapes, two_lanes, reports_scores=reports_scores,
            )  # fmt: skip

        return Rounds(self.methods.map(make), [cache] if net is None else [cache, net.cache], sizes)
