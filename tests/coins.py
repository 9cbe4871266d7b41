"""Exact probabilities of sampling: every random number is a variable, and [0, 1) is cut where a decision changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from specbatch.draft.rng import Draw
from specbatch.models.decoder import Decoder
from specbatch.types import RngKey, SamplingParams
from tests.oracle import neural, sampling, verify
from tests.oracle.spans import Span, batch_of
from tests.processors import processors_of

Outcome = TypeVar("Outcome")


class Coins:
    """One path through all decisions. A coin is a subinterval of [0, 1), which each of its decisions narrows, so a coin
    that is used twice agrees with itself."""

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self._script = script  # (choice, number of choices) of each split; extended where it ends
        self._step = 0
        self._intervals: dict[object, tuple[float, float]] = {}

    def uniform(self, rng: RngKey, position: int, purpose: Draw) -> Coin:
        """Replace `rng.uniform` of the oracle."""
        return Coin(self, (rng.stream, rng.sample, position, purpose))

    def draw(self, p_V: Tensor, u: object) -> int:
        """Call the real draw, in the middle of a cell and at both of its ends."""
        assert isinstance(u, Coin), "a draw by a number that is not keyed noise"
        assert u.scale == 1.0
        cdf = p_V.cumsum(0)
        low, high = self.split(u.name, (cdf[:-1] / cdf[-1]).tolist())
        token = sampling.draw(p_V, (low + high) / 2)
        margin = (high - low) * 1e-3
        if high - low > 1e-9:  # a smaller cell has no ends that float64 tells from its neighbours'
            assert sampling.draw(p_V, low + margin) == sampling.draw(p_V, high - margin) == token
        return token

    def split(self, name: object, points: Sequence[float]) -> tuple[float, float]:
        """Cut a coin's interval at `points` and step into the part that this path takes."""
        low, high = self._intervals.get(name, (0.0, 1.0))
        inside = sorted({point for point in points if low + 1e-14 < point < high - 1e-14})
        edges = [low, *inside, high]
        if self._step == len(self._script):
            self._script.append((0, len(inside) + 1))
        choice, count = self._script[self._step]
        assert count == len(inside) + 1, "a path did not repeat itself: something is random besides the coins"
        self._step += 1
        self._intervals[name] = edges[choice], edges[choice + 1]
        return self._intervals[name]

    def measure(self) -> float:
        product = 1.0
        for low, high in self._intervals.values():
            product *= high - low
        return product


@dataclass(frozen=True)
class Coin:
    """A number in [0, 1) that is decided as late and as little as possible."""

    coins: Coins
    name: object
    scale: float = 1.0

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.coins, self.name, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        if self.scale == 0.0:
            return bound > 0.0
        low, high = self.coins.split(self.name, [bound / self.scale])
        return (low + high) / 2 * self.scale < bound


def enumerate_outcomes(run: Callable[[Coins], Outcome]) -> dict[Outcome, float]:
    """Return all outcomes of `run` with their exact probabilities."""
    result: dict[Outcome, float] = {}
    script: list[tuple[int, int]] = []
    while True:
        coins = Coins(script)
        outcome = run(coins)
        result[outcome] = result.get(outcome, 0.0) + coins.measure()
        while script and script[-1][0] == script[-1][1] - 1:
            script.pop()
        if not script:
            return result
        choice, count = script[-1]
        script[-1] = choice + 1, count


def install(patch: pytest.MonkeyPatch, coins: Coins) -> None:
    for module in (verify, neural):
        patch.setattr(module, "uniform", coins.uniform)
        patch.setattr(module, "draw", coins.draw)


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Compute temperature, top-k, top-p and min-p with Python floats."""
    scaled = [x / params.temperature for x in logits]
    if params.top_k:
        threshold = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        scaled = [x if x >= threshold else float("-inf") for x in scaled]
    p = torch.softmax(torch.tensor(scaled, dtype=torch.float64), 0).tolist()
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
            if mass >= params.top_p:
                break
            kept.add(i)
            mass += p[i]
        p = [x / mass if i in kept else 0.0 for i, x in enumerate(p)]
    if params.min_p:
        limit = params.min_p * max(p)
        p = [x if x >= limit else 0.0 for x in p]
    return [x / sum(p) for x in p]


def plain_logits(target: Decoder, tokens: list[int]) -> Tensor:
    """Compute logits (T, V) in a plain forward pass over all tokens, with a new cache."""
    cache = target.new_cache(len(tokens), target.embedding_VE.dtype)
    layout = batch_of([Span([0], 0, len(tokens))], len(tokens), target.device)
    return target.logits(target.forward(torch.tensor(tokens, device=target.device), layout, cache)[0])


def target_sequences(
    target: Decoder,
    prompt: list[int],
    params: SamplingParams,
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> dict[tuple[int, ...], float]:
    """Return the exact probability of each output that plain sampling can give."""
    result: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    rules = processors_of(params, bad_words, eos, len(prompt), target.config.vocab_size)
    while open_:
        prefix, mass = open_.popitem()
        text = [*prompt, *prefix]
        logits = rules(torch.tensor([text]), plain_logits(target, text)[-1:])[0].tolist()
        for token, p in enumerate(reference_distribution(logits, params)):
            if p > 0.0:
                ended = token in eos or len(prefix) + 1 == params.max_tokens
                (result if ended else open_)[*prefix, token] = mass * p
    return result


def largest_difference(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})
