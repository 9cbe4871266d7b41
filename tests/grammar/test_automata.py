"""Automata of grammars. When one is made, all its states are compared with llguidance, so a test says what has one."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from specbatch.grammar.automaton import DEAD, START
from specbatch.grammar.characters import ByteTable
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import ONE_LINE, Constraint, constraint_of, with_exact_formats
from specbatch.grammar.numbers import decimals, integers
from specbatch.grammar.schema_automaton import Leaves, schema_automaton
from specbatch.grammar.token_automaton import TokenAutomaton, check
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.types import SamplingParams
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer

SCHEMAS = Path(__file__).parents[2] / "scripts" / "check" / "json_schemas.jsonl"


def automaton_of(kind: Any, text: str) -> TokenAutomaton | str:
    compiler = GrammarCompiler(tiny_tokenizer())
    found = compiler.matcher(Constraint(kind, kind, text)).automaton
    assert isinstance(found, TokenAutomaton | str)
    return found


def test_schemas_of_the_check() -> None:
    """All have automata. Three contain themselves, and texts that are nested deep leave their automata."""
    with_exit = set()
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        schema = with_exact_formats(json.dumps(entry["schema"]))
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=ONE_LINE)  # type: ignore[arg-type]
        found = schema_automaton(schema, Leaves())
        check(found, llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0))
        assert len(found) < 5000
        if found.exit != DEAD:
            with_exit.add(entry["name"])
    assert with_exit == {"openapi-parameter", "comment-tree", "expression"}


OPEN: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": "object", "properties": {"a": {"type": "null"}, "é": {}}, "required": ["é"]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"enum": ["ab", "[", 1]}]},
]


@pytest.mark.parametrize("schema", OPEN)
def test_masks_of_open_schemas(schema: dict[str, Any]) -> None:
    """Along random texts, up to where these leave the automaton. Some tokens go past its exit."""
    text = json.dumps(schema)
    start = GrammarCompiler(tiny_tokenizer()).matcher(Constraint("x", "json_schema", text))
    automaton, num_left = start.automaton, 0
    assert isinstance(automaton, TokenAutomaton)
    texts, far_Q = automaton.vocabulary.texts, np.full(len(automaton), 10_000)  # bytes from each state to the exit
    far_Q[automaton.automaton.exit] = 0
    for _ in range(200):
        far_Q = np.minimum(far_Q, 1 + np.where(automaton.next_QK == DEAD, 10_000, far_Q[automaton.next_QK]).min(axis=1))
    for seed in range(30):
        rng, matcher, tokens = np.random.default_rng(seed), start.fork(), list[int]()
        for _ in range(120):
            state = automaton.state_after(tokens)
            if automaton.leaves_Q[state]:
                num_left += 1
                break
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            bits[END] = 0
            expected, forced = np.flatnonzero(bits).tolist(), int(automaton.forced_Q[state])
            found = [i for i, text in enumerate(texts) if text and automaton.automaton.step(state, text)]
            assert expected == (found if forced < 0 else [forced])
            assert matcher.is_complete() == automaton.accepts_Q[state]
            if not expected:
                break
            ways = [far_Q[automaton.automaton.step(state, texts[i])] for i in expected]
            nearest = [i for i, way in zip(expected, ways, strict=True) if way == min(ways)]
            tokens.append(int(rng.choice(nearest if rng.random() < 0.95 else expected)))
            assert matcher.advance(tokens[-1])
    assert num_left > 0


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": 3}, "it has no type"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "it has patterns of keys, and allows any further keys"),
        ({"type": "string", "format": "uri"}, "it has the format uri"),
        ({"type": "string", "pattern": r"^\p{L}$"}, "its regex has a construct of Rust"),
        # llguidance lets the quote and the backslash come there.
        ({"type": "string", "pattern": r'^[^"\\]*$'}, "llguidance reads it in another way"),
        ({"type": "string", "maxLength": 20_000}, "it has too many states"),
    ],
)
def test_schemas_without_an_automaton(schema: dict[str, Any], reason: str) -> None:
    assert automaton_of("json_schema", json.dumps(schema)) == reason


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"anyOf": [False, {"type": "null"}]}, b"null"),
        ({"type": "array", "prefixItems": [False], "items": {"type": "string"}}, b"[]"),
    ],
)
def test_schemas_with_a_part_that_allows_nothing(schema: dict[str, Any], text: bytes) -> None:
    found = automaton_of("json_schema", json.dumps(schema))
    assert isinstance(found, TokenAutomaton)
    assert found.accepts_Q[found.automaton.step(START, text)]


def test_a_schema_that_begins_with_itself() -> None:
    """All texts leave the automaton at once."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}
    found = automaton_of("json_schema", json.dumps({"$ref": "#/$defs/loop", "$defs": {"loop": loop}}))
    assert isinstance(found, TokenAutomaton)
    assert found.leaves_Q[START]


def test_an_error_in_making_an_automaton_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise KeyError("a")

    monkeypatch.setattr("specbatch.grammar.compiler.schema_automaton", broken)
    assert automaton_of("json_schema", '{"type": "null"}') == "its automaton cannot be made: KeyError"


@pytest.mark.parametrize("regex", ["(a|b)*a(a|b){11}", "[^a]é{2,}|", r"\d{2}", "(?i)a", "a$", "(a{40}){40}"])
def test_regexes(regex: str) -> None:
    """Those that are read otherwise than llguidance does would be refused."""
    found = automaton_of("regex", regex)
    expected = {r"\d{2}": "a class of all scripts", "(?i)a": "flags", "a$": "at"}
    assert found == f"its regex has {expected[regex]}" if regex in expected else isinstance(found, TokenAutomaton)


@pytest.mark.parametrize("regex", ["((((){4096}){4096}){4096}){4096}", "(?:[a-z]{1,50}[0-9]?){1,40}"])
def test_a_regex_that_takes_much_work(regex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is a number of steps, which is the same on all ranks and machines."""
    monkeypatch.setattr("specbatch.grammar.characters._MAX_WORK", 1_000_000)
    assert automaton_of("regex", regex) == "its automaton takes long to make"


def test_choices() -> None:
    constraint = constraint_of(SamplingParams(choice=("true", "tru 🙂", "名前", "a.b")))
    assert constraint is not None
    found = automaton_of("regex", constraint.text)
    assert isinstance(found, TokenAutomaton)
    for text in ("true", "tru 🙂", "名前", "a.b"):
        assert found.accepts_Q[found.automaton.step(START, text.encode())]
    assert found.automaton.step(START, b"axb") == DEAD


def test_numbers_within_bounds() -> None:
    rng = random.Random(1)
    for _ in range(60):
        low = rng.choice([-1234, -99, -7, -1, 0, 1, 5, 99, 100, 2500])
        high = low + rng.choice([0, 1, 9, 90, 101, 5000])
        whole, point = re.compile(integers(low, high)), re.compile(decimals(low - 0.25, high + 0.5, True, False))
        for _ in range(60):
            value = rng.randint(low - 20, high + 20)
            # llguidance writes a negative zero where the bounds include 0.
            assert bool(whole.fullmatch(str(value))) == (low <= value <= high)
            number = f"{rng.uniform(low - 3, high + 3):.{rng.randint(1, 3)}f}"
            # llguidance leaves out some numbers, such as -99.2 where the lower bound is -99.25.
            assert not point.fullmatch(number) or low - 0.25 <= float(number) < high + 0.5, number


def test_forced_tokens_are_those_of_llguidance() -> None:
    """Along texts of a schema, with the same tokens; elsewhere the masks are compared by `test_grammars.py`."""
    schema = {"type": "object", "properties": {"name": {"enum": ["true", "tru"]}}, "required": ["name"]}
    constraint = Constraint("x", "json_schema", json.dumps(schema | {"additionalProperties": False}))
    start = GrammarCompiler(tiny_tokenizer()).matcher(constraint)
    automaton = start.automaton
    assert isinstance(automaton, TokenAutomaton)
    num_forced = 0
    for seed in range(5):
        rng, matcher, tokens = np.random.default_rng(seed), start.fork(), list[int]()
        while not matcher.is_complete():
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            bits[END] = 0
            legal, forced = np.flatnonzero(bits), automaton.forced_Q[automaton.state_after(tokens)]
            assert forced == (legal[0] if len(legal) == 1 else -1) or automaton.forced_Q[START] == forced
            num_forced += forced >= 0
            tokens.append(int(rng.choice(legal)))
            assert matcher.advance(tokens[-1])
    assert num_forced > 20


def test_forced_tokens_within_a_character() -> None:
    """They follow the usual tokens before them. The tokenizer has two tokens of two bytes for this emoji, and one for
    each of its bytes."""
    compiler = GrammarCompiler(load_tokenizer(resolve_model("builtin:smollm2-135m-instruct")))
    schema = {"type": "object", "properties": {"🙂": {"type": "null"}, "x": {"type": "null"}}}
    matcher = compiler.matcher(Constraint("x", "json_schema", json.dumps(schema | {"additionalProperties": False})))
    automaton, emoji = matcher.automaton, "🙂".encode()
    assert isinstance(automaton, TokenAutomaton)
    tokens = [automaton.vocabulary.texts.index(text) for text in (b'{"', emoji[:2], emoji[2:])]
    assert matcher.advance_by(tokens[:2]) == 2
    assert matcher.only_token() == tokens[2]
    assert automaton.forced_Q[automaton.state_after(tokens[:2])] == tokens[2]


def test_the_first_grammars_of_a_job_have_automata() -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), max_automata=2)
    found = [compiler.matcher(Constraint("regex", "regex", text)).automaton for text in ("a", "b", "c", "a")]
    assert [isinstance(one, TokenAutomaton) for one in found] == [True, True, False, True]
    assert found[2] == "the job has more than 2 grammars"


def test_memory_of_leaves() -> None:
    """Kept automata have a bound, and one that was dropped is made again."""
    leaves, table = Leaves(), ByteTable(np.zeros((50_000, 256), dtype=np.int32), np.zeros(50_000, dtype=np.bool_))
    assert all(leaves.of(key, lambda: table) is table for key in range(10))
    assert 0 < sum(len(one.next_QB) for one in leaves._known.values()) <= 1 << 17
