"""Log-probabilities on their way to the host: words after those of a report, then records of each request."""

from __future__ import annotations

import pytest
import torch

from specbatch.engine.logprobs import LogprobLayout, Logprobs, read_records, with_logprobs
from specbatch.logprobs import TokenLogprob, TokenLogprobs


def drawn(rows: int, tokens: int, num_top: int, dtype: torch.dtype) -> Logprobs:
    values = torch.randn(rows, tokens, 1 + num_top, dtype=dtype)
    return Logprobs(values, torch.randint(2**31 - 1, (rows, tokens, num_top)))


def expected(logprobs: Logprobs, row: int, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    values, ids = logprobs.values_BMK[row].tolist(), logprobs.top_ids_BMK[row].tolist()
    return [
        TokenLogprob(token, own, tuple(zip(top_ids, others, strict=True))[:num_top])
        for token, (own, *others), top_ids in zip(tokens, values, ids, strict=False)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("tokens", [1, 3])
def test_they_arrive_as_they_were(tokens: int, num_top: int, dtype: torch.dtype) -> None:
    """Also of a request that wants fewer of the likely tokens, or more than the vocabulary has."""
    output, logprobs = torch.zeros(4, 5, dtype=torch.int32), drawn(4, tokens, num_top, dtype)
    words = with_logprobs(output, logprobs).numpy()
    read = LogprobLayout.of(logprobs).read(words[:, 5:])
    for wanted in (0, num_top // 2, num_top, num_top + 3):
        records = read.records(wanted)
        assert len(records) == 4
        for row, of_row in enumerate(records):
            ids = [7, 8, 9][:tokens]
            assert list(read_records(ids, of_row)) == expected(logprobs, row, ids, wanted)
            size = len(of_row) // tokens
            assert list(read_records(ids[:1], of_row[:size])) == expected(logprobs, row, ids[:1], wanted)


def test_a_report_without_them_stays_as_it_is() -> None:
    output = torch.zeros(4, 5, dtype=torch.int32)
    assert with_logprobs(output, None) is output


def test_no_tokens_have_none() -> None:
    assert read_records([], b"") == TokenLogprobs.of([])
    assert len(read_records([], b"")) == 0


def test_they_are_equal_by_their_values() -> None:
    one, other = (TokenLogprobs.of([TokenLogprob(3, value, ((3, value),))]) for value in (-0.5, -0.25))
    assert one == TokenLogprobs.of(list(one))
    assert one != other
    assert one[0] == one[-1] == TokenLogprob(3, -0.5, ((3, -0.5),))
