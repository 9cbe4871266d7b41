"""Where a request ends among the tokens of a round, against looking at them one by one."""

from __future__ import annotations

import random

from specbatch.counts import SpeculationCounts
from specbatch.engine.sequence import Sequence
from specbatch.types import FinishReason, Request, RngKey, SamplingParams


def test_a_row_ends_where_it_would_token_by_token() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        params = SamplingParams(
            max_tokens=rng.randint(1, 6),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(8), rng.choice([0, 0, 1, 2]))),
        )
        eos = frozenset(rng.sample(range(8), rng.randint(0, 2)))
        seq = Sequence(Request(0, [1, 2], params, RngKey(0, 0, 0)), [1, 2], 2 + params.max_tokens)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        expected: list[int] = []
        reason = None
        while reason is None:
            tokens = [rng.randrange(8) for _ in range(rng.randint(1, 4))]
            wanted = None
            for token in tokens:
                expected.append(token)
                if token in stops:
                    wanted = FinishReason.STOP
                elif len(expected) == params.max_tokens:
                    wanted = FinishReason.LENGTH
                if wanted is not None:
                    break
            reason = seq.append(tokens, eos)
            assert (list(seq.generated), reason) == (expected, wanted)


def test_counts_by_depth_add_up() -> None:
    """Of rounds one by one, and of sums of sums: at each depth as many as reached it."""
    rng = random.Random(0)
    total, rounds = SpeculationCounts(), list[tuple[int, int]]()
    for _ in range(200):
        part = SpeculationCounts()
        for _ in range(rng.randint(0, 5)):
            depth = rng.randint(0, 8)
            rounds.append((depth, rng.randint(0, depth)))
            part.record(drafted=depth, depth=depth, accepted=rounds[-1][1], committed=rounds[-1][1] + 1)
        total.add(part)
    deepest, most = (max(values) for values in zip(*rounds, strict=True))
    assert total.proposed_at == [sum(depth > i for depth, _ in rounds) for i in range(deepest)]
    assert total.accepted_at == [sum(kept > i for _, kept in rounds) for i in range(most)]
    assert sum(total.histogram) == sum(total.depths) == total.rounds == len(rounds)
    assert sum(total.accepted_at) == total.accepted
