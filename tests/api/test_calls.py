"""Options of a call, conversations, schemas, and the list of results."""

from __future__ import annotations

import pickle
import re
from typing import Any, Literal

import datasets
import numpy as np
import pydantic
import pytest

from specbatch import LLM, BatchMap, Results, generate_file
from specbatch.errors import ConfigError, InputError
from specbatch.rows.sources import RawRow
from specbatch.types import SamplingParams

ROWS = [{"prompt": f"p{i}", "id": i} for i in range(20)]
HI = [{"role": "user", "content": "hi"}]


class Ticket(pydantic.BaseModel):
    label: Literal["billing", "bug"]
    urgent: bool
    score: Literal[1, 2] | None


class Picky(pydantic.BaseModel):
    label: Literal["billing", "bug"]

    @pydantic.field_validator("label")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError("neither is good")


@pytest.mark.usefixtures("stub")
def test_options_of_a_call_are_defaults_of_its_rows() -> None:
    """Options of a call act as those of the configuration do. The fields of a row have precedence over them."""
    options = {"max_tokens": 5, "temperature": 1.0, "logprobs": 1}
    rows = [*ROWS, {"prompt": "x", "max_tokens": 2}]
    with LLM(**options, **{"sampling.seed": 7}) as configured, LLM(max_tokens=9) as plain:
        expected = configured.generate(rows)
        assert plain.generate(rows, **options, seed=7) == expected
        assert list(plain.stream(rows, **options, seed=7)) == expected
        assert len({result.text for result in plain.generate(["same"] * 8, temperature=1.0, seed=7)}) > 1
        assert plain.generate(ROWS) != expected[:20]
        body = {"model": "m", "prompt": "p"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        [short] = plain.generate(line, max_new_tokens=3, ignore_eos=True)
        assert short["response"]["body"]["usage"]["completion_tokens"] == 3
    with LLM(**{"data.prompt_template": "{name}"}) as templates:
        table = datasets.Dataset.from_dict({"name": ["x"], "max_tokens": [9]})
        [result] = templates.generate(table, max_tokens=2, ignore_eos=True)
        assert result["usage"]["completion_tokens"] == 2
        assert result["metadata"] == {"name": "x", "max_tokens": 9}


def test_rows_of_a_call_are_sent_whole() -> None:
    row = RawRow(3, b"{}", SamplingParams(max_tokens=2), 7)
    assert pickle.loads(pickle.dumps(row)) == row


@pytest.mark.usefixtures("stub")
def test_indices_go_on_in_the_next_call() -> None:
    with LLM(temperature=1.0) as llm:
        whole = llm.generate(["same"] * 6)
        parts = [llm.generate(["same"] * 3, first_index=first) for first in (0, 3)]
    assert parts[0] + parts[1] == whole


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"in_order": False}, "no sampling option in_order", r"stream\(rows, in_order=False\)"),
        ({"sampling_params": 1}, "no sampling option sampling_params", "max_tokens=64"),
        ({"max_token": 1}, "no sampling option max_token", "did you mean max_tokens"),
        ({"batch_size": 1}, "no sampling option batch_size", r"engine\.max_batch_size is set by LLM"),
        ({"guided_json": {}}, "no sampling option guided_json", "schema="),
        ({"zzz": 1}, "no sampling option zzz", "options.md"),
        ({"temperature": -1}, "temperature must be >= 0", ""),
        ({"schema": 3}, "schema is of type int", "pydantic"),
        ({"schema": {"type": "object"}, "response_format": {"type": "text"}}, "both given", "one of the two"),
    ],
)
def test_wrong_options_of_a_call_are_named(options: dict[str, Any], message: str, hint: str) -> None:
    with LLM() as llm:
        with pytest.raises(ConfigError, match=message) as caught:
            llm.generate("x", **options)
        assert len(llm.generate("x")) == 1
    assert re.search(hint, caught.value.hint or "")


@pytest.mark.usefixtures("stub")
def test_the_model_has_one_name_more() -> None:
    with LLM(model="m") as first, LLM("m") as second, LLM(target="m") as third:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}
        for llm in (first, second, third):
            assert llm.generate(line)[0]["response"]["body"]["model"] == "m"
    with pytest.raises(ConfigError, match=r"target gives the option model\.target a second time"):
        LLM(model="m", target="m")
    with pytest.raises(InputError, match="absent"):
        generate_file("absent.jsonl", model="m")


@pytest.mark.usefixtures("stub")
def test_chats_are_conversations() -> None:
    with LLM() as llm:
        rows = llm.generate([{"messages": HI}] * 2, max_tokens=4)
        assert llm.chat(HI, max_tokens=4) == rows[:1]
        assert llm.chat([HI, HI], max_tokens=4) == rows
        assert llm.chat(iter([HI, HI]), max_tokens=4) == rows
        assert llm.chat([]) == []
        [refused] = llm.chat(HI, tools=3)
        assert "tools" in str(refused.error)
        with pytest.raises(InputError, match="type str"):
            llm.chat("hi")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="conversation 1 is of type str"):
            llm.chat([HI, "hi"])  # type: ignore[list-item]


@pytest.mark.usefixtures("stub")
def test_results_are_a_list_of_dicts() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI}}
    with LLM(max_tokens=30) as llm:
        results = llm.generate([*ROWS, line, {"prompt": 3}, {**line, "body": {}}])
    assert isinstance(results, Results)
    assert len(results) == 23
    assert [result["index"] for result in results[:20]] == list(range(20))
    assert results[0].text == results[0]["text"] == results.texts[0]
    assert results[20].text == results[20]["response"]["body"]["choices"][0]["message"]["content"]
    assert (results[20].finish_reason, results[20].error) == ("stop", None)
    assert (results[21].text, results[21].finish_reason) == (None, "error")
    assert results[21].error == "invalid_type: prompt must be text, not a number"
    assert results[22].text is None
    assert str(results[22].error).startswith("missing_prompt: ")
    assert pickle.loads(pickle.dumps(results)) == results
    frame = results.to_pandas()
    assert list(frame) == ["id", "text", "finish_reason", "error"]
    assert frame["text"].tolist()[:20] == results.texts[:20]
    assert results[20:].to_pandas()["id"].tolist()[0] == "a"
    assert results[-1].finish_reason == "error"


def test_a_class_as_schema_gives_objects(tiny: LLM) -> None:
    rows: list[Any] = [{"prompt": f"p{i}", "text": "mine"} for i in range(6)]
    results = tiny.generate([*rows, {"prompt": 3}, {"prompt": "cut", "max_tokens": 2}], schema=Ticket, max_tokens=80)
    assert all(isinstance(one, Ticket) for one in results.parsed[:6])
    assert results.parsed[6:] == [None, None]
    assert results[7].finish_reason == "length"
    frame = results.to_pandas()
    assert list(frame) == ["text", "label", "urgent", "score", "text_answer", "finish_reason", "error"]
    assert [str(frame[name].dtype) for name in ("urgent", "score")] == ["boolean", "Int64"]
    assert frame["label"].value_counts().sum() == 6
    assert frame["label"].tolist()[:6] == [one.label for one in results.parsed[:6]]
    again = tiny.generate(rows, schema=Ticket.model_json_schema(), max_tokens=80)
    assert again.parsed == [one.model_dump() for one in results.parsed[:6]]
    assert list(tiny.stream(rows, schema=Ticket, max_tokens=80)) == results[:6]
    assert set(tiny.generate("x", schema="ok: one of yes, no", max_tokens=40)[0].parsed) == {"ok"}


def test_an_answer_that_the_class_refuses_is_no_object(tiny: LLM) -> None:
    [result] = results = tiny.generate("x", schema=Picky, max_tokens=40)
    assert (result.parsed, result.is_whole) == (None, True)
    assert "neither is good" in str(result.error)
    frame = results.to_pandas()
    assert frame["label"].isna().all()
    assert "neither is good" in frame["error"][0]


def test_a_data_set_is_mapped(tiny: LLM) -> None:
    """The real package maps the rows. The first batch has no errors, and the types do not depend on it."""
    names = datasets.Features({"prompt": datasets.Value("string"), "gold": datasets.ClassLabel(names=["a", "b"])})
    rows = {"prompt": ["p0", "p1", "p2", "x" * 5000, "p4"], "gold": [0, 1, 0, 1, 0]}
    dataset = datasets.Dataset.from_dict(rows, features=names).add_column("note", [None, None, "n", None, "m"])
    mapped = dataset.map(BatchMap(tiny, schema=Ticket, max_tokens=80), batched=True, batch_size=2)
    assert mapped.features["gold"] == names["gold"]
    assert mapped.column_names == [
        "prompt",
        "gold",
        "note",
        "label",
        "urgent",
        "score",
        "text",
        "finish_reason",
        "error",
    ]
    assert mapped.features["score"].dtype == "int64"
    expected = tiny.generate(dataset, schema=Ticket, max_tokens=80)
    assert list(mapped["text"]) == expected.texts
    assert str(mapped["error"][3]).startswith("prompt_too_long")
    tensors = dataset.remove_columns("note").with_format("torch")
    assert (
        list(tensors.map(BatchMap(tiny, max_tokens=8), batched=True)["text"])
        == tiny.generate(dataset, max_tokens=8).texts
    )
    sampled = dataset.map(BatchMap(tiny, temperature=1.0, max_tokens=8), batched=True, batch_size=2)
    assert list(sampled["text"]) == tiny.generate(dataset, temperature=1.0, max_tokens=8).texts
    cube = BatchMap(tiny, max_tokens=8)({"prompt": np.array(["p0"]), "cube": np.zeros((1, 2, 2), np.float32)})
    assert cube["cube"].to_pylist() == [[[0.0, 0.0], [0.0, 0.0]]]
