"""The counters of engines: speculation, grammars, times. All add up over requests and over engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import NamedTuple


@dataclass(slots=True)
class SpeculationCounts:
    """Speculation statistics of one completion, or summed over many. They do not depend on scheduling, with one
    exception: a row with a grammar in plain decoding on CUDA, where some rounds add no token."""

    rounds: int = 0  # verify passes after the prefill
    drafted: int = 0  # draft tokens (tree nodes without the root) that were verified
    accepted: int = 0  # draft tokens that were accepted and committed
    committed: int = 0  # tokens that rounds added: accepted and bonus tokens, without those after a stop
    histogram: list[int] = field(default_factory=list)  # [a] = the rounds that accepted `a` draft tokens
    depths: list[int] = field(default_factory=list)  # [d] = the rounds with drafts of depth d; 0: no drafts

    @property
    def proposed_at(self) -> list[int]:
        """A list in which [i] is the number of rounds that proposed a draft token at depth i + 1."""
        return _at_least(self.depths)

    @property
    def accepted_at(self) -> list[int]:
        """A list in which [i] is the number of rounds that accepted a draft token at depth i + 1."""
        return _at_least(self.histogram)

    @property
    def acceptance_length(self) -> float | None:
        """The tokens committed per round (bonus included). None before the first round."""
        return self.committed / self.rounds if self.rounds else None

    def record(self, drafted: int, depth: int, accepted: int, committed: int) -> None:
        """Count one round: `drafted` nodes down to `depth`, of which `accepted` were accepted."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed
        # This does the same as `_count` with fewer calls, because a job can have millions of rounds of requests.
        if accepted < len(self.histogram):
            self.histogram[accepted] += 1
        else:
            _count(self.histogram, accepted)
        if depth < len(self.depths):
            self.depths[depth] += 1
        else:
            _count(self.depths, depth)

    def add(self, other: SpeculationCounts, times: int = 1) -> None:
        """Add other counts. `times=-1` subtracts counts that were added before."""
        self.rounds += times * other.rounds
        self.drafted += times * other.drafted
        self.accepted += times * other.accepted
        self.committed += times * other.committed
        for mine, theirs in ((self.histogram, other.histogram), (self.depths, other.depths)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for value, count in enumerate(theirs):
                mine[value] += times * count
            while times < 0 and mine and not mine[-1]:
                mine.pop()


def _count(counts: list[int], value: int) -> None:
    counts.extend([0] * (value + 1 - len(counts)))
    counts[value] += 1


def _at_least(counts: list[int]) -> list[int]:
    """Return a list in which [i] is the number of values greater than i. `counts[v]`: the number of values v."""
    return list(accumulate(reversed(counts[1:])))[::-1]


DEVICE = "device"


@dataclass(slots=True)
class GrammarCounts:
    """Counters of the work that grammars do in rounds. Seconds are the host's time. All but `requests` count the work
    of the host."""

    # Requests with a grammar: DEVICE, or why the device does not follow the grammar.
    requests: Counter[str] = field(default_factory=Counter)
    forced: int = 0  # nodes that grammars added to draft trees
    forbidden: int = 0  # drafts that grammars removed from draft trees
    refused: int = 0  # nodes at which a grammar refused a greedy request's choice, so that it needed a mask
    masks: int = 0  # masks that were computed
    tree_seconds: float = 0.0  # time between drafting and the target's forward pass
    advance_seconds: float = 0.0  # time to follow the committed tokens, while the device drafts or runs the target
    check_seconds: float = 0.0  # time between the target's forward pass and acceptance: choices, and masks for them
    mask_seconds: float = 0.0  # time for other masks, and for work in advance, while the device runs the target

    def add(self, other: GrammarCounts) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class DistinctExperts(NamedTuple):
    """Rounds with about the same number of tokens. `tokens`: their mean number. `experts`: the mean number of distinct
    experts of a layer that a round uses."""

    num_rounds: int
    tokens: float
    experts: float


@dataclass(slots=True)
class ExpertCounts:
    """Counts of the experts that tokens choose in rounds. They are empty if the target has no experts, and are read
    from the device when the engine is idle."""

    load: list[list[int]] = field(default_factory=list)  # [layer][expert] = tokens; only layers with experts
    # Rounds by their number of tokens: for each range of it, named by its largest number, the rounds, their tokens, and
    # their distinct experts summed over the layers.
    rounds: dict[int, list[int]] = field(default_factory=dict)

    def add(self, other: ExpertCounts, times: int = 1) -> None:
        """Add other counts. `times=-1` subtracts counts that were added before."""
        self.load = self.load or [[0] * len(layer) for layer in other.load]
        for mine, theirs in zip(self.load, other.load, strict=False):
            mine[:] = [a + times * b for a, b in zip(mine, theirs, strict=True)]
        for size, sums in other.rounds.items():
            known = self.rounds.get(size, [0, 0, 0])
            self.rounds[size] = [a + times * b for a, b in zip(known, sums, strict=True)]

    @property
    def distinct(self) -> list[DistinctExperts]:
        """Return the means of each range, by rising number of tokens."""
        sums = [self.rounds[size] for size in sorted(self.rounds) if self.rounds[size][0] > 0]
        return [DistinctExperts(num, tokens / num, experts / num / len(self.load)) for num, tokens, experts in sums]


@dataclass(slots=True)
class DraftSources:
    """Counts of drafts by where they come from: `row`, `job` or `corpus`, see `draft.suffix`. They are empty with other
    draft methods. Drafts that were not verified, because of a grammar or a budget, do not count."""

    tokens: dict[str, list[int]] = field(default_factory=dict)  # source -> [drafted, accepted]

    def record(self, source: str, drafted: int, accepted: int, times: int = 1) -> None:
        sums = self.tokens.setdefault(source, [0, 0])
        sums[0] += times * drafted
        sums[1] += times * accepted

    def add(self, other: DraftSources, times: int = 1) -> None:
        """Add other counts. `times=-1` subtracts counts that were added before."""
        for source, (drafted, accepted) in other.tokens.items():
            self.record(source, drafted, accepted, times)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was built. Seconds are wall time."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    device_wait_seconds: float = 0.0  # time in which the host only waited for rounds and prompts
    input_wait_seconds: float = 0.0  # time in which the engine waited for rows that were not tokenized yet
    prompt_tokens: int = 0  # tokens of admitted prompts (first admissions)
    cached_prompt_tokens: int = 0  # tokens of admitted prompts that were in the prefix cache
    prefill_tokens: int = 0  # tokens that a prefill computed, recomputation included
    generated_tokens: int = 0  # tokens of completions
    rounds: int = 0  # each verifies a whole batch
    preemptions: int = 0
    memory_shortages: int = 0  # launches that ran out of memory and were made smaller
    late_graphs: int = 0  # CUDA graphs that were captured after the start, when the first batch of a kind came
    late_graph_seconds: float = 0.0
    joules: float = 0.0  # energy that the GPU used; 0: not measured
    broken_drafts: int = 0  # sampled drafts that were rejected because their probabilities were not finite
    grammar: GrammarCounts = field(default_factory=GrammarCounts)
    experts: ExpertCounts = field(default_factory=ExpertCounts)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    draft_sources: DraftSources = field(default_factory=DraftSources)

    def add(self, other: EngineStats) -> None:
        """Add another engine's counters. Seconds of engines that ran together add up to more than the wall time."""
        for item in fields(self):
            if item.name not in ("grammar", "experts", "speculation", "draft_sources"):
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.grammar.add(other.grammar)
        self.experts.add(other.experts)
        self.speculation.add(other.speculation)
        self.draft_sources.add(other.draft_sources)
