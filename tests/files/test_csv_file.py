"""CSV and TSV files: text in every cell, fields counted, and parameters read where a parameter is wanted."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError, RowError
from specbatch.files import csv_file
from specbatch.files.jsonl import BadRow
from specbatch.rows.cells import TemplateCell
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.row import Row
from specbatch.rows.shard import Shard
from specbatch.rows.sources import Source, open_source
from specbatch.rows.templates import PromptTemplate
from specbatch.types import SamplingParams
from tests.job.test_generate import Run
from tests.rows.asked import asked
from tests.stub_engine import StubEngine

DATA = DataSection()


def source(folder: Path, content: str | bytes, name: str = "d.csv") -> Source:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(str(folder / name), DATA)


def rows(folder: Path, content: str | bytes, name: str = "d.csv") -> list[Any]:
    return [row.data for row in source(folder, content, name).rows()]


def parsed(folder: Path, content: str, data: DataSection = DATA) -> list[tuple[Row, Row | RowError]]:
    parser = RowParser(SamplingParams(), data)
    return [asked(parser.parse(row)) for row in source(folder, content).rows()]


def params(folder: Path, columns: str, cells: str) -> SamplingParams:
    ((_, prompt),) = parsed(folder, f"prompt,{columns}\nx,{cells}\n")
    assert isinstance(prompt, Row), prompt
    return prompt.params


def error(folder: Path, columns: str, cells: str) -> RowError:
    ((_, found),) = parsed(folder, f"prompt,{columns}\nx,{cells}\n")
    assert isinstance(found, RowError)
    return found


def test_every_cell_is_its_text(tmp_path: Path) -> None:
    found = rows(tmp_path, "id,zip,v\n001,02139,3.10\n,1e5,TRUE\n12345678901234567890,NA,0.1234567890123456789\n")
    assert found == [
        {"id": "001", "zip": "02139", "v": "3.10"},
        {"id": "", "zip": "1e5", "v": "TRUE"},
        {"id": "12345678901234567890", "zip": "NA", "v": "0.1234567890123456789"},
    ]


def test_a_cell_is_the_same_in_each_part_of_a_long_file(tmp_path: Path) -> None:
    content = "code,prompt\n" + "07,p\n" * 10_050 + "x7,p\n"
    found = rows(tmp_path, content)
    assert {row["code"] for row in found[:-1]} == {"07"}
    assert source(tmp_path, content).total == len(found) == 10_051


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.csv", b'\xef\xbb\xbf"prompt","id"\r\n"a, ""b""\r\nc",""\r\n\r\n', [{"prompt": 'a, "b"\r\nc', "id": ""}]),
        ("d.tsv", b"prompt\tid\na, b\t1\n", [{"prompt": "a, b", "id": "1"}]),
        ("d.csv", b"prompt,id\ra,1\r", [{"prompt": "a", "id": "1"}]),
        ("d.csv", b"prompt,id\na\0b,1", [{"prompt": "a\0b", "id": "1"}]),
        ("d.csv", b"\n ,\nprompt,id\n", []),
        ("d.csv", b",prompt,\n0,a,\n", [{"Unnamed: 0": "0", "prompt": "a", "Unnamed: 2": ""}]),
        ("d.csv", b"prompt\n" + b"x" * 200_000 + b"\n", [{"prompt": "x" * 200_000}]),
        ("d.CSV.GZ", gzip.compress(b"prompt\na\n", mtime=0), [{"prompt": "a"}]),
    ],
)
def test_forms_of_files(tmp_path: Path, name: str, content: bytes, expected: list[Any]) -> None:
    assert rows(tmp_path, content, name) == expected


def test_a_row_with_another_number_of_fields_is_an_error_of_its_own(tmp_path: Path) -> None:
    found = rows(tmp_path, 'id,prompt\n1,Hello, you\n2,ok\n3\n"4\n",a,\n5,ok\n')
    messages = [row.message if isinstance(row, BadRow) else row["id"] for row in found]
    assert messages == [
        "line 2 has 3 fields, but the header has 2",
        "2",
        "line 4 has 1 field, but the header has 2",
        "line 5 has 3 fields, but the header has 2",
        "5",
    ]


def test_other_rows_that_cannot_be_read(tmp_path: Path) -> None:
    found = rows(tmp_path, b'prompt,id\n"He said "hi"",1\nok,2\ncaf\xe9,3\ncaf\xc3\xa9,4\n')
    assert [row.type if isinstance(row, BadRow) else row["id"] for row in found] == [
        "invalid_csv",
        "2",
        "invalid_text",
        "4",
    ]
    assert "line 2 has text after the closing quote" in found[0].message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,prompt,a\n1,2,3\n", "two columns 'a'"),
        ("id;prompt\n1;a\n", "are not separated by commas"),
        ("id\tprompt\n1\ta\n", "are not separated by commas"),
        (b"caf\xe9,prompt\n", "header .* is not UTF-8"),
        ('prompt,id\nok,1\n"open,2\nx,3\n', "a quote that opens in the row at line 3 is not closed"),
    ],
)
def test_files_that_cannot_be_read_are_refused_at_once(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        source(tmp_path, content)


def test_a_field_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "MAX_FIELD_CHARS", 1000)
    assert len(rows(tmp_path, "prompt\n" + "x" * 900)) == 1
    with pytest.raises(InputError, match=r"line 2 of .* is longer"):
        source(tmp_path, "prompt\n" + "x" * 2000)
    with pytest.raises(InputError, match="at line 2 is not closed"):
        source(tmp_path, 'prompt\n"' + "x\n" * 1000)


def test_columns_are_read_as_the_parameter_wants_them(tmp_path: Path) -> None:
    found = params(tmp_path, "temperature,max_tokens,seed,ignore_eos,n", ".5,5.0, 9007199254740993 ,TRUE,")
    assert found == SamplingParams(5, 0.5, seed=9007199254740993, ignore_eos=True)
    assert params(tmp_path, "stop,stop_token_ids", '"[""a"",""b""]","[1, 2]"').stop == ("a", "b")
    for text in ("5", "[1]", "a,b", "true"):
        assert params(tmp_path, "stop", f'"{text}"').stop == (text,)
    assert params(tmp_path, "logit_bias", '"{""5"": 1.5}"').logit_bias == {5: 1.5}
    assert params(tmp_path, "regex", "5").regex == "5"
    assert params(tmp_path, "best_of,echo,num_beams", "1,False,1.0") == SamplingParams()


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("temperature", "hot", "temperature must be a number .*not 'hot'"),
        ("max_tokens", "5.5", "max_tokens must be an integer"),
        ("seed", "1_0", "seed must be an integer"),
        ("seed", "9" * 5000, "seed must be an integer"),
        ("top_p", "nan", "top_p must be a number"),
        ("ignore_eos", "yes", "ignore_eos must be true or false"),
        ("best_of", "2", "best_of is not supported"),
        ("messages", "[{'role': 'user'}]", "messages is not valid JSON"),
        ("tools", "x", "tools must be a list, not text"),
    ],
)
def test_a_cell_that_is_no_such_value_is_an_error_of_its_row(
    tmp_path: Path, column: str, cell: str, words: str
) -> None:
    with pytest.raises(RowError, match=words):
        raise error(tmp_path, column, f'"{cell}"')


def test_a_column_of_messages_is_json(tmp_path: Path) -> None:
    content = 'id,messages,prompt\n1,"[{""role"":""user"",""content"":""hi""}]",\n,,"[""a""]"\n'
    (_, chat), (info, text) = parsed(tmp_path, content)
    assert isinstance(chat, Row)
    assert isinstance(text, Row)
    assert chat.content == [{"role": "user", "content": "hi"}]
    assert (text.kind, text.content, info.id) == ("prompt", '["a"]', None)


def test_cells_in_a_template(tmp_path: Path) -> None:
    template = DataSection(prompt_template="{zip} {name} {share:.1f} {share!r}")
    found = parsed(tmp_path, "zip,name,share,max_tokens\n02139,,0.25,many\n,,,\n1,b,c,\n", template)
    assert isinstance(found[0][1], Row)
    assert found[0][1].content == "02139  0.2 '0.25'"
    assert found[0][0].metadata == {"zip": "02139", "name": "", "share": "0.25", "max_tokens": "many"}
    messages = [prompt.message for _, prompt in found[1:] if isinstance(prompt, RowError)]
    assert messages[0] == "the row has no content in zip and name and share"
    assert "does not fit the row" in messages[1]
    ((_, first),) = parsed(tmp_path, "q\nabc\n", DataSection(prompt_template="{q[0]}"))
    assert isinstance(first, RowError), "an item of a text would be one character"


def test_an_empty_prompt_is_missing(tmp_path: Path) -> None:
    for data in (DATA, DataSection(prompt_column="prompt")):
        (_, missing), (_, prompt) = parsed(tmp_path, "id,prompt\n1,\n2,007\n", data)
        assert isinstance(missing, RowError)
        assert missing.type == "missing_prompt"
        assert isinstance(prompt, Row)
        assert prompt.content == "007"


def test_a_file_without_a_good_row_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    parser = RowParser(SamplingParams(), DATA)
    with pytest.raises(InputError, match="cannot be read: line 2 has 3 fields, but the header has 2"):
        with_checked_fields(source(tmp_path, "id,prompt\na,one,\nb,two,\n"), parser)
    checked = with_checked_fields(source(tmp_path, "id,prompt\na,one,\nb,two\n"), parser)
    assert [row.index for row in checked.rows()] == [0, 1]


def test_a_job_over_bad_rows_is_resumed_and_sharded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.input = tmp_path / "d.csv"
    run.input.write_text("id,prompt\n" + "".join(f"{i:03d},p{i}{', x' * (i % 3 == 1)}\n" for i in range(9)))
    assert run() == 1
    whole = run.output.read_bytes()
    assert run.results()[0]["id"] == "000"
    assert [row.get("error", {}).get("type") for row in run.results()] == [None, "invalid_csv", None] * 3
    assert run(shard=Shard(1, 3)) == 1
    assert (tmp_path / "d.results.1-of-3.jsonl").read_bytes().splitlines() == whole.splitlines()[1::3]
    run.output.unlink()
    (tmp_path / "d.results.stats.json").unlink()
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=2))
    assert run() == 1
    assert run.output.read_bytes() == whole


@pytest.mark.parametrize(
    ("cell", "spec", "text"),
    [("42", "05", "00042"), ("3.5", "06.2f", "003.50"), ("02139", "05", "02139"), ("42", ">5", "   42")],
)
def test_a_number_is_filled_with_zeros_before_it(cell: str, spec: str, text: str) -> None:
    """Python's format pads a text with zeros at its end, and a number at its beginning."""
    assert f"{TemplateCell(cell):{spec}}" == text


def test_a_cell_in_a_template_can_be_cut() -> None:
    cells = {"body": TemplateCell("It crashes often"), "n": TemplateCell("x")}
    for template, text in (("{{ body[:2] }}", "It"), ("{{ body|truncate(8) }}", "It...")):
        assert PromptTemplate(template).fill(cells) == text
    with pytest.raises(RowError, match="no items"):
        PromptTemplate("{body[0]}").fill(cells)
    with pytest.raises(RowError, match="for object of type 'str'"):
        PromptTemplate("{n:.2f}").fill(cells)
