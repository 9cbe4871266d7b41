"""Requests that nobody asked for, to time rounds with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specbatch.engine.engine import Engine, check_finite
from specbatch.types import Request, RngKey, SamplingParams

TIMED_TOKENS = 128  # tokens that a timed request may still write
_SHIFT = 37  # tokens between the beginnings of two prompts that are made of the same text


def dummy_requests(
    vocab_size: int, count: int, tokens: int, max_tokens: int, texts: Sequence[Sequence[int]] = ()
) -> list[Request]:
    """Greedy requests of `tokens` prompt tokens that end after `max_tokens` more. `texts`: tokens of which the prompts
    are made, because the tokens decide which experts a round reads; empty: they are numbers without a meaning."""

    def prompt(number: int) -> list[int]:
        if not texts:
            return [(number * 7919 + j * 104729) % vocab_size for j in range(tokens)]
        turn, index = divmod(number, len(texts))
        text, start = texts[index], turn * _SHIFT
        return [int(text[(start + j) % len(text)]) for j in range(tokens)]

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(-1 - i, prompt(i), params, RngKey(0, i, 0)) for i in range(count)]


@contextmanager
def dummy_batch(engine: Engine, batch_size: int, context: int, texts: Sequence[Sequence[int]] = ()) -> Iterator[None]:
    """`batch_size` requests of `context` tokens, or as long as they may be, run: their prompts are computed. `texts`:
    see `dummy_requests`."""
    assert not engine.num_running, "requests are running"
    assert not engine.num_waiting, "requests are waiting"
    tokens = _dummy_context(engine, context)
    for request in dummy_requests(engine.limits.vocab_size, batch_size, tokens, TIMED_TOKENS, texts):
        engine.submit(request)
    while engine.num_waiting or not engine.is_prefilled:
        check_finite(engine.step())
    check_finite(engine.drain())
    assert engine.num_running == batch_size, "the cache does not hold that many requests"
    yield
    engine.abort_all()


def fits(engine: Engine, batch_size: int, context: int) -> bool:
    """Return whether the cache holds that many requests of `dummy_batch`."""
    pages = -(-(_dummy_context(engine, context) + TIMED_TOKENS + engine.num_lookahead) // engine.page_size) + 1
    return batch_size * pages <= engine.num_pages


def _dummy_context(engine: Engine, context: int) -> int:
    """Return the number of prompt tokens, at most `context`, of a request that may still write TIMED_TOKENS."""
    return max(1, min(context, engine.limits.max_prompt_tokens - TIMED_TOKENS))
