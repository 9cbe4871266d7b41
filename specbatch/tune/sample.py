"""A sample of the user's rows: some to trace, more for their lengths and to run live."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from specbatch.errors import InputError, RowError
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow, Source
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import EngineLimits, Request, RngKey

_MAX_DRAWN = 1024
MIN_ROWS = 4  # a bootstrap over fewer means nothing


@dataclass(frozen=True, slots=True)
class Sample:
    requests: list[Request]  # all that were drawn, in that order; each has its own stream of random numbers
    num_to_trace: int  # number of the first requests that are traced
    prompt_tokens: list[int]  # prompt lengths of all rows that were drawn
    common_prefix: int  # tokens that all of these begin with
    num_rows: int  # rows of the file, as far as the sample shows: rows that fail are not counted
    num_drawn: int
    num_failed: int  # drawn rows that failed
    has_grammars: bool  # some row has a grammar: it is measured without it
    max_tokens: int  # tokens that a sampled row may write at most

    @property
    def to_trace(self) -> list[Request]:
        return self.requests[: self.num_to_trace]


def check_enough(source: Source) -> None:
    """Check a source before models are loaded. It raises InputError for a file that has fewer rows than `sample_rows`
    needs. Other sources are not checked, because they can be read only once."""
    if source.path is not None and (count := sum(1 for _ in islice(source.rows(), MIN_ROWS))) < MIN_ROWS:
        raise _too_few(source, count, "")


def sample_rows(
    source: Source, parser: RowParser, texts: TextProcessor, limits: EngineLimits, num_rows: int, seed: int
) -> Sample:
    """`num_rows` rows drawn evenly from all of the source, with others up to 1024 in all.

    Raises InputError where too few can run.
    """
    draw = random.Random(seed)
    drawn: list[RawRow] = []
    total = 0
    for total, raw in enumerate(source.rows(), start=1):  # reservoir sampling (Vitter 1985)
        if len(drawn) < max(_MAX_DRAWN, num_rows):
            drawn.append(raw)
        elif (index := draw.randrange(total)) < len(drawn):
            drawn[index] = raw
    draw.shuffle(drawn)
    requests: list[Request] = []
    lengths: list[int] = []
    common: list[int] = []
    num_failed, max_tokens, completions, has_grammars = 0, 1, 0, False
    for raw in drawn:
        row = parser.parse(raw)
        try:
            prompt = texts.encode(row, limits)
            bad_words = texts.bad_words(row.params, limits)
        except RowError:
            num_failed += 1
            continue
        params = row.params
        common = _common_prefix(common, prompt) if lengths else prompt
        lengths += [len(prompt)] * row.num_requests
        completions += row.num_requests
        has_grammars |= row.has_grammar
        max_tokens = max(max_tokens, params.max_tokens)
        rng = RngKey(seed if params.seed is None else params.seed, row.index, 0)
        requests.append(Request(len(requests), prompt, params, rng, texts.stop_check(params), bad_words))
    if len(requests) < MIN_ROWS:
        raise _too_few(source, len(requests), f" ({num_failed} of {len(drawn)} rows fail)" if num_failed else "")
    expected = round(total * completions / len(drawn))
    to_trace = min(num_rows, len(requests))
    return Sample(requests, to_trace, lengths, len(common), expected, len(drawn), num_failed, has_grammars, max_tokens)


def _too_few(source: Source, count: int, failed: str) -> InputError:
    return InputError(
        f"{source.name} has {count} rows to tune on, and {MIN_ROWS} are needed{failed}",
        "`specbatch generate` shows the errors of rows that fail" if failed else "give more rows like those to run",
    )


def _common_prefix(first: list[int], second: list[int]) -> list[int]:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]
