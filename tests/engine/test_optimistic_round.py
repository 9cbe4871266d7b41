"""Rounds of plain decoding whose choices are taken before grammars have seen them: texts and margins are those of
rounds that are checked, and the device never waits for the host."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.engine import reports
from specbatch.engine.constrained.optimistic_round import UncheckedRound
from specbatch.engine.constrained.policy import AdaptiveToggle
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.engine import Engine
from specbatch.engine.transfers import Download
from specbatch.grammar.constraint import constraint_of
from specbatch.grammar.reasoning import AfterReasoning
from specbatch.types import Completion, FinishReason, Request
from tests.engine.graphs import Replays
from tests.engine.test_constrained import COMPILER, GRAMMARS, ROWS, TOKENIZER, requests
from tests.grammar.tiny_tokenizer import END
from tests.tiny_models import run_requests, tiny_device_engine, tiny_oracle


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> list[type[GrammarRound]]:
    """A tiny model's choices are mostly refused, so that it would not pay."""
    seen: list[type[GrammarRound]] = []
    monkeypatch.setattr(
        "specbatch.engine.constrained.policy.Grammars._saw", lambda self, round_: seen.append(type(round_))
    )
    return seen


def unchecked(**settings: Any) -> Engine:
    return tiny_device_engine(eos=(END,), checks=False, **settings)


def texts(completions: list[Completion]) -> list[Any]:
    return [
        (c.token_ids, c.finish_reason, c.no_token_left, [one.token_id for one in c.logprobs or ()]) for c in completions
    ]


def margins(completions: list[Completion]) -> list[tuple[str, int]]:
    return [(f"{c.margin.value:.5g}", c.margin.position) for c in completions]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {TOKENIZER.vocab["na"]: 2.0}},
    "minimum": {"min_tokens": 9, "logprobs": 2},
    "forbidden": {"bad_words": ("true",), "logit_bias": {TOKENIZER.vocab["1"]: -100.0}},
    "stops": {"stop_token_ids": (TOKENIZER.vocab["1"],)},
}


def rows(variant: str, temperatures: tuple[float, ...] = (0.0,)) -> list[Request]:
    options = dict(VARIANTS[variant])
    words = tuple((TOKENIZER.vocab[word],) for word in options.get("bad_words", ()))
    found = []
    for request in requests(temperatures, ROWS):
        found.append(replace(request, params=replace(request.params, **options), bad_words=words))
    return found


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.8)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_the_oracle(
    variant: str, temperatures: tuple[float, ...], graphs: bool, always: list[type[GrammarRound]]
) -> None:
    expected = run_requests(tiny_oracle(eos=(END,)), rows(variant, temperatures))
    checked = run_requests(tiny_device_engine(eos=(END,), max_batch_size=5), rows(variant, temperatures))
    del always[:]
    engine = unchecked(max_batch_size=5)
    if graphs:
        engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    found = run_requests(engine, rows(variant, temperatures))
    engine.check_integrity()
    assert texts(found) == texts(expected)
    assert margins(found) == margins(checked)
    assert set(always) == {UncheckedRound}
    assert engine.stats.grammar.refused > 5
    assert engine.stats.grammar.forced > 5


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["none", "phases", "round"])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.8)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_a_gpu(variant: str, temperatures: tuple[float, ...], graphs: Any) -> None:
    settings: dict[str, Any] = {"num_pages": 256, "device": torch.device("cuda"), "graphs": graphs}
    expected = run_requests(tiny_oracle(eos=(END,)), rows(variant, temperatures))
    checked = run_requests(tiny_device_engine(eos=(END,), **settings), rows(variant, temperatures))
    found = run_requests(unchecked(**settings), rows(variant, temperatures))
    assert texts(found) == texts(checked) == texts(expected)
    assert margins(found) == margins(checked)


@pytest.mark.parametrize("checks", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_the_device_waits_for_nothing(checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host waits for was launched before the target's last forward pass, which runs meanwhile."""
    engine, forwards, waits = tiny_device_engine(eos=(END,), checks=checks), 0, list[int]()
    launched: dict[int, int] = {}  # forward passes when a download began, by its id

    class Recorded(Replays):
        def replay(self, key: Any) -> Any:
            nonlocal forwards
            forwards += key[0] == "grammar forward"
            return super().replay(key)

    download, wait = engine._transfers.download, Download.wait

    def begun(tensor: torch.Tensor) -> Download:
        found = download(tensor)
        launched[id(found)] = forwards
        return found

    def waited(self: Download) -> Any:
        if forwards and engine.num_running == 2 and engine._scheduler.running[0].prefill_done:
            waits.append(forwards - launched[id(self)])
        return wait(self)

    monkeypatch.setattr(engine._transfers, "download", begun)
    monkeypatch.setattr(Download, "wait", waited)
    engine.executor.mode, engine.executor.runner = "round", Recorded(lambda key: False)  # type: ignore[assignment]
    run_requests(engine, requests((0.0,), ["object", "object"]))
    assert len(waits) > 5
    assert min(waits) == (0 if checks else 1)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(3, 12))])
def test_any_order_of_admission_end_preemption_and_shortage(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked rounds among the others, rows without grammars, reasoning, small caches, memory that runs out."""
    rng = random.Random(seed)
    begin, end = rng.choice((None, 7)), rng.randrange(8, 60)

    def some() -> list[Request]:
        found = []
        for i, request in enumerate(rows("plain", (0.0, 0.0, 0.7))):
            constraint = constraint_of(request.params)
            if constraint is not None and i % 3 == 0:
                matcher: Any = AfterReasoning(COMPILER.matcher(constraint), begin, (end,), len(TOKENIZER))
                request = replace(request, matcher=matcher)
            found.append(request)
        return found

    expected = run_requests(tiny_oracle(eos=(END,)), some())
    engine = unchecked(max_batch_size=rng.choice((2, 5, 16)), num_pages=rng.choice((28, 64)), prefill_chunk_tokens=24)
    monkeypatch.setattr(engine._grammars._unchecked, "next", lambda: rng.random() < 0.8)
    monkeypatch.setattr(engine._grammars._room, "next", lambda: rng.random() < 0.7)
    left = rng.choice((0, 3))
    finish = engine.executor.rounds.items[0].__class__.finish

    def short(self: Any, *args: Any) -> Any:
        nonlocal left
        if left and rng.random() < 0.05:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return finish(self, *args)

    monkeypatch.setattr(engine.executor.rounds.items[0].__class__, "finish", short)
    pending, done = some(), dict[int, Completion]()
    while len(done) < len(expected):
        for request in pending[: rng.randrange(4)]:
            engine.submit(pending.pop(pending.index(request)))
        done |= {c.request_id: c for c in engine.step()}
        engine.check_integrity()
    found = [done[i] for i in sorted(done)]
    assert texts(found) == texts(expected)


def test_logits_that_are_not_finite_are_an_error() -> None:
    """Also where the grammar knows the token."""
    engine = unchecked()
    raw = engine.executor.rounds.items[0]._target.raw_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = raw(hidden)
        return logits.fill_(float("nan")) if engine.stats.rounds > 4 else logits

    engine.executor.rounds.items[0]._target.raw_logits = broken  # type: ignore[method-assign]
    found = run_requests(engine, requests((0.0,), ["regex", "schema"]))
    assert {one.finish_reason for one in found} <= {FinishReason.ERROR, FinishReason.STOP, FinishReason.LENGTH}
    assert FinishReason.ERROR in {one.finish_reason for one in found}


def test_it_is_given_up_where_grammars_refuse_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine, kinds = unchecked(), []
    of_round = engine._grammars.of_round

    def seen(*args: Any) -> Any:
        kinds.append(type(of := of_round(*args)))
        return of

    monkeypatch.setattr(engine._grammars, "of_round", seen)
    run_requests(engine, requests((0.0,), [*GRAMMARS, "schema", "object"]))
    assert kinds[0] is UncheckedRound
    assert kinds.count(GrammarRound) > kinds.count(UncheckedRound)


@pytest.mark.parametrize("at", range(1, 20))
def test_a_checked_round_after_a_round_that_failed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets what the failed one has planned, and that its tokens were to be checked."""
    names = ["schema", "regex", "choice", "schema"]
    expected = run_requests(tiny_oracle(eos=(END,)), requests((0.0,), names))
    engine = unchecked()
    round_ = type(engine.executor.rounds.items[0])
    finish, num_finished, num_later = round_.finish, 0, 0
    dropped: list[int] = []

    def finish_or_fail(self: Any, *args: Any) -> Any:
        nonlocal num_finished
        num_finished += 1
        if num_finished == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return finish(self, *args)

    def is_unchecked() -> bool:
        nonlocal num_later
        num_later += num_finished >= at
        return num_later != 1

    def admit(self: GrammarState, tokens: Any) -> int:
        count = admitted(self, tokens)
        dropped.extend(tokens[count:] if num_later == 2 else [])  # of the round that was checked
        return count

    admitted = GrammarState.admit
    monkeypatch.setattr(round_, "finish", finish_or_fail)
    monkeypatch.setattr(GrammarState, "admit", admit)
    monkeypatch.setattr(engine._grammars._unchecked, "next", is_unchecked)
    monkeypatch.setattr(engine._grammars._room, "next", lambda: True)
    found = run_requests(engine, requests((0.0,), names))
    engine.check_integrity()
    assert texts(found) == texts(expected)
    assert dropped == []


def test_each_pass_and_each_accepted_draft_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token is refused, those before it were drafts, and a pass that commits nothing is one."""
    seen: dict[Any, list[int]] = {}
    read_round = reports._read_round

    def read(seq: Any, report: list[int], *args: Any) -> Any:
        before, request = len(seq.tokens), seq.request.request_id
        reason = read_round(seq, report, *args)
        committed = len(seq.tokens) - before
        passes = seen.setdefault(request, [0, 0, 0, 0])
        for i, count in enumerate((1, report[1], min(report[0] - 1, committed), committed)):
            passes[i] += count
        return reason

    monkeypatch.setattr(reports, "_read_round", read)
    engine = unchecked()
    monkeypatch.setattr(engine._grammars._room, "next", lambda: True)
    names = [*GRAMMARS, "schema", "regex"]
    found = run_requests(engine, requests((0.0,), names))
    num_for_nothing = 0
    for completion in found:
        counts, passes = completion.speculation, seen[completion.request_id]
        assert [counts.drafted, counts.accepted, counts.committed] == passes[1:]
        assert sum(counts.histogram) == sum(counts.depths) == counts.rounds >= passes[0]
        num_for_nothing += counts.rounds - passes[0]
    assert engine.stats.grammar.refused > 5
    assert num_for_nothing > 5  # begun with a token that was refused


def test_rounds_that_depend_on_nothing_else(always: list[type[GrammarRound]]) -> None:
    """As with engine.deterministic: results have the same bytes, with their numbers of rounds."""

    def found(batch: int) -> list[Any]:
        engine = unchecked(max_batch_size=batch, deterministic=True)
        return [(c.token_ids, c.speculation, c.margin) for c in run_requests(engine, rows("plain", (0.0, 0.7)))]

    alone = found(1)
    assert alone == found(4) == found(16)
    assert set(always) == {GrammarRound}
    assert all(counts.rounds == counts.committed == len(tokens) - 1 for tokens, counts, _ in alone)


def test_sampled_rows_do_not_hide_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one greedy row, whose choices are mostly refused, and nine sampled ones, whose choices never are."""
    monkeypatch.undo()
    seen: list[float] = []
    saw = AdaptiveToggle.saw

    def record(self: AdaptiveToggle, gain: float, num_requests: int) -> None:
        saw(self, gain, num_requests)
        if self is engine._grammars._unchecked:
            seen.append(self._mean)

    engine = unchecked(max_batch_size=16)
    monkeypatch.setattr(AdaptiveToggle, "saw", record)
    run_requests(engine, requests((0.0, *[0.9] * 9), ["schema"] * 10))
    assert min(seen) < 0.85
