"""Grammars: what compiles, what is refused, and which tokens may come next."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specbatch.engine.constrained.state import GrammarState
from specbatch.errors import FieldError, RowError
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.types import SamplingParams
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCAB = len(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER)
NAMES = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}


def json_schema(schema: dict[str, Any]) -> str:
    return json.dumps({"type": "json_schema", "json_schema": {"schema": schema}})


def state_of(stop_token_ids: tuple[int, ...] = (), **params: Any) -> GrammarState:
    constraint = constraint_of(SamplingParams(**params))
    assert constraint is not None
    return GrammarState(COMPILER.matcher(constraint), (END,), stop_token_ids, VOCAB)


def tokens_of(mask_W: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def write(state: GrammarState, text: str) -> bool:
    """Whether the whole text is allowed, and may end after it."""
    output = TOKENIZER.encode(text, add_special_tokens=False)
    for token in output:
        if token not in tokens_of(state.mask()):
            return False
        state.enter(token)
    return END in tokens_of(state.mask())


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        ({"choice": ("yes", "yes_sir", "no.")}, ["yes", "yes_sir", "no."], ["ye", "no", "noa", "yes_"]),
        ({"regex": "[a-c]{2}-?[0-9]+"}, ["ab-1", "cc10"], ["a", "ab", "ab-", "abc1"]),
        ({"grammar": 'root ::= "a" ("b" | root)'}, ["ab", "aab"], ["a", "b", "abb"]),
        ({"grammar": 'start: "a" /[0-9]/+'}, ["a1", "a10"], ["a", "1"]),
        ({"response_format": '{"type": "json_object"}'}, ["{}", '{"a": [1, true]}'], ["[]", '"a"', '{"a":1}']),
        ({"response_format": json_schema(NAMES)}, ['{"name": "b", "n": 10}'], ['{"n": 1}', "{}", '{"name": 1}']),
    ],
)
def test_texts_of_a_grammar(params: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [write(state_of(**params), text) for text in right] == [True] * len(right)
    assert [write(state_of(**params), text) for text in wrong] == [False] * len(wrong)


UNSUPPORTED_SCHEMAS: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "format: iri": {"type": "string", "format": "iri"},
    "oneOf": {"oneOf": [{"minimum": 0, "type": "integer"}, {"maximum": 9, "type": "integer"}]},
    "example.com": {"$ref": "https://example.com/schema.json"},
    "strng": {"type": "strng"},
    "Unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 3},
    "no text": {"$ref": "#"},
}


@pytest.mark.parametrize("word", UNSUPPORTED_SCHEMAS)
def test_a_schema_that_cannot_be_followed_is_an_error(word: str) -> None:
    with pytest.raises(RowError, match="response_format cannot be used") as caught:
        state_of(response_format=json_schema(UNSUPPORTED_SCHEMAS[word]))
    assert word in caught.value.message
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "(a"}, "unclosed group$"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "root ::= x"}, ".*'x' not found"),
        ({"grammar": "("}, ".*line 1"),
    ],
)
def test_a_regex_or_grammar_with_a_mistake_is_an_error(params: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=f"{next(iter(params))} cannot be used: {words}"):
        state_of(**params)


def test_a_complete_text_has_to_end() -> None:
    with pytest.raises(FieldError, match="ignore_eos and regex"):
        constraint_of(SamplingParams(regex="a", ignore_eos=True))
    assert constraint_of(SamplingParams(response_format='{"type": "text"}', ignore_eos=True)) is None


def test_rows_with_the_same_schema_share_its_constraint() -> None:
    """To close a schema and to write exact formats into it takes longer than all else that a row costs."""
    form = json.dumps({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"format": "date"}}}}})
    first, second = (constraint_of(SamplingParams(response_format=form)) for _ in range(2))
    assert first is second


def test_stop_tokens_come_where_the_text_is_complete() -> None:
    """And also where the grammar has their text."""
    stop = TOKENIZER.convert_tokens_to_ids("s")
    state = state_of((stop,), regex="ys?a?")
    assert tokens_of(state.mask()) == [TOKENIZER.convert_tokens_to_ids("y")]
    assert not write(state, "b")
    write(state, "y")
    assert set(tokens_of(state.mask())) == {END, stop, TOKENIZER.convert_tokens_to_ids("a")}
    write(state, "a")
    assert set(tokens_of(state.mask())) == {END, stop}


@pytest.mark.parametrize("seed", range(3))
def test_masks_depend_on_the_path_alone(seed: int) -> None:
    """Not on masks that were computed before, nor on tokens that were tried and taken back. And where no token is
    forced, the mask is what `allows` says."""
    rng = random.Random(seed)
    params = [{"response_format": json_schema(NAMES)}, {"regex": "(na|name|nam_)+[0-9]{2}"}, {"choice": ("tr", "true")}]
    num_forced = 0
    for one in params:
        state, output, masks = state_of(**one), [], []
        for _ in range(60):
            forced = next(iter(state.forced(1)), None)
            masks.append(state.mask())
            legal = tokens_of(masks[-1])
            allowed = [token for token in range(VOCAB) if state.allows(token)]
            assert legal == allowed or (forced is not None and forced in allowed)
            assert forced == (legal[0] if len(legal) == 1 else None)
            num_forced += len(legal) == 1
            for _ in range(2):
                excursion = 0
                while (tried := [t for t in tokens_of(state.mask()) if t != END]) and excursion < 3:
                    state.enter(rng.choice(tried))
                    excursion += 1
                state.back(excursion)
            if (token := rng.choice(legal)) == END:
                break
            output.append(token)
            state.follow(output)
        other = state_of(**one)
        for length, mask_W in enumerate(masks):
            other.follow(output[:length])
            if rng.random() < 0.5:
                assert tokens_of(other.mask()) == tokens_of(mask_W)
    assert num_forced > 3


def test_masks_that_threads_compute_together() -> None:
    """Each is what the state gives alone; one has ended, and one is in twice the same place."""
    wanted = [{"response_format": json_schema(NAMES)}, {"regex": "tru|true"}, {"choice": ("true", "name")}] * 2
    alone, together = ([state_of(**one) for one in wanted] for _ in range(2))
    lengths = []
    for _ in range(5):
        masks = np.full((len(together), -(-VOCAB // 32)), 77, dtype=np.int32)
        order = [3, 0, 5, 1, 4, 2]
        walks = [(state, state.walk((), (), line)) for state, line in zip(together, order, strict=True)]
        GrammarState.write_masks(walks, masks)
        masks = masks[order]
        assert [tokens_of(mask_W) for mask_W in masks] == [tokens_of(state.mask()) for state in alone]
        lengths += [len(tokens_of(mask_W)) for mask_W in masks]
        for states in (alone, together):
            for state in states:
                if (legal := [t for t in tokens_of(state.mask()) if t != END]) and not state.is_end(legal[0]):
                    state.enter(legal[-1])
    assert min(lengths) == 1 < max(lengths)
    GrammarState.write_masks([], np.empty((0, 1), dtype=np.int32))


def test_a_text_that_the_tokenizer_has_as_a_mark() -> None:
    """The library would force a token that it then refuses: it is an error before the row runs."""
    tokenizer = byte_tokenizer(300, [0])
    tokenizer.add_tokens(["<think>"])
    with pytest.raises(RowError, match="no text matches it"):
        GrammarCompiler(tokenizer).matcher(Constraint("regex", "regex", "<think>a"))
    assert GrammarCompiler(tokenizer).matcher(Constraint("regex", "regex", "a|b")).mask().any()


def test_bytes_of_a_sentencepiece_tokenizer() -> None:
    """Byte-fallback tokens are bytes of the text; control tokens are none."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "1"]
    backend = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(texts)}, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts[:3]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("regex", "regex", "a é1"))
    state = GrammarState(matcher, (2,), (), len(texts))
    output: list[int] = []
    while (legal := tokens_of(state.mask())) != [2]:
        assert set(legal) <= set(range(3, len(texts)))
        output.append(legal[-1])
        state.follow(output)
    assert tokenizer.decode(output) == "a é1"
    assert 3 + 0xC3 in output


def test_a_tokenizer_without_an_end_and_one_larger_than_the_model() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("regex", "regex", "a|y|<60>"))
    state = GrammarState(matcher, (), (7,), VOCAB - 6)
    known = tokenizer.convert_tokens_to_ids(["a", "y", "<"])
    assert tokens_of(state.mask()) == sorted(known)
    state.enter(known[0])
    assert tokens_of(state.mask()) == [7]


def test_requests_of_one_grammar_do_not_disturb_each_other() -> None:
    first, second = (state_of(regex="ab[cd]") for _ in range(2))
    begin = tokens_of(second.mask())
    write(first, "ab")
    assert tokens_of(second.mask()) == begin != tokens_of(first.mask())
