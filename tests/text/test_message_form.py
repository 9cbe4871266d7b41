"""Each message reaches the prompt, in the form that the chat template reads; or the row is an error."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import ConfigError, RowError
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.rows.messages import check_messages
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.chat_template import ChatTemplate
from tests.rows.chat_templates import (
    BAICHUAN,
    CHATML,
    DEEPSEEK_CALLS,
    DEEPSEEK_R1,
    FIRST_PART,
    GEMMA2,
    HERMES,
    LLAMA3,
    LLAMA_GUARD,
    MISTRAL,
    PHI3,
    QWEN3,
)

USER = {"role": "user", "content": " I like cheese.\n"}
ANSWER = {"role": "assistant", "content": "Which one?"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be brief."}
TOOL = {"role": "tool", "tool_call_id": "call00000", "content": '{"cheese": "Brie"}'}
TWO_PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
NO_TEXT = "the chat template leaves out its text"


def call(content: str | None) -> dict[str, Any]:
    function = {"name": "find", "arguments": '{"kind": "käse"}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def chat_template(template: str, **data: Any) -> ChatTemplate:
    tokenizer = byte_tokenizer(300, [0])
    tokenizer.bos_token = "<s>"
    return ChatTemplate(tokenizer, DataSection(chat_template=template, **data))


def written(template: str, *messages: dict[str, Any], **data: Any) -> str:
    return chat_template(template, **data).write(check_messages(list(messages)))


def test_a_template_that_reads_lists_is_given_lists() -> None:
    assert written(LLAMA_GUARD, USER, ANSWER) == (
        "<BEGIN CONVERSATION>\n\nUser: I like cheese.\n\nAgent: Which one?\n\n<END CONVERSATION>"
    )
    assert written(LLAMA_GUARD, TWO_PARTS) == "<BEGIN CONVERSATION>\n\nUser: one two\n\n<END CONVERSATION>"
    assert written(FIRST_PART, USER, ANSWER) == "user:  I like cheese.\n\nassistant: Which one?\n"
    assert written(FIRST_PART, TWO_PARTS) == "user: one\ntwo\n"
    assert written(CHATML, TWO_PARTS) == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (PHI3, [DEVELOPER, USER], f"messages[0] (role 'developer'): {NO_TEXT}; most templates write the role 'system'"),
        (PHI3, [{**USER, "role": "User"}], f"messages[0] (role 'User'): {NO_TEXT}; did you mean 'user'?"),
        (PHI3, [USER, TOOL], f"messages[1] (role 'tool'): {NO_TEXT}"),
        (PHI3, [USER, ANSWER, SYSTEM, USER], f"messages[2] (role 'system'): {NO_TEXT}; most templates write a system"),
        (PHI3, [SYSTEM, SYSTEM, USER], f"messages[1] (role 'system'): {NO_TEXT}"),
        (BAICHUAN, [SYSTEM, SYSTEM, USER], f"messages[0] (role 'system'): {NO_TEXT}"),
        (LLAMA_GUARD, [SYSTEM, USER], f"messages[0] (role 'system'): {NO_TEXT}"),
        (LLAMA_GUARD, [USER, {"role": "function", "content": "1"}], f"messages[1] (role 'function'): {NO_TEXT}"),
        (QWEN3, [{"role": "human", "content": "a"}], f"messages[0] (role 'human'): {NO_TEXT}"),
        (
            CHATML,
            [USER, call(None), TOOL],
            "messages[1] (role 'assistant'): the chat template leaves out its tool call",
        ),
        (
            CHATML,
            [USER, call("I look."), TOOL],
            "messages[1] (role 'assistant'): the chat template leaves out its tool",
        ),
        ("{{ messages[-1].content }}", [USER, ANSWER, USER], f"messages[0] (role 'user'): {NO_TEXT}"),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", [USER], f"messages[0] (role 'user'): {NO_TEXT}"),
        (GEMMA2, [SYSTEM, USER], "the chat template refuses these messages: System role not supported"),
        (MISTRAL, [USER, DEVELOPER], "the chat template refuses these messages: Only user, assistant and tool roles"),
    ],
)
def test_a_message_that_is_left_out_is_an_error(template: str, messages: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(RowError) as caught:
        written(template, *messages)
    assert caught.value.type == "chat_template_error"
    assert caught.value.message.startswith(error)


@pytest.mark.parametrize("template", [CHATML, QWEN3, HERMES, LLAMA3, MISTRAL, PHI3, GEMMA2, DEEPSEEK_R1, BAICHUAN])
@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, ANSWER, USER],
        [TWO_PARTS],
        [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWhich one?"}, USER],
        [USER, {**ANSWER, "reasoning_content": "Hm."}, USER],
        [{**USER, "name": "Ada"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "  "}],
        [{"role": "user", "content": "café <|im_end|> \"quoted\" 'and' \\ {{ x }}"}],
    ],
)
def test_conversations_that_each_template_writes(template: str, messages: list[dict[str, Any]]) -> None:
    """None of these is an error: templates trim, escape, leave out reasoning, and add texts of their own."""
    assert "cheese" in written(template, *messages) or messages[0] != USER


@pytest.mark.parametrize("template", ["{{ m.content|upper }}", "{{ m.content|title }}", "{{ m|tojson }}", "{{ m }}"])
def test_other_ways_to_write_a_text(template: str) -> None:
    assert "cheese" in written("{% for m in messages %}" + template + "{% endfor %}", USER, ANSWER).lower()


@pytest.mark.parametrize("template", [QWEN3, HERMES, LLAMA3, MISTRAL, DEEPSEEK_CALLS])
@pytest.mark.parametrize("content", [None, "", "I look."])
def test_calls_reach_the_prompt(template: str, content: str | None) -> None:
    """Templates that join a content to other texts cannot write a message without one."""
    text = written(template, USER, call(content), TOOL)
    assert "find" in text
    assert "käse" in text
    assert "None" not in text


def test_arguments_are_text_where_the_template_joins_them() -> None:
    assert written(DEEPSEEK_CALLS, USER, call(None)).endswith('<|Assistant|><call>find\n{"kind": "käse"}')


def test_a_text_next_to_a_call_can_be_left_out() -> None:
    """Some models' formats have no place for it."""
    for template, expected in ((MISTRAL, True), (LLAMA3, True), (QWEN3, False)):
        one = chat_template(template)
        for content in ("I look.", None):
            messages = check_messages([USER, call(content), TOOL])
            assert ("I look" in one.write(messages)) is (content is not None and not expected)
            assert one.leaves_out_text(messages) is (content is not None and expected)


def test_an_answer_without_content_is_written() -> None:
    empty = {"role": "assistant", "content": None}
    assert written(CHATML, USER, empty, USER).count("<|im_start|>assistant\n<|im_end|>") == 1


def test_a_system_prompt_that_the_template_does_not_write() -> None:
    no_system = PHI3.replace("message.role == 'system'", "false")
    for template, words in ((no_system, NO_TEXT), (GEMMA2, "refuses these messages")):
        tokenizer = byte_tokenizer(300, [0])
        tokenizer.chat_template = template
        tokenizer.bos_token = "<s>"
        TextProcessor(tokenizer, DataSection())
        with pytest.raises(ConfigError, match=r"data.system_prompt: the chat template ") as caught:
            TextProcessor(tokenizer, DataSection(system_prompt="Be brief."))
        assert words.removeprefix("the chat template ") in caught.value.message
        with pytest.raises(ConfigError, match=r"data.system_prompt"):
            TextProcessor(tokenizer, DataSection(system_prompt="Be brief.", prompts_as_chat=False))
    # Indices are those of the row.
    with pytest.raises(RowError, match=r"messages\[2\] \(role 'tool'\)"):
        written(PHI3, USER, ANSWER, TOOL, system_prompt="Be brief.")
    assert "Be brief." in written(PHI3, USER, system_prompt="Be brief.")


def test_a_template_that_writes_no_message_is_found_at_the_start() -> None:
    for template in ("{{ prompt }}", "Hello", "{% for m in messages %}{{ m.text }}{% endfor %}"):
        with pytest.raises(ConfigError, match=r"data.chat_template does not write the text of a user's message"):
            chat_template(template).check()


def test_a_template_that_refuses_long_texts() -> None:
    template = "{% for m in messages %}{% if m.content|length > 6 %}{{ raise_exception('too long') }}{% endif %}"
    template += "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert written(template, {"role": "user", "content": "hi"}) == "hi"
    with pytest.raises(RowError, match="too long"):
        written(template, USER)
    with pytest.raises(RowError, match=r"messages\[1\] \(role 'tool'\): the chat template leaves out"):
        written(template, {"role": "user", "content": "hi"}, {"role": "tool", "content": "ho"})


def test_conversations_of_one_shape_are_examined_once() -> None:
    seen: list[Any] = []

    class Tokenizer:
        chat_template = PHI3

        def apply_chat_template(self, messages: Any, tools: Any = None, **_: Any) -> str:
            seen.append(messages)
            return str(messages)

    one = ChatTemplate(Tokenizer(), DataSection())
    one.check()
    seen.clear()
    for number in range(50):
        one.write([{"role": "user", "content": f"question {number}"}])
    assert len(seen) == 50
    for number in range(50):
        one.write([SYSTEM, {"role": "user", "content": f"question {number}"}])
    assert len(seen) == 101
