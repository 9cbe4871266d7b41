"""Prompts that can be other than they were meant: they run, and a line at the end counts them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from specbatch.config import DataSection
from specbatch.job.row_queue import RowPreparer
from specbatch.job.warnings import Remarks
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.results.finished import remark_on
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import EngineLimits, SamplingParams
from tests.rows.chat_templates import CHATML, HERMES, LLAMA3, MISTRAL

TEXT = {"prompts_as_chat": False}
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def tokenizer(adds_bos: bool) -> PreTrainedTokenizerBase:
    made = byte_tokenizer(300, [0])
    made.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    if adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


def remarks(rows: list[dict[str, Any]], adds_bos: bool = True, **data: Any) -> list[str]:
    section = DataSection(**data)
    parser = RowParser(SamplingParams(), section)
    prepare = RowPreparer(parser, TextProcessor(tokenizer(adds_bos), section), EngineLimits(4000, 400))
    found = Remarks("m", columns=False)
    for prepared in prepare([RawRow(index, json.dumps(row).encode()) for index, row in enumerate(rows)]):
        assert prepared.error is None, prepared.error
        found.add(prepared.index, remark_on(prepared))
    return found.lines()


def completion(prompt: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}


def test_a_prompt_that_begins_with_bos_has_it_twice() -> None:
    rows = [{"prompt": "hi"}, {"prompt": "<s>hi"}, completion("<s>hi"), {"prompt": "hi <s>"}]
    (line,) = remarks(rows, **TEXT)
    assert "(BOS)" in line
    assert line.endswith(": 2 rows")
    assert remarks(rows, adds_bos=False, **TEXT) == []
    # Token ids run as they are, and a chat template writes BOS itself.
    assert remarks([{"prompt_token_ids": [300, 300, 5]}, completion([300, 300])], **TEXT) == []
    assert remarks([{"messages": [{"role": "user", "content": "hi"}]}], chat_template=LLAMA3) == []


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "\n<s>hi"),
        (MISTRAL, "[INST] hi [/INST]"),
        (LLAMA3, "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"),
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}",
            "<|user|>\nhi</s>\n<|assistant|>\n",
        ),
    ],
)
def test_a_prompt_that_a_template_has_written(template: str, prompt: str) -> None:
    rows = [{"prompt": prompt}, {"prompt": "hi"}, {"prompt": "[1] <b>bold</b>"}, {"prompt": "Write <s> in HTML."}]
    (line,) = remarks(rows, chat_template=template)
    assert "data.prompts_as_chat: false" in line
    assert line.endswith(": 1 row")
    assert remarks([{"prompt": prompt.replace("<s>", "")}], chat_template=template, **TEXT) == []
    assert remarks([completion(prompt.replace("<s>", ""))], chat_template=template) == []


def test_a_text_next_to_a_call_that_is_left_out() -> None:
    def row(content: str | None) -> dict[str, Any]:
        turn = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        return {"messages": [{"role": "user", "content": "hi"}, turn, {"role": "tool", "content": "ho"}]}

    (line,) = remarks([row("I look."), row(None), row("")], chat_template=MISTRAL)
    assert "without the text next to them" in line
    assert line.endswith(": 1 row")
    assert remarks([row("I look.")], chat_template=HERMES) == []
