"""Grammars that are huge or deep, and those that meet a limit of the library: errors, in bounded time."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import llguidance
import pytest

from specbatch.engine.constrained.state import GrammarState
from specbatch.errors import FieldError, RowError
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.grammar.deep_thread import Abandoned, DeepThread
from specbatch.grammar.reasoning import AfterReasoning
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.results.crashes import RunningRows, last_crash
from specbatch.types import SamplingParams
from tests.processes import Command

TOKENIZER = byte_tokenizer(300, [299])
COMPILER = GrammarCompiler(TOKENIZER, 2)
DEPTH = 3000
DEEP_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(DEPTH)) + f'r{DEPTH}: "a"\n'


def optional_keys(count: int) -> dict[str, Any]:
    keys = {f"p{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": keys, "additionalProperties": False}


def schema(value: dict[str, Any]) -> Constraint:
    return Constraint("response_format", "json_schema", json.dumps(value))


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_deep_rules_and_references_are_compiled() -> None:
    """The stack of a thread of the usual size overflows with them."""
    definitions = {f"r{i}": {"type": "array", "items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(DEPTH)}
    chain = schema({"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{DEPTH}": {"const": 1}}})
    for constraint, text in ((Constraint("grammar", "grammar", DEEP_RULES), "a"), (chain, "[[]]")):
        matcher = COMPILER.matcher(constraint)
        assert matcher.advance_by(tokens_of(text)) == len(text)
        assert matcher.is_complete()


def test_an_overflow_of_the_stack_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl.partial.running"

    def main() -> None:
        with RunningRows(path, "job") as running:
            running.start(7, 70)
            tokenizer = llguidance.LLTokenizer("byte")
            DeepThread(lambda: llguidance.LLMatcher(tokenizer, DEEP_RULES), 1 << 20).result(60, threading.Event())

    Command(tmp_path, main=main).communicate()
    crash = last_crash(path, "job")
    assert crash is not None
    assert crash.cause.startswith("segmentation fault")
    assert crash.rows == {7: 70}


@pytest.mark.wide
def test_500_optional_keys_can_be_written() -> None:
    matcher = COMPILER.matcher(schema(optional_keys(500)))
    tokens = tokens_of('{"p7": "x", "p499": "y"}')
    assert matcher.advance_by(tokens) == len(tokens)
    assert matcher.is_complete()


@pytest.mark.parametrize("after_reasoning", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_limit_of_the_library_is_not_met_by_what_is_only_tried(after_reasoning: bool) -> None:
    """It is the error of the text that goes on with the token, and of no other one."""
    brace = tokens_of("{")[0]
    matcher: Any = COMPILER.matcher(schema({"anyOf": [optional_keys(2600), {"const": 12}]}))
    if after_reasoning:
        matcher = AfterReasoning(matcher, 298, (297,), 300)
    assert matcher.failure(None) is None
    assert not matcher.advance(brace)
    assert not matcher.advance_by([brace])
    assert "max is" in (matcher.failure(brace) or "")
    assert matcher.failure(tokens_of("1")[0]) is None
    state = GrammarState(matcher, (299,), (), 300)
    assert state.mask().any()
    assert state.enter_all(tokens_of("12")) == 2
    assert state.failure_after([], 0) is None
    state.back(2)
    state.follow([5, brace], num_prompt=1)
    assert "max is" in (state.failure or "")
    assert not state.may_end_after([5, brace], 1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"choice": tuple(map(str, range(200_000)))}, "choice has 1,088,890 characters, and 1,048,576 can be compiled"),
        ({"grammar": "#" * (1 << 21)}, "grammar has 2,097,152 characters"),
        ({"regex": "a" * (1 << 21)}, "regex has 2,097,152 characters"),
        ({"response_format": json.dumps({"type": "json_object", "x": "y" * (1 << 21)})}, "response_format has"),
    ],
)
def test_a_huge_option_is_an_error(params: dict[str, Any], words: str) -> None:
    with pytest.raises(FieldError, match=words):
        constraint_of(SamplingParams(**params))


def test_a_compilation_has_a_bound_of_time() -> None:
    """The second row with the grammar does not wait again, and other grammars are compiled meanwhile."""
    compiler = GrammarCompiler(TOKENIZER, 1, max_seconds=0.3)
    compiler.matcher(Constraint("regex", "regex", "a"))
    slow = schema(optional_keys(9000))
    found: list[float] = []

    def compile_slow() -> None:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(RowError, match=r"longer than 0\.3 seconds"):
                compiler.matcher(slow)
            found.append(time.monotonic() - began)

    thread = threading.Thread(target=compile_slow)
    thread.start()
    time.sleep(0.05)
    compiler.matcher(Constraint("regex", "regex", "a"))
    assert not found
    thread.join()
    assert found[1] < 0.1 < found[0]


def test_nobody_waits_for_a_compilation_when_the_job_ends() -> None:
    compiler = GrammarCompiler(TOKENIZER, 1)
    threading.Timer(0.2, compiler.close).start()
    began = time.monotonic()
    with pytest.raises(RowError, match="the job is ending"):
        compiler.matcher(schema(optional_keys(9000)))
    assert time.monotonic() - began < 3


def test_a_thread_returns_and_raises_what_its_work_does() -> None:
    never = threading.Event()
    assert DeepThread(lambda: 3).result(5, never) == 3
    with pytest.raises(ZeroDivisionError):
        DeepThread(lambda: 1 // 0).result(5, never)

    def panic() -> None:
        raise SystemExit("a panic")

    with pytest.raises(RuntimeError, match="a panic"):
        DeepThread(panic).result(5, never)
    with pytest.raises(Abandoned):
        DeepThread(lambda: time.sleep(1)).result(0.01, never)
