"""Calls of tools that a row requires, and grammars of answers that come after reasoning: by matchers of the texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import FieldError, RowError
from specbatch.grammar.tool_calls import calls_of
from specbatch.job.row_queue import RowPreparer
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.chat_output import Answer
from specbatch.types import EngineLimits, SamplingParams
from tests.rows.chat_templates import HERMES, LLAMA3, QWEN3

USER = {"role": "user", "content": "How cold?"}
OBJECT = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": OBJECT | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
WEATHER = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


class Row:
    """One row of a chat, and whether an answer is in its grammar. `marks`: tokens that the tokenizer has for them."""

    def __init__(
        self, template: str, fields: dict[str, Any], marks: tuple[str, ...] = (), special: bool = False
    ) -> None:
        self.tokenizer = byte_tokenizer(300, [0])
        self.tokenizer.add_tokens(list(marks), special_tokens=special)
        data = DataSection(chat_template=template)
        texts = TextProcessor(self.tokenizer, data)
        raw = RawRow(0, json.dumps({"messages": [USER], **fields}).encode())
        row = RowParser(SamplingParams(), data).parse(raw)
        texts.encode(row, EngineLimits(4000, len(self.tokenizer)))
        self.reader = row.reader = texts.answer_reader(row)
        grammar = texts.matcher(row)
        self.matcher = None if grammar is None else grammar[0]

    def takes(self, text: str) -> bool:
        """And what it takes is taken back."""
        assert self.matcher is not None
        ids, taken = self.tokenizer.encode(text, add_special_tokens=False), 0
        for token in ids:
            in_mask = bool(self.matcher.mask()[token >> 5] >> (token & 31) & 1)
            assert self.matcher.advance(token) == in_mask
            if not in_mask:
                break
            taken += 1
        complete = taken == len(ids) and self.matcher.is_complete()
        self.matcher.back(taken)
        return complete

    def read(self, text: str) -> Answer:
        return self.reader.read(text)


CASES: list[tuple[str, Any, list[str], list[str]]] = [
    (HERMES, "required", [hermes(WEATHER), hermes(NOW), hermes(NOW, WEATHER)],
     ["It is cold.", hermes(WEATHER.replace("Rome", "x" * 30)), hermes(NOW.replace("now", "then")), hermes(NOW) + "x"]),
    (HERMES, NAMED, [hermes(NOW), hermes(NOW, NOW)], [hermes(WEATHER), NOW]),
    (LLAMA3, "required", [c.replace("arguments", "parameters") for c in (WEATHER, NOW)], [NOW, "It is cold."]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "choice", "legal", "illegal"), CASES)
def test_a_call_that_is_required(template: str, choice: Any, legal: list[str], illegal: list[str]) -> None:
    row = Row(template, {"tools": TOOLS, "tool_choice": choice})
    for text in legal:
        assert row.takes(text), text
        assert row.read(text).tool_calls
    for text in illegal:
        assert not row.takes(text), text


def test_a_required_call_is_json_on_one_line() -> None:
    """A model that may write spaces can write them without end."""
    row = Row(HERMES, {"tools": TOOLS, "tool_choice": "required"})
    for text in (NOW.replace("{", "{ ", 1), NOW.replace(": ", ":  "), WEATHER.replace("{", "{\n")):
        assert not row.takes(hermes(text)), text


@pytest.mark.parametrize("pointer", ["#/$defs/unit", "#"])
def test_parameters_with_references(pointer: str) -> None:
    parameters = {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "type": "object",
        "properties": {"unit": {"$ref": pointer}},
        "additionalProperties": False,
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "heat", "parameters": parameters}}]
    row = Row(HERMES, {"tools": tools, "tool_choice": "required"})
    taken = [row.takes(hermes(f'{{"name": "heat", "arguments": {{"unit": {unit}}}}}')) for unit in ('"C"', "{}", '"K"')]
    assert taken == [pointer != "#", pointer == "#", False]


K = {"k": {"enum": ["x"]}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "additionalProperties": False}
PARAMETERS: list[tuple[dict[str, Any] | None, list[str], list[str]]] = [
    # a value is no schema, and what looks like a reference in it is none
    ({"properties": {"a": {"const": {"$ref": "#/x"}}}}, ['{"a": {"$ref": "#/x"}}'], ['{"a": 1}']),
    ({"properties": {"a": {"enum": ["#", {"$ref": "#"}]}}}, ['{"a": {"$ref": "#"}}', '{"a": "#"}'], ['{"a": {}}']),
    ({"properties": {"a": {"type": "integer", "default": {"$ref": "#/no"}}}}, ['{"a": 1}'], ['{"a": "b"}']),
    ({"properties": {"$ref": {"const": "q"}}}, ['{"$ref": "q"}'], ['{"$ref": "p"}']),
    # references within parameters with a name of their own, and to other names
    ({"$id": "http://e.x/s", "properties": {"a": {"$ref": "#/$defs/k"}}, "$defs": K}, ['{"a": "x"}'], ['{"a": "y"}']),
    ({"$id": "http://e.x/s", "properties": {"a": {"$ref": "http://e.x/s#/$defs/k"}}, "$defs": K},
     ['{"a": "x"}'], ['{"a": "y"}']),
    ({"properties": {"a": {"$ref": "#k"}}, "$defs": {"k": {"$anchor": "k", "enum": ["x"]}}},
     ['{"a": "x"}'], ['{"a": "y"}']),
    ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, ['{"next": {"next": {}}}'], ['{"next": 1}', "[]"]),
    ({"$ref": "#/$defs/a~1b%7Bc", "$defs": {"a/b{c": {**NODE, "properties": {"a": {"$ref": "#"}}}}},
     ['{"a": {"a": {}}}'], ['{"next": 1}', "[]"]),
    # arguments are an object, whatever else the parameters allow
    (None, ["{}", '{"a": [1]}'], ["[]", "null", "1"]),
    ({}, ["{}"], ["[]", "null"]),
    ({"required": ["a"]}, ['{"a": 1}'], ["[]", "{}"]),
    ({"type": ["object", "null"]}, ["{}"], ["null"]),
    ({"anyOf": [{"type": "array"}, {"properties": {"a": {"const": 1}}}]}, ['{"a": 1}'], ["[]", '{"a": 2}']),
    ({"enum": [{"a": 1}, [1], None]}, ['{"a": 1}'], ["[1]", "null", "{}"]),
    ({"$ref": "#/$defs/k", "$defs": {"k": {"required": ["a"]}}}, ['{"a": 1}'], ["[]", "{}"]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "field"), [(HERMES, "arguments"), (LLAMA3, "parameters")])
@pytest.mark.parametrize(("parameters", "legal", "illegal"), PARAMETERS)
def test_parameters_mean_what_they_mean_alone(
    parameters: dict[str, Any] | None, legal: list[str], illegal: list[str], template: str, field: str
) -> None:
    function = {"name": "heat", "parameters": parameters}
    row = Row(template, {"tools": [*TOOLS, {"type": "function", "function": function}], "tool_choice": "required"})

    def call(arguments: str) -> str:
        text = f'{{"name": "heat", "{field}": {arguments}}}'
        return hermes(text) if template == HERMES else text

    assert [text for text in [*legal, *illegal] if row.takes(call(text))] == legal
    for text in legal:
        assert [json.loads(one.arguments) for one in row.read(call(text)).tool_calls] == [json.loads(text)]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "Pointer '/$defs/a' does not exist"),
        ({"required": ["a"], "additionalProperties": False}, "required property 'a' is unsatisfiable"),
    ],
)
def test_an_error_names_the_tool_whose_parameters_cannot_be_used(parameters: dict[str, Any], words: str) -> None:
    tools = [*TOOLS, {"function": {"name": "heat", "parameters": parameters}}]
    with pytest.raises(RowError) as caught:
        Row(HERMES, {"tools": tools, "tool_choice": "required"})
    assert caught.value.message.startswith("tools[2].function.parameters cannot be used: ")
    assert words in caught.value.message
    assert Row(HERMES, {"tools": tools, "tool_choice": NAMED}).takes(hermes(NOW))


@pytest.mark.parametrize(("strict", "is_closed"), [(True, True), (False, False), (None, False)])
def test_only_strict_closes_arguments(strict: bool | None, is_closed: bool) -> None:
    inner = {"type": "object", "properties": {"b": {"const": 1}}}
    function = {"name": "heat", "strict": strict, "parameters": {"type": "object", "properties": {"a": inner}}}
    row = Row(HERMES, {"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
    taken = [
        row.takes(hermes(f'{{"name": "heat", "arguments": {arguments}}}'))
        for arguments in ('{"a": {"b": 1}}', '{"a": {"b": 1}, "c": 2}', '{"a": {"b": 1, "c": 2}}')
    ]
    assert taken == [True, not is_closed, not is_closed]


def test_strict_is_true_or_false() -> None:
    tool = {"type": "function", "function": {"name": "heat", "strict": "yes"}}
    with pytest.raises(RowError, match="strict must be true or false"):
        Row(HERMES, {"tools": [tool], "tool_choice": "auto"})


def test_strict_parameters_that_cannot_be_closed() -> None:
    parameters: dict[str, Any] = {"type": "object"}
    for _ in range(600):
        parameters = {"type": "object", "properties": {"a": parameters}}
    tool = {"type": "function", "function": {"name": "heat", "strict": True, "parameters": parameters}}
    with pytest.raises(FieldError, match="parameters of the tool 'heat': the schema is nested too deeply"):
        calls_of([tool], "hermes", several=False, tokens=())


@pytest.mark.parametrize(
    "name", ["x" * 64, 'a "b" \\n\\', "\u5929\u6c17 \U0001f326", "a\nb\t\x01", "%json", "</tool_call>"]
)
def test_names_of_functions(name: str) -> None:
    row = Row(HERMES, {"tools": [{"function": {"name": name}}, *TOOLS], "tool_choice": "required"})
    text = hermes(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}', NOW)
    assert row.takes(text)
    assert [call.name for call in row.read(text).tool_calls] == [name, "now"]


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_tokens(special: bool) -> None:
    row = Row(HERMES, {"tools": TOOLS, "tool_choice": "required"}, ("<tool_call>", "</tool_call>"), special)
    assert row.takes(hermes(WEATHER))
    assert not row.takes("Well")


def test_one_call_without_parallel_calls() -> None:
    row = Row(HERMES, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert row.takes(hermes(NOW))
    assert not row.takes(hermes(NOW, NOW))


def test_a_required_call_where_no_grammars_run() -> None:
    data = DataSection(chat_template=HERMES)
    texts = TextProcessor(byte_tokenizer(300, [0]), data)
    prepare = RowPreparer(RowParser(SamplingParams(), data), texts, EngineLimits(4000, 300), "engine.tensor_parallel")
    row = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    [one] = prepare([RawRow(0, json.dumps(row).encode())])
    assert one.error is not None
    assert one.error.message == "a required tool_choice: not supported with engine.tensor_parallel"


def test_a_call_that_is_not_required_has_no_grammar() -> None:
    assert Row(HERMES, {"tools": TOOLS, "tool_choice": "auto"}).matcher is None


@pytest.mark.parametrize(
    ("template", "fields", "words"),
    [
        (HERMES, {"regex": "a"}, "tool_choice and regex are given"),
        (HERMES, {"ignore_eos": True}, "ignore_eos and tool_choice are given"),
        ("{{ messages[0].content }}{{ tools }}", {}, "the format of this model's calls is not known"),
    ],
)
def test_mistakes(template: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        Row(template, {"tools": TOOLS, "tool_choice": "required", **fields})


THINK = ("<think>", "</think>")
OPEN = QWEN3.replace("{%- if enable_thinking is defined", "{{- '<think>\\n' }}{%- if enable_thinking is defined")


def test_a_grammar_begins_after_reasoning() -> None:
    """That the model begins, or leaves out."""
    row = Row(QWEN3, {"regex": "yes|no"}, THINK)
    assert all(map(row.takes, ("<think>Cold?</think>yes", "no", "<think></think>no")))
    assert not any(map(row.takes, ("<think>yes", "Cold? yes", "<think>a</think>maybe", "yes<think></think>")))
    assert row.read("<think>\nCold?\n</think>yes") == Answer("yes", "\nCold?\n".strip("\n"))


def test_the_text_of_a_grammar_can_have_the_end_mark_in_it() -> None:
    """Without the mark that begins reasoning, there is none, and the text must stay what the grammar asks for."""
    text = '{"a": "b</think>c"}'
    row = Row(QWEN3, {"response_format": {"type": "json_object"}})
    assert row.takes(text)
    assert row.read(text) == Answer(text)
    assert row.read(f"<think>d</think>{text}") == Answer(text, "d")
    assert Row(QWEN3, {"response_format": {"type": "text"}}).read("d</think>c") == Answer("c", "d")


def test_a_grammar_begins_after_reasoning_that_the_prompt_begins() -> None:
    row = Row(OPEN, {"regex": "yes|no"}, THINK)
    assert row.takes("Cold?</think>yes")
    assert not any(map(row.takes, ("yes", "</think>Cold?", "Cold?</think>")))
    assert row.read("Cold?</think>yes") == Answer("yes", "Cold?")


def test_reasoning_whose_end_is_not_a_token() -> None:
    """The answer would begin within it, and nothing would be read as the answer."""
    with pytest.raises(RowError, match="regex: the prompt begins the model's reasoning"):
        Row(OPEN, {"regex": "yes|no"})
    assert Row(OPEN, {"regex": "yes|no", "separate_reasoning": False}).takes("yes")


def test_a_call_after_reasoning() -> None:
    row = Row(QWEN3, {"tools": TOOLS, "tool_choice": NAMED}, THINK)
    assert row.takes(f"<think>What time?</think>{hermes(NOW)}")
    assert not row.takes("<think>What time?</think>It is late.")


@pytest.mark.parametrize(
    "fields", [{"separate_reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_without_reasoning_all_of_the_output_is_in_the_grammar(fields: dict[str, Any]) -> None:
    row = Row(QWEN3, {"regex": "yes|no", **fields}, THINK)
    assert row.takes("yes")
    assert row.takes("<think>Cold?</think>yes") == ("chat_template_kwargs" in fields)
