"""Masks that threads compute at the same time."""

from __future__ import annotations

import pytest

from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.matcher import Matcher
from tests.grammar.tiny_tokenizer import tiny_tokenizer

WORDS = Constraint("regex", "regex", "(na|name|nam_)+[0-9]{2}")


def lexers(matchers: list[Matcher]) -> int:
    return len({id(one._compiled) for one in matchers})


@pytest.mark.parametrize(("num_threads", "count", "expected"), [(1, 9, 1), (4, 4, 1), (4, 9, 3), (3, 30, 3)])
def test_requests_of_one_grammar_have_lexers_for_threads(num_threads: int, count: int, expected: int) -> None:
    """Copies of one lexer would wait for each other."""
    compiler = GrammarCompiler(tiny_tokenizer(), num_threads)
    assert lexers([compiler.matcher(WORDS, on_host=True) for _ in range(count)]) == expected


def test_requests_that_follow_each_other_have_one_lexer() -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), 4)
    first = compiler.matcher(WORDS)
    used = first._compiled
    del first
    assert all(compiler.matcher(WORDS)._compiled is used for _ in range(3))


def test_a_grammar_that_is_slow_to_compile_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.grammar.compiler._MAX_COPY_SECONDS", 0.0)
    compiler = GrammarCompiler(tiny_tokenizer(), 4)
    assert lexers([compiler.matcher(WORDS, on_host=True) for _ in range(9)]) == 1


def test_copies_count_where_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.grammar.compiler._MAX_COMPILED", 3)
    compiler = GrammarCompiler(tiny_tokenizer(), 2)
    first = [compiler.matcher(WORDS, on_host=True) for _ in range(5)]
    other = [compiler.matcher(Constraint("regex", "regex", "a|b"), on_host=True) for _ in range(5)]
    assert len(compiler._compiled) == 1
    assert lexers(first) == lexers(other) == 2  # those in use go on
    assert first[0].mask().any()


def test_a_fork_goes_on_by_itself() -> None:
    tokenizer = tiny_tokenizer()
    matcher = GrammarCompiler(tokenizer, 2).matcher(WORDS)
    begin = matcher.mask()
    n, digit = tokenizer.convert_tokens_to_ids(["n", "1"])
    assert matcher.allows(n)
    assert not matcher.allows(digit)
    assert not matcher.allows(len(tokenizer) + 1)
    fork = matcher.fork()
    assert fork.advance(n)
    assert (matcher.mask() == begin).all()
    assert (fork.mask() != begin).any()
    fork.back(1)
    assert (fork.mask() == begin).all()
