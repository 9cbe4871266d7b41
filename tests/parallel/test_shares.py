"""How heads, features and the vocabulary are divided among ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.parallel.shares import even_shares, head_shares


@given(st.integers(1, 200), st.integers(1, 12))
def test_even_shares_cover_everything_once(total: int, size: int) -> None:
    shares = even_shares(total, size)
    assert [item for share in shares for item in share] == list(range(total))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the first rank has the most"


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_each_query_head_reads_its_own_kv_head(num_kv_heads: int, per_group: int, size: int) -> None:
    num_heads = num_kv_heads * per_group
    try:
        shares = head_shares(num_heads, num_kv_heads, size)
    except ValueError:
        assert -(-size // num_kv_heads) > per_group, "there are heads for all ranks"
        return
    assert [head for share in shares for head in share.query] == list(range(num_heads))
    assert {head for share in shares for head in share.kv} == set(range(num_kv_heads))
    for share in shares:
        each, rest = divmod(len(share.query), len(share.kv))
        assert rest == 0, "the rank's kv heads serve equally many query heads"
        for index, head in enumerate(share.query):
            assert head // per_group == share.kv[index // each]
    assert len(shares[0].kv) == max(len(share.kv) for share in shares), "the first rank has the most"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "query", "kv"),
    [
        (9, 3, 2, [6, 3], [2, 1]),  # SmolLM2-135M
        (12, 2, 2, [6, 6], [1, 1]),  # Qwen2.5-1.5B
        (12, 2, 4, [3, 3, 3, 3], [1, 1, 1, 1]),  # each kv head on two ranks
        (64, 8, 8, [8] * 8, [1] * 8),  # Llama-3-70B
    ],
)
def test_known_models(heads: int, kv_heads: int, size: int, query: list[int], kv: list[int]) -> None:
    shares = head_shares(heads, kv_heads, size)
    assert [len(share.query) for share in shares] == query
    assert [len(share.kv) for share in shares] == kv
