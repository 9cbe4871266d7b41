"""Fields of chats in rows, and what is read from answers: thinking, reasoning and calls of tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from specbatch.config import DataSection
from specbatch.config_load import load_config
from specbatch.counts import SpeculationCounts
from specbatch.errors import ConfigError, RowError
from specbatch.files.jsonl import encode_line
from specbatch.files.result_files import open_results, write_lines
from specbatch.job.runner import RowRunner
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.results.fingerprint import job_fingerprint
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import choice_of, result_line
from specbatch.rows.messages import check_messages
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.chat_output import Answer, AnswerReader, ToolCall, call_format
from specbatch.text.chat_template import ChatTemplate, TemplateFacts
from specbatch.text.template_variables import variables_of
from specbatch.types import Completion, EngineLimits, FinishReason, Request, SamplingParams
from tests.rows.chat_templates import DEEPSEEK_R1, EFFORT, HERMES, LLAMA3, QWEN3
from tests.stub_engine import EOS, StubEngine, StubTokenizer

LIMITS = EngineLimits(10_000, 300)
USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = [ToolCall("weather", '{"city": "Oslo"}')]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA3_CALL = '{"name": "weather", "parameters": {"city": "Oslo"}}'


class Chat:
    """Rows of a job with this template: what is written, and what is read."""

    def __init__(self, template: str, **data: Any) -> None:
        self.tokenizer = byte_tokenizer(300, [0])
        section = DataSection(chat_template=template, **data)
        self._parser = RowParser(SamplingParams(), section)
        self._texts = TextProcessor(self.tokenizer, section)
        self._template = template

    def parse(self, row: dict[str, Any], batch: bool = False) -> Row:
        if batch:
            row = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **row}}
        parsed = self._parser.parse(RawRow(4, json.dumps(row).encode()))
        if parsed.error is not None:
            raise parsed.error
        return parsed

    def written(self, row: dict[str, Any], batch: bool = False) -> str:
        return bytes(self._encoded(self.parse(row, batch))).decode()

    def _encoded(self, row: Row) -> list[int]:
        return [token - 1 for token in self._texts.encode(row, LIMITS)]  # 0 ends a text: bytes begin at 1

    def by_transformers(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True, **kwargs
        )

    def answered(self, row: dict[str, Any], text: str, batch: bool = False, **completion: Any) -> dict[str, Any]:
        """The result line of a row that the model answers with `text`."""
        parsed = self.parse(row, batch)
        self._texts.encode(parsed, LIMITS)
        reason = completion.get("reason", FinishReason.STOP)
        tokens = [byte + 1 for byte in text.encode()] + [0] * (reason is FinishReason.STOP)
        done = Completion(0, tokens, reason, None, SpeculationCounts())
        answer = self._texts.answer_reader(parsed).read(self._texts.final_text(done, parsed.params))
        choices = [choice_of(done, answer)] * parsed.params.n
        return result_line(parsed, choices, LogprobJson(self._texts.pieces), model="m")


def test_thinking_on_and_off() -> None:
    chat = Chat(QWEN3)
    on = {"messages": [USER]}
    off = {**on, "chat_template_kwargs": {"enable_thinking": False}}
    for batch in (False, True):
        assert chat.written(on, batch) == chat.by_transformers([USER])
        assert chat.written(on, batch).endswith("<|im_start|>assistant\n")
        assert chat.written(off, batch) == chat.by_transformers([USER], enable_thinking=False)
        assert chat.written(off, batch).endswith("<think>\n\n</think>\n\n")
    line = chat.answered(on, "<think>\nNorth, so cold.\n</think>\n\nIt is cold.")
    assert (line["text"], line["reasoning_content"]) == ("It is cold.", "North, so cold.")
    line = chat.answered(off, "It is cold.")
    assert line["text"] == "It is cold."
    assert "reasoning_content" not in line


def test_the_row_has_precedence_over_the_configuration_name_by_name() -> None:
    chat = Chat(QWEN3, chat_template_kwargs={"enable_thinking": False})
    assert chat.written({"messages": [USER]}).endswith("</think>\n\n")
    assert chat.written({"prompt": "hi"}).endswith("</think>\n\n")
    row = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    assert chat.written(row).endswith("assistant\n")
    row["chat_template_kwargs"] = {"enable_thinking": None}  # as a table has it
    assert chat.written(row).endswith("</think>\n\n")
    two = Chat(LLAMA3, chat_template_kwargs={"date_string": "1 May 2026", "tools_in_user_message": False})
    text = two.written({"messages": [USER], "chat_template_kwargs": {"tools_in_user_message": True}})
    assert "Today Date: 1 May 2026" in text


def test_variables_of_the_configuration_are_part_of_the_job() -> None:
    jobs = [
        job_fingerprint(load_config(None, [f"data.chat_template_kwargs={{enable_thinking: {value}}}"]), {}, None)
        for value in ("true", "false")
    ]
    assert jobs[0] != jobs[1]
    with pytest.raises(ConfigError, match=r"data.chat_template_kwargs.a is a value that JSON does not have"):
        load_config(None, values={"data.chat_template_kwargs": {"a": float("nan")}})
    with pytest.raises(ConfigError, match=r"data.chat_template_kwargs must be a mapping"):
        load_config(None, ["data.chat_template_kwargs=[enable_thinking]"])


@pytest.mark.parametrize(
    ("template", "answer", "reasoning", "text"),
    [
        (QWEN3, "<think>a</think>b", "a", "b"),
        (QWEN3, "\n<think>\n\na\n</think>\n\n b", "a", " b"),
        (QWEN3, "<think>\na cut th", "a cut th", ""),
        (QWEN3, "<think>\n\n</think>\n\nb", None, "b"),
        (QWEN3, "b <think>a</think>", None, "b <think>a</think>"),
        (QWEN3, "a\n</think>\n\nb", "a", "b"),
        (QWEN3, "a</think>b</think>", "a", "b</think>"),
        (QWEN3, "</think>b", None, "b"),
        (QWEN3, "a</think>", "a", ""),
        (QWEN3, "It ends with `</think>`, and so on.", None, "It ends with `</think>`, and so on."),
        (QWEN3, "It ends with `</think>`.\n</think>\nb", "It ends with `</think>`.", "b"),
        (QWEN3, "Between <think> and </think>.", None, "Between <think> and </think>."),
        (DEEPSEEK_R1, "</think>b", None, "b"),
        (DEEPSEEK_R1, "a\n</think>\n\nb", "a", "b"),
        (DEEPSEEK_R1, "<think>\na</think>b</think>", "a", "b</think>"),
        (DEEPSEEK_R1, "a cut th", "a cut th", ""),
        (HERMES, "<think>a</think>b", None, "<think>a</think>b"),
    ],
)
def test_reasoning(template: str, answer: str, reasoning: str | None, text: str) -> None:
    line = Chat(template).answered({"messages": [USER]}, answer)
    assert (line.get("reasoning_content"), line["text"]) == (reasoning, text)
    message = Chat(template).answered({"messages": [USER]}, answer, batch=True)["response"]["body"]["choices"][0]
    assert (message["message"].get("reasoning_content"), message["message"]["content"]) == (reasoning, text)


@pytest.mark.parametrize("answer", ["The mark </think> ends it.", "a\n</think>\n\nb", "a cut th"])
def test_after_reasoning_that_the_prompt_has_ended_there_is_none(answer: str) -> None:
    row = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    line = Chat(QWEN3).answered(row, answer)
    assert ("reasoning_content" in line, line["text"]) == (False, answer)
    line = Chat(QWEN3).answered(row, f"<think>a</think>{answer}")  # a model that reasons all the same
    assert (line["reasoning_content"], line["text"]) == ("a", answer)


def test_the_end_mark_in_a_call() -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "a</think>b"}})
    for answer, reasoning in ((call, None), (call, "c")):
        text = f"<tool_call>\n{answer}\n</tool_call>"
        text = text if reasoning is None else f"{reasoning}\n</think>\n{text}"
        line = Chat(QWEN3).answered({"messages": [USER], "tools": [WEATHER]}, text)
        assert (line.get("reasoning_content"), line["text"]) == (reasoning, "")
        assert json.loads(line["tool_calls"][0]["function"]["arguments"]) == {"city": "a</think>b"}


def test_separation_can_be_chosen() -> None:
    answer = "<think>a</think>b"
    assert Chat(QWEN3, separate_reasoning=False).answered({"messages": [USER]}, answer)["text"] == answer
    assert Chat(HERMES, separate_reasoning=True).answered({"messages": [USER]}, answer)["text"] == "b"
    row = {"messages": [USER], "separate_reasoning": False}
    assert Chat(QWEN3).answered(row, answer)["text"] == answer
    row = {"prompt": "x", "separate_reasoning": True}
    assert Chat(HERMES, separate_reasoning=False).answered(row, answer)["reasoning_content"] == "a"


def test_marks_that_are_special_tokens() -> None:
    chat = Chat(QWEN3)
    chat.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<other>"]})
    texts = TextProcessor(chat.tokenizer, DataSection(chat_template=QWEN3))
    ids = chat.tokenizer.encode("<think>é</think><other>b")
    assert len(ids) == 6
    assert texts.decode(ids) == "<think>é</think>b"


@pytest.mark.parametrize(("template", "call"), [(QWEN3, HERMES_CALL), (HERMES, HERMES_CALL), (LLAMA3, LLAMA3_CALL)])
def test_a_round_trip_of_tool_calls(template: str, call: str) -> None:
    """A request with tools, the parsed call, and the tool's answer: each is written as transformers writes it."""
    chat = Chat(template)
    row: dict[str, Any] = {"messages": [USER], "tools": [WEATHER]}
    extra = {"date_string": "26 Jul 2024"}
    assert chat.written(row) == chat.by_transformers([USER], tools=[WEATHER], **extra)
    assert "weather" in chat.written(row)
    line = chat.answered(row, call)
    assert (line["text"], line["finish_reason"]) == ("", "tool_calls")
    (made,) = line["tool_calls"]
    assert made == {
        "id": "call_000000000004_0_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [made]}
    answer = {"role": "tool", "tool_call_id": made["id"], "content": "-3 °C"}
    row["messages"] = [USER, turn, answer]
    as_object = {**made, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    history = [USER, {"role": "assistant", "tool_calls": [as_object]}, answer]
    written = chat.written(row)
    assert written == chat.by_transformers(history, tools=[WEATHER], **extra)
    assert call in written, "the history has the call as the model wrote it"
    assert "-3 °C" in written
    assert "None" not in written


def test_a_table_has_columns_for_reasoning_and_calls(tmp_path: Path) -> None:
    row = {"messages": [USER], "tools": [WEATHER]}
    lines = [Chat(QWEN3).answered(row, f"<think>a</think>{text}") for text in (HERMES_CALL, "b")]
    facts = write_lines(tmp_path / "r.parquet", map(encode_line, lines), ".parquet")
    assert facts["rows"] == 2
    with open_results(tmp_path / "r.parquet") as again:
        assert list(again) == [encode_line(line) for line in lines]


VALIDATE_BODY = TypeAdapter(CompletionCreateParamsNonStreaming).validate_python
BODIES: list[dict[str, Any]] = [
    {"tools": [WEATHER]},
    {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"messages": [USER, {"role": "assistant", "content": None}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
]


@pytest.mark.parametrize("body", BODIES)
def test_requests_and_responses_are_openais(body: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [USER], "n": 2, "temperature": 1, **body}
    VALIDATE_BODY(body)
    line = Chat(QWEN3).answered(body, f"<think>a</think>I look.\n{HERMES_CALL}\n{HERMES_CALL}", batch=True)
    completion = ChatCompletion.model_validate(line["response"]["body"])
    for number, choice in enumerate(completion.choices):
        calls = choice.message.tool_calls
        if "tools" not in body or body.get("tool_choice") == "none":
            assert calls is None
            assert choice.finish_reason == "stop"
            assert "<tool_call>" in (choice.message.content or "")
            continue
        assert calls is not None
        assert [call.id for call in calls] == [
            f"call_000000000004_{number}_{i}" for i in range(1 if "parallel_tool_calls" in body else 2)
        ]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."


def test_content_is_null_if_there_are_only_calls() -> None:
    line = Chat(HERMES).answered({"messages": [USER], "tools": [WEATHER]}, HERMES_CALL, batch=True)
    choice = ChatCompletion.model_validate(line["response"]["body"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    cut = Chat(HERMES).answered(
        {"messages": [USER], "tools": [WEATHER]}, HERMES_CALL, batch=True, reason=FinishReason.LENGTH
    )
    assert cut["response"]["body"]["choices"][0]["finish_reason"] == "length"


def test_effort_is_given_to_the_template() -> None:
    chat = Chat(EFFORT)
    for body in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}):
        assert chat.written({"messages": [USER], **body}).startswith("Reasoning: high")
    body = {"model": "m", "messages": [USER], "reasoning_effort": "low"}
    VALIDATE_BODY(body)
    assert chat.written(body, batch=True) == chat.by_transformers([USER], reasoning_effort="low")


def read(calls: str, text: str) -> Answer:
    return AnswerReader(calls=calls, tool_names=frozenset({"weather", "time"})).read(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("calls", "text", "rest", "names"),
    [
        ("hermes", f"I look.\n{HERMES_CALL}", "I look.", ["weather"]),
        ("hermes", f"{HERMES_CALL}\n<tool_call>{{\"name\":\"time\",\"arguments\":{{}}}}</tool_call>\nDone.", "Done.",
         ["weather", "time"]),
        ("hermes", HERMES_CALL.removesuffix("</tool_call>"), "", ["weather"]),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>"}}</tool_call>', "", ["time"]),
        ("llama3", f"<|python_tag|>{LLAMA3_CALL}", "", ["weather"]),
        ("llama3", f'{LLAMA3_CALL}; {{"name": "time", "arguments": {{}}}}', "", ["weather", "time"]),
    ],
)  # fmt: skip
def test_calls(calls: str, text: str, rest: str, names: list[str]) -> None:
    answer = read(calls, text)
    assert (answer.text, [call.name for call in answer.tool_calls]) == (rest, names)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("hermes", "no call"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "city": "Oslo"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{} {}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": 0}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {}, "parameters": {"city": "Oslo"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ' + "[" * 99_999),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ' + "9" * 9_999 + "}}</tool_call>"),
        ("hermes", "<tool_call><function=weather></function></tool_call>"),
        ("hermes", HERMES_CALL + "<tool_call>?</tool_call>"),
        ("llama3", f"I look. {LLAMA3_CALL}"),
        ("llama3", f"{LLAMA3_CALL} and more"),
        ("llama3", '<|python_tag|>print("a")'),
        ("llama3", '[{"name": "weather", "parameters": {}}]'),
        ("llama3", '{"name": "other", "parameters": {}}'),
        ("llama3", '{"name": "weather", "age": 3}'),
        ("llama3", ""),
    ],
)
def test_what_is_no_call_stays_text(calls: str, text: str) -> None:
    assert read(calls, text) == Answer(text)


@pytest.mark.parametrize("calls", ["hermes", "llama3"])
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, "{}"),
        ({"type": "function", "id": "a"}, "{}"),
        ({"arguments": None}, "{}"),
        ({"arguments": ""}, "{}"),
        ({"parameters": " "}, "{}"),
        ({"arguments": "{}"}, "{}"),
        ({"arguments": '{"city": "Oslo"} '}, '{"city": "Oslo"}'),
        ({"parameters": '{"city": "\\u00c5s"}'}, '{"city": "\u00c5s"}'),
        ({"parameters": {"city": "Oslo"}}, '{"city": "Oslo"}'),
        ({"arguments": {"arguments": "{}"}}, '{"arguments": "{}"}'),
    ],
)
def test_arguments_are_the_text_of_an_object(calls: str, fields: dict[str, Any], arguments: str) -> None:
    """Models leave them out where a function needs none, and write them as text, as they are in OpenAI's messages."""
    text = json.dumps({"name": "time", **fields})
    text = f"<tool_call>\n{text}\n</tool_call>" if calls == "hermes" else text
    assert read(calls, text) == Answer("", None, [ToolCall("time", arguments)])


def test_formats_are_those_of_the_template() -> None:
    assert [call_format(t) for t in (QWEN3, HERMES, LLAMA3, DEEPSEEK_R1)] == ["hermes", "hermes", "llama3", None]
    assert call_format("<tool_call>\n<function=name>\n<parameter=a>") is None
    assert TemplateFacts.of(LLAMA3).variables >= {"tools", "custom_tools", "date_string", "bos_token"}
    assert TemplateFacts.of(QWEN3).variables == {"messages", "tools", "enable_thinking", "add_generation_prompt"}


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% set a = 1 %}{% if b %}{% set a = 2 %}{% endif %}{{ a }}", "b"),
        ("{% if b %}{% set a = 2 %}{% endif %}{{ a }}", "ab"),
        ("{% if b %}{% set a = 2 %}{% elif c %}{% set a = 3 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", "bc"),
        ("{% set a = a|default(1) %}{{ a }}", "a"),
        ("{% for a, b in c if a %}{% set d = b %}{{ loop.index }}{% else %}{{ b }}{% endfor %}{{ d }}", "bcd"),
        ("{% macro m(a, b=c) %}{{ a, b, d, kwargs, m }}{% endmacro %}{{ m(e) }}", "cde"),
        ("{% call(a) m(b) %}{{ a }}{% endcall %}{% with a = c, b = d %}{{ a, b }}{% endwith %}", "bcdm"),
        ("{% set a %}{{ b }}{% endset %}{% filter trim %}{{ a ~ c }}{% endfilter %}", "bc"),
        ("{% set n = namespace(a=b) %}{% set n.a = c %}{{ range(3), dict(d=1), raise_exception('x') }}", "bc"),
        ("{% generation %}{{ a }}{% endgeneration %}{% for b in c %}{% break %}{% endfor %}", "ac"),
    ],
)
def test_variables_that_a_template_reads(template: str, names: str) -> None:
    assert variables_of(template) == set(names)


def test_tools_that_the_format_is_unknown_of() -> None:
    unknown = Chat(EFFORT.replace("reasoning_effort or", "tools|string or"))
    line = unknown.answered({"messages": [USER], "tools": [WEATHER]}, HERMES_CALL)
    assert (line["text"], line["finish_reason"]) == (HERMES_CALL, "stop")


def test_models_with_several_templates() -> None:
    tokenizer = byte_tokenizer(300, [0])
    tokenizer.chat_template = {"default": EFFORT, "tool_use": HERMES}
    template = ChatTemplate(tokenizer, DataSection())
    assert template.write([USER], {"reasoning_effort": "low"}).startswith("Reasoning: low")
    assert "<tools>" in template.write([USER], {}, [WEATHER])
    assert (template.facts.calls, template.tool_facts.calls) == (None, "hermes")


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    (EFFORT, {"tools": [WEATHER]}, "unsupported_parameter", "the chat template does not read tools"),
    (QWEN3, {"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort has no effect: the chat template"),
    (QWEN3, {"chat_template_kwargs": {"enable_thinkin": 1}}, "unsupported_parameter", "reads enable_thinking; did you"),
    (EFFORT, {"chat_template_kwargs": {"a": 1}}, "unsupported_parameter", "reads reasoning_effort"),
    (QWEN3, {"chat_template_kwargs": {"tools": []}}, "unsupported_parameter", "tools has its own field"),
    (QWEN3, {"chat_template_kwargs": {"tokenize": True}}, "unsupported_parameter", "tokenize has no effect"),
    (QWEN3, {"chat_template_kwargs": "x"}, "invalid_type", "chat_template_kwargs must be an object, not text"),
    (EFFORT, {"reasoning_effort": "extreme"}, "invalid_value", "must be one of none, minimal, low, medium, high"),
    (EFFORT, {"reasoning_effort": 3}, "invalid_value", "reasoning_effort must be one of"),
    (
        EFFORT,
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "invalid_value",
        "reasoning_effort is low, but chat_template_kwargs has 'high'",
    ),
    (QWEN3, {"tools": {}}, "invalid_type", "tools must be a list, not an object"),
    (QWEN3, {"tools": [{"name": "weather"}]}, "invalid_type", "tools[0] must be"),
    (QWEN3, {"tools": [{**WEATHER, "type": "custom"}]}, "unsupported_parameter", "tools[0].type must be function"),
    (QWEN3, {"tools": [{"function": {"name": ""}}]}, "invalid_type", "tools[0].function.name must be text"),
    (QWEN3, {"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1].function.name: an earlier tool"),
    (QWEN3, {"tools": [{"function": {"name": "a", "parameters": []}}]}, "invalid_type", "parameters must be an object"),
    (
        QWEN3,
        {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]},
        "invalid_value",
        "tools[0].function.parameters must describe an object: its type is 'array'",
    ),
    (QWEN3, {"tools": [{"function": {"name": "a", "description": 1}}]}, "invalid_type", "description must be text"),
    (QWEN3, {"tools": [WEATHER], "tool_choice": "any"}, "invalid_value", "tool_choice must be none, auto, required or"),
    (QWEN3, {"tools": [WEATHER], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice must be none"),
    (QWEN3, {"tool_choice": "required"}, "invalid_value", "tool_choice asks for a call, but the row has no tools"),
    (
        QWEN3,
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "invalid_value",
        "tool_choice: no tool has the name 'x'",
    ),
    (QWEN3, {"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls must be true or false"),
    (QWEN3, {"separate_reasoning": "no"}, "invalid_type", "separate_reasoning must be true or false"),
    (QWEN3, {"messages": [call(name="a", arguments="{")]}, "invalid_value", "arguments must be an object, or the JSON"),
    (QWEN3, {"messages": [call(name="a", arguments=[1])]}, "invalid_value", "messages[0].tool_calls[0].function.argu"),
    (QWEN3, {"messages": [call(arguments="{}")]}, "invalid_type", "messages[0].tool_calls[0].function.name must be"),
    (QWEN3, {"messages": [{**USER, "tool_calls": [{}]}]}, "invalid_value", "only messages of the assistant have"),
    (QWEN3, {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "invalid_type", "messages[0].tool_calls[0] must"),
    (QWEN3, {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "invalid_type", "tool_calls must be a list"),
    (QWEN3, {"messages": [{"role": "assistant", "content": "a", "tool_calls": 0}]}, "invalid_type", "must be a list"),
    (QWEN3, {"messages": [{"role": "tool", "content": "a", "tool_call_id": 3}]}, "invalid_type", "tool_call_id must"),
    (QWEN3, {"messages": [{"role": "user", "content": None}]}, "invalid_type", "content must be text, but is missing"),
    (QWEN3, {"messages": [{"role": "assistant"}]}, "invalid_type", "content must be text, but is missing"),
    (
        LLAMA3,
        {"messages": [{"role": "assistant", "tool_calls": call(name="a")["tool_calls"] * 2}]},
        "chat_template_error",
        "single tool-calls",
    ),
]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("template", "fields", "type", "words"), ERRORS)
def test_mistakes_are_errors_of_the_row(
    template: str, fields: dict[str, Any], type: str, words: str, batch: bool
) -> None:
    with pytest.raises(RowError) as caught:
        Chat(template).written({"messages": [USER], **fields}, batch)
    assert (caught.value.type, words in caught.value.message) == (type, True), caught.value.message


@pytest.mark.parametrize(
    "fields",
    [{"tools": [WEATHER]}, {"chat_template_kwargs": {"enable_thinking": False}}, {"separate_reasoning": True}],
)
@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"prompt_token_ids": [5]}])
def test_prompts_that_are_no_chats_have_none_of_these(fields: dict[str, Any], prompt: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=f"{next(iter(fields))} is for chats"):
        Chat(QWEN3, prompts_as_chat=False).written({**prompt, **fields})
    Chat(QWEN3, prompts_as_chat=False).written({**prompt, **dict.fromkeys(fields), "tool_choice": "auto", "tools": []})


def test_variables_of_the_configuration_that_the_template_does_not_read() -> None:
    with pytest.raises(
        ConfigError, match=r"data.chat_template_kwargs.thinking has no effect: .* reads enable_thinking"
    ):
        Chat(QWEN3, chat_template_kwargs={"thinking": False})


class _Speaks(StubEngine):
    """Answers with a call of a tool."""

    def _complete(self, request: Request) -> Completion:
        done = super()._complete(request)
        return replace(done, token_ids=[*HERMES_CALL.encode(), EOS], finish_reason=FinishReason.STOP)


def test_answers_of_the_engine_are_read() -> None:
    config = load_config(None, values={"data.chat_template": HERMES, "engine.max_batch_size": 4})
    runner = RowRunner(_Speaks(max_prompt_tokens=2000), TextProcessor(StubTokenizer(), config.data), config)
    for index in range(3):
        row = {"messages": [USER], "n": 2, "temperature": 0, **({} if index == 1 else {"tools": [WEATHER]})}
        runner.add(RawRow(index, json.dumps(row).encode()))
    runner.start_rows()
    runner.close()
    while runner.is_busy:
        runner.step()
    finished = runner.take()
    lines = {row.index: json.loads(row.line) for row in finished.rows}
    assert finished.totals.finish_reasons == {"stop": 1, "tool_calls": 2}
    assert lines[1]["text"] == HERMES_CALL
    assert [choice["tool_calls"][0]["id"] for choice in lines[2]["choices"]] == [
        "call_000000000002_0_0",
        "call_000000000002_1_0",
    ]


def test_messages_lose_their_nulls() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": None, "name": None, "reasoning_content": "a"}]
    assert check_messages(messages) == [{"role": "assistant", "reasoning_content": "a"}]
    (message,) = check_messages([call(name="a", arguments="")])
    assert message["tool_calls"][0]["function"] == {"name": "a", "arguments": {}}
    assert "content" not in message
