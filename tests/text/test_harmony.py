"""Answers in Harmony, the format of gpt-oss: what is reasoning, text, and a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.counts import SpeculationCounts
from specbatch.errors import RowError
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import choice_of, result_line
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.harmony import HARMONY_MARKS
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams
from tests.rows.chat_templates import HARMONY

USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
START, RETURN, CALL = "<|start|>assistant", "<|return|>", "<|call|>"


def message(channel: str, body: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{body}{end}"


class Model:
    """A model whose tokenizer has the marks as tokens. `special`: texts leave such tokens out by themselves."""

    def __init__(self, special: bool = True, **data: Any) -> None:
        self.tokenizer = byte_tokenizer(300, [0])
        if special:
            self.tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY_MARKS)})
        else:
            self.tokenizer.add_tokens(list(HARMONY_MARKS))
        self._data = DataSection(chat_template=HARMONY, **data)
        self.texts = TextProcessor(self.tokenizer, self._data)
        self._params = SamplingParams()
        self.limits = EngineLimits(10_000, len(self.tokenizer))

    def row(self, **fields: Any) -> Row:
        given = {"messages": [USER], **fields} if "prompt" not in fields else fields
        row = RowParser(self._params, self._data).parse(RawRow(4, json.dumps(given).encode()))
        assert row.error is None, row.error
        self.texts.encode(row, self.limits)
        row.reader = self.texts.answer_reader(row)
        return row

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def line(
        self, answer: str, row: Row | None = None, reason: FinishReason = FinishReason.STOP, **fields: Any
    ) -> dict[str, Any]:
        """Return the result line of a row that the model answers so. The last mark is the token that stops it."""
        row = row or self.row(**fields)
        done = Completion(0, self.ids(answer), reason, None, SpeculationCounts())
        read = row.reader.read(self.texts.final_text(done, row.params))
        return result_line(row, [choice_of(done, read)], LogprobJson(self.texts.pieces), model="m")


TWO = message("analysis", "North, so cold.") + START + message("final", "It is cold.", RETURN)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        (TWO, "North, so cold.", "It is cold."),
        (message("final", "It is cold.", RETURN), None, "It is cold."),
        (message("final", "\n a \n", RETURN), None, "\n a \n"),
        (message("final", "not <think> a mark", RETURN), None, "not <think> a mark"),
        (
            f"{message('analysis', 'a')}{START}{message('analysis', 'b')}{START}{message('final', 'c', RETURN)}",
            "a\nb",
            "c",
        ),
        (
            f"{message('commentary', 'I look it up.')}{START}{message('final', 'c', RETURN)}",
            None,
            "I look it up.\nc",
        ),
        (f"<|message|>No channel.{RETURN}", None, "No channel."),
        (f"{message('final <|constrain|>json', '{}', RETURN)}", None, "{}"),
        (f"It writes no marks.{RETURN}", None, "It writes no marks."),
        (f"{message('final', 'a')} b{RETURN}", None, "a\n b"),
        # The model leaves out the begin of a message, and the end of the one before.
        (message("analysis", "a") + message("final", "b", RETURN), "a", "b"),
        (message("analysis", "a", "") + message("final", "b", RETURN), "a", "b"),
        (f"<|channel|>analysis{message('final', 'b', RETURN)}", None, "b"),
        # Text where a header should be is not lost.
        (f"{message('analysis', 'a')}{START} b c{RETURN}", "a", "assistant b c"),
        (f"<|channel|>final b c d{RETURN}", None, "<|channel|>final b c d"),
        (message("final", "a <|start|> b", RETURN), None, "a \n b"),
        (message("final", "a <|channel|> b c d", RETURN), None, "a \n<|channel|> b c d"),
    ],
)
def test_channels(special: bool, answer: str, reasoning: str | None, text: str) -> None:
    line = Model(special).line(answer)
    assert (line.get("reasoning_content"), line["text"]) == (reasoning, text)


@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        ("<|channel|>anal", None, ""),
        ("<|channel|>analysis<|message|>cut wi", "cut wi", ""),
        (message("analysis", "a") + "<|start|>assist", "a", ""),
        (message("analysis", "a") + START + "<|channel|>fin", "a", ""),
        (message("analysis", "a") + START + " to=functions.we", "a", ""),
        (message("analysis", "a") + START + "<|channel|>commentary to=functions.weather <|constrain|>js", "a", ""),
        (message("analysis", "a") + "<|channel|>", "a", ""),
        (message("analysis", "a") + START + "<|channel|>final<|message|>b c", "a", "b c"),
    ],
)
def test_answers_that_were_cut(answer: str, reasoning: str | None, text: str) -> None:
    line = Model().line(answer, reason=FinishReason.LENGTH)
    assert (line.get("reasoning_content"), line["text"]) == (reasoning, text)


def test_a_prompt_that_begins_the_answer() -> None:
    model = Model()
    for header, answer, reasoning, text in (
        ("<|channel|>final<|message|>", f"It is cold.{RETURN}", None, "It is cold."),
        ("<|channel|>analysis", f"<|message|>a<|end|>{START}{message('final', 'b', RETURN)}", "a", "b"),
        ("<|channel|>analysis<|message|>So", f" cold<|end|>{START}{message('final', 'b', RETURN)}", " cold", "b"),
        ("<|channel|>analysis<|message|>So", f" cold{message('final', 'b', RETURN)}", " cold", "b"),
    ):
        line = model.line(answer, chat_template_kwargs={"header": header})
        assert (line.get("reasoning_content"), line["text"]) == (reasoning, text)


def test_separation_can_be_chosen() -> None:
    whole = TWO.removesuffix(RETURN)
    assert Model(separate_reasoning=False).line(TWO)["text"] == whole
    line = Model().line(TWO, separate_reasoning=False)
    assert line["text"] == whole
    assert "reasoning_content" not in line
    assert Model(separate_reasoning=False).line(TWO, separate_reasoning=True)["text"] == "It is cold."


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>commentary to=functions.weather<|constrain|>json",
        "<|channel|>analysis to=functions.weather code",
    ],
)
def test_calls(header: str) -> None:
    model = Model()
    answer = f'{message("analysis", "a")}{START}{header}<|message|>{{"city": "Oslo"}}{CALL}'
    line = model.line(answer, tools=[WEATHER])
    assert (line["text"], line["reasoning_content"], line["finish_reason"]) == ("", "a", "tool_calls")
    (made,) = line["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [USER, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "-3", "tool_call_id": "1"}]
    written = model.tokenizer.decode(model.row(messages=turns, tools=[WEATHER]).token_ids)
    assert f'to=functions.weather<|channel|>commentary json<|message|>{{"city": "Oslo"}}{CALL}' in written
    raw = model.line(answer, tools=[WEATHER], separate_reasoning=False)
    assert raw["text"] == message("analysis", "a")
    assert raw["tool_calls"][0]["function"] == made["function"]


@pytest.mark.parametrize(
    ("name", "body", "tools"),
    [("weather", "{not JSON", True), ("other", "{}", True), ("weather", "{}", False)],
)
def test_what_is_no_call_stays_text(name: str, body: str, tools: bool) -> None:
    answer = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}{CALL}"
    line = Model().line(answer, **({"tools": [WEATHER]} if tools else {}))
    assert line["text"] == answer.removesuffix(CALL)
    assert "tool_calls" not in line


def test_only_the_first_call_is_returned() -> None:
    one = '<|channel|>commentary to=functions.weather<|message|>{"city": "%s"}<|end|>'
    line = Model().line(f"{one % 'Oslo'}{START}{one % 'Rome'}", tools=[WEATHER], parallel_tool_calls=False)
    assert [call["function"]["arguments"] for call in line["tool_calls"]] == ['{"city": "Oslo"}']


def test_the_effort_of_reasoning_is_given_to_the_template() -> None:
    model = Model()
    assert "Reasoning: high" in model.tokenizer.decode(model.row(reasoning_effort="high").token_ids)


@pytest.mark.parametrize("special", [True, False])
def test_prompts_that_are_no_chats_keep_their_marks(special: bool) -> None:
    assert Model(special, prompts_as_chat=False).line(TWO, prompt="x")["text"] == TWO.removesuffix(RETURN)


def test_stop_strings_and_log_probabilities_see_the_same_text() -> None:
    """Marks are part of the text that stop strings are looked for in, and each token has its bytes."""
    model = Model()
    ids = model.ids(TWO.removesuffix(RETURN))
    for stop, expected in (("cold.", "North, so "), ("<|end|>", "North, so cold."), ("final<|message|>It", "")):
        row = model.row(stop=[stop])
        check = model.texts.stop_check(row.params)
        assert check is not None
        ended = [check(ids[: i + 1], 0, 1) for i in range(len(ids))]
        end = next(i for i, found in enumerate(ended) if found is not None)
        assert ended[end] == end + 1
        done = Completion(0, ids[: end + 1], FinishReason.STOP, None, SpeculationCounts())
        read = row.reader.read(model.texts.final_text(done, row.params))
        assert (read.text, read.reasoning) == ("", expected or "North, so cold.")
    pieces = model.texts.pieces
    assert b"".join(pieces[key].data for key in pieces.keys_of(ids)).decode() == TWO.removesuffix(RETURN)


CHOICE = {"choice": ["yes", "no"]}


def takes(model: Model, text: str, **fields: Any) -> bool:
    row = model.row(**fields)
    found = model.texts.matcher(row)
    assert found is not None
    matcher = found[0]
    ids = model.ids(text)
    return all(map(matcher.advance, ids)) and matcher.is_complete()


def test_a_grammar_begins_with_the_final_message() -> None:
    model = Model()
    good, bad = message("final", "yes", ""), message("final", "maybe", "")
    for before in ("", message("analysis", "maybe") + START, f"{message('commentary', 'final')}{START}"):
        assert takes(model, before + good, **CHOICE)
        assert not takes(model, before + bad, **CHOICE)
    assert takes(model, "<|channel|>final <|constrain|>json<|message|>no", **CHOICE)
    assert not takes(model, message("analysis", "yes", ""), **CHOICE)
    assert model.line(message("final", "yes", RETURN), **CHOICE)["text"] == "yes"
    for before in ("<|channel|>analysis", message("analysis", "maybe", "")):  # a message that does not end
        assert takes(model, before + good, **CHOICE)
        assert model.line(before + message("final", "yes", RETURN), **CHOICE)["text"] == "yes"
    # The prompt has begun the final message, or reasoning is not separated: the grammar begins at once.
    header = {"chat_template_kwargs": {"header": "<|channel|>final<|message|>"}}
    for fields in (header, {"separate_reasoning": False}):
        assert takes(model, "yes", **CHOICE, **fields)
        assert not takes(model, good, **CHOICE, **fields)


@pytest.mark.parametrize("fields", [{}, {"separate_reasoning": False}])
def test_a_call_that_is_required(fields: dict[str, Any]) -> None:
    """A message with reasoning comes first."""
    model, fields = Model(), {"tools": [WEATHER], "tool_choice": "required", **fields}
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    answer = f'{message("analysis", "Where?")}{START}{call}{{"city": "Rome"}}'
    assert takes(model, answer, **fields)
    assert not takes(model, answer.replace('"Rome"', "5"), **fields)
    assert not takes(model, message("analysis", "Where?") + START + message("final", "No.", ""), **fields)
    assert not takes(model, message("analysis", "Where?", ""), **fields)
    line = model.line(answer + CALL, **fields)
    assert line["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_marks_that_are_not_tokens() -> None:
    plain = Model()
    plain.tokenizer = byte_tokenizer(300, [0])
    plain.texts = TextProcessor(plain.tokenizer, plain._data)
    with pytest.raises(RowError, match=r"tool_choice must be none or auto.*marks that are not tokens"):
        takes(plain, "", tools=[WEATHER], tool_choice="required")
    with pytest.raises(RowError, match="are not tokens; give separate_reasoning: false"):
        takes(plain, "yes", **CHOICE)
