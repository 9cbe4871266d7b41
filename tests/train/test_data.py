"""Prompts, examples, and what an evaluation runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from specbatch.config import DataSection
from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.errors import InputError
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.speculation import resolve_speculation
from specbatch.train.acceptance import count_rounds
from specbatch.train.checkpoint import vocabulary_maps
from specbatch.train.evaluate import held_out_rows, parse_ways
from specbatch.train.examples import Example, batches, draft_vocabulary, make_examples, padded_length, split
from specbatch.train.invent import ends, opening, sensible
from specbatch.train.plot import plot
from specbatch.train.prompts import PromptFile, messages_of, read_lines, read_prompts, rows_of, write_lines
from specbatch.train.trainer import described


def test_draft_vocabulary_is_the_most_frequent_tokens() -> None:

    examples = [
        Example([7, 7, 7, 7, 3, 9, 9, 5], 4, 0, True),  # the prompt's 7s do not count
        Example([1, 9, 3, 3, 12], 1, 1, True),
    ]
    ids, covered = draft_vocabulary(examples, 3, 20)
    assert ids.tolist() == [3, 5, 9]  # 3 and 9 three times each, 5 before 12
    assert covered == pytest.approx(7 / 8)
    assert draft_vocabulary(examples, 3, 20, always=[2])[0].tolist() == [2, 3, 9]
    assert draft_vocabulary(examples, 6, 20)[0].tolist() == [0, 1, 3, 5, 9, 12]
    assert draft_vocabulary(examples, 99, 20)[0].tolist() == list(range(20))
    maps = vocabulary_maps(ids, 20)
    assert (maps["d2t"] + torch.arange(3)).tolist() == [3, 5, 9]
    assert maps["t2d"].nonzero().view(-1).tolist() == [3, 5, 9]


def test_batches_cover_every_example_once_within_their_size() -> None:

    lengths = [(37 * i) % 500 + 1 for i in range(300)] + [2000]
    plan = batches(lengths, 1024, seed=0, epoch=1)
    assert sorted(i for b in plan for i in b) == list(range(301))
    assert all(len(b) * padded_length(max(lengths[i] for i in b)) <= 1024 or len(b) == 1 for b in plan)
    assert plan == batches(lengths, 1024, seed=0, epoch=1)
    assert plan != batches(lengths, 1024, seed=0, epoch=2)
    padded = sum(len(b) * padded_length(max(lengths[i] for i in b)) for b in plan)
    assert sum(map(padded_length, lengths)) > 0.9 * padded


def test_rounds_are_counted_as_the_engine_does() -> None:

    example = Example(list(range(10)), 4, 0, True)  # first answer token 4, then 5 .. 9 from rounds
    hits = torch.zeros(10, 2, dtype=torch.bool)
    assert count_rounds(hits, example) == 5
    hits[3] = torch.tensor([True, True])  # 5, 6 and 7 in one round; then chain 6
    hits[6] = torch.tensor([False, True])  # the first is wrong: 8 alone
    assert count_rounds(hits, example) == 3
    assert count_rounds(torch.ones(10, 2, dtype=torch.bool), example) == 2


ROWS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "gsm8k": ({"question": "How many?", "answer": "4"}, [{"role": "user", "content": "How many?"}]),
    "mt_bench": ({"turns": ["first", "second"], "category": "x"}, [{"role": "user", "content": "first"}]),
    "arena-hard": ({"turns": [{"content": "first"}]}, [{"role": "user", "content": "first"}]),
    "self-instruct": (
        {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
        [{"role": "user", "content": "Sort.\n\nb a"}],
    ),
    "self-instruct without input": (
        {"instruction": "Sing.", "instances": [{"input": "", "output": "la"}]},
        [{"role": "user", "content": "Sing."}],
    ),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": ""}, [{"role": "user", "content": "Sort.\n\nb a"}]),
    "prompt": ({"prompt": "def f():", "test": "..."}, [{"role": "user", "content": "def f():"}]),
    "messages": (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ),
    "messages with an answer": (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
        [{"role": "user", "content": "u"}],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_prompts_of_every_kind(kind: str) -> None:

    row, messages = ROWS[kind]
    assert messages_of(row) == messages


def test_prompt_files(tmp_path: Path) -> None:

    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a", "b\u2028", "a", "c")]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]))
    assert PromptFile.parse(f"{path}:3") == PromptFile(path, 3)
    assert PromptFile.parse(str(path)) == PromptFile(path, None)
    assert [m[0]["content"] for m in read_prompts([PromptFile(path)])] == ["a", "b\u2028", "c"]
    prompts = read_prompts([PromptFile(path, 3)])
    assert [m[0]["content"] for m in prompts] == ["a", "b\u2028"]
    out = tmp_path / "rows.jsonl"
    write_lines(out, rows_of(prompts, [0.0, 0.8], as_text=False))
    rows = read_lines(out)
    assert rows[2]["messages"] == prompts[1]
    assert [(r["id"], r["temperature"], r["metadata"]) for r in rows] == [
        ("0-0@0", 0.0, {"prompt": 0}),
        ("0-1@0.8", 0.8, {"prompt": 0}),
        ("1-0@0", 0.0, {"prompt": 1}),
        ("1-1@0.8", 0.8, {"prompt": 1}),
    ]
    for bad in ("[1]", '{"text": "x"}', "{", '{"prompt": 5}', '{"messages": [3]}'):
        path.write_text(lines[0] + "\n" + bad)
        with pytest.raises(InputError, match="line 2"):
            read_prompts([PromptFile(path)])
    with pytest.raises(InputError, match="cannot read"):
        read_prompts([PromptFile(tmp_path / "none")])
    write_lines(out, [{"prompt": "half a pair: \ud83d"}])
    assert read_lines(out) == [{"prompt": "half a pair: \ud83d"}]
    out.write_text('{"text": "as results\u2028are written"}\n')
    assert read_lines(out) == [{"text": "as results\u2028are written"}]


def test_files_to_evaluate_on_have_names_of_their_own(tmp_path: Path) -> None:

    files = []
    for name in ("a/test.jsonl", "b/test.jsonl", "other.jsonl", "empty.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else json.dumps({"prompt": name}) + "\n")
        files.append(PromptFile(path))
    rows = held_out_rows(files[:3], as_text=False)
    assert [r["metadata"]["file"] for r in rows] == [str(files[0].path), str(files[1].path), "other"]
    assert len({r["id"] for r in rows}) == 3
    assert {r["temperature"] for r in rows} == {0.0}
    for wrong, words in (([files[0], files[0]], "given twice"), ([files[3]], "no prompts")):
        with pytest.raises(InputError, match=words):
            held_out_rows(wrong, as_text=False)


def test_ways_to_draft_do_not_mix_with_the_configuration(tmp_path: Path) -> None:
    """A configuration that tune wrote has a schedule; another may have a tree, which lookups cannot draft."""

    shape = DraftShape(2, 2, 5)
    wanted = [("none", None, None), ("ngram", None, DraftShape(5, 1, 6)), ("eagle3", str(tmp_path), shape)]
    wanted += [("draft_model", "dir:x", shape), ("eagle", "dir:x", shape)]
    ways = parse_ways("none,ngram,2/2/5,dir:x:2/2/5,eagle=dir:x:2/2/5")
    for before in (["schedule=[{max_batch: 4, num_steps: 2, topk: 2}]"], ["num_steps=3", "topk=4", "draft=head"]):
        for way, (method, draft, decided) in zip(ways, wanted, strict=True):
            sets = [f"speculation.{option}" for option in before] + way.sets(tmp_path, "eagle3")
            found = resolve_speculation(load_config(None, sets).speculation, "random:tiny", [])
            assert (found.method, found.section.draft) == (method, draft)
            assert found.schedule == ByBatch.always(decided)


CONTENT = "{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("template", "before", "stop", "stop_ids"),
    [
        (f"<|end-257|>user\n{CONTENT}<|end-256|>\n<|end-257|>me: ", "<|end-257|>user\n", "<|end-256|>", [256, 257]),
        (f"User: {CONTENT}\n\nMe: ", "User: ", "Me:", []),
        (f"[INST] {CONTENT} [/INST]<|end-257|>", "[INST] ", "[/INST]<|end-257|>", [257]),
        (f"User: {CONTENT}\n \n", "User: ", None, []),
        (CONTENT, "", None, []),
    ],
)
def test_where_made_up_words_begin_and_end(template: str, before: str, stop: str | None, stop_ids: list[int]) -> None:
    """Decoded text does not show special tokens: they have to end it as tokens."""

    tokenizer = byte_tokenizer(260, [256, 257])
    texts = TextProcessor(tokenizer, DataSection(chat_template=template))
    found, after = opening(tokenizer, texts)
    assert found == before
    assert ends(after, tokenizer, texts) == {"stop": [] if stop is None else [stop], "stop_token_ids": stop_ids}


def test_scraps_and_repetitions_are_no_prompts() -> None:

    found = [" Say it in full.\n", "Say it.", "Say it in full.", "And what is <|end-256|> for?", "And what is that?"]
    kept = sensible(found, byte_tokenizer(260, [256, 257]))
    assert kept == [[{"role": "user", "content": text}] for text in ("Say it in full.", "And what is that?")]


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_once(adds: bool) -> None:
    """The template writes the token that begins a text, and the tokenizer may write it in front of text prompts too."""

    tokenizer = byte_tokenizer(260, [256, 257])
    tokenizer.bos_token = "<|end-257|>"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|end-257|> $A", special_tokens=[("<|end-257|>", 257)]
        )
    before, _ = opening(tokenizer, TextProcessor(tokenizer, DataSection(chat_template="{{ bos_token }}u: " + CONTENT)))
    assert tokenizer.encode(before) == [257, *tokenizer.encode("u: ", add_special_tokens=False)]


def test_examples_are_split_by_prompt_and_end_with_the_end_token() -> None:

    tokenizer = byte_tokenizer(300, [256])
    rows = [
        {
            "id": f"{n}@{t}",
            "messages": [{"role": "user", "content": "q" * n}],
            "temperature": t,
            "metadata": {"prompt": n},
        }
        for n in range(1, 11)
        for t in (0, 1)
    ]
    results = [{"id": r["id"], "text": "answer", "finish_reason": "stop"} for r in rows]
    results[0] |= {"text": None, "finish_reason": "error"}
    results[2] |= {"finish_reason": "length"}
    examples = make_examples(rows, results, tokenizer, DataSection(prompts_as_chat=True), 300, 64)
    assert len(examples) == 19
    assert bytes(examples[0].tokens[: examples[0].prompt_length]) == b"user: q\nassistant: "
    assert (bytes(examples[0].answer[:-1]), examples[0].answer[-1], examples[0].greedy) == (b"answer", 256, False)
    assert (bytes(examples[1].answer), examples[1].greedy) == (b"answer", True)
    short = make_examples(rows, results, tokenizer, DataSection(prompts_as_chat=True), 300, 24)
    assert max(len(e.tokens) for e in short) == 24
    train, held_out = split(examples, 0.2, 0)
    assert len({e.prompt for e in held_out}) == 2
    assert not {e.prompt for e in held_out} & {e.prompt for e in train}
    with pytest.raises(InputError, match="two prompts"):
        split(examples[:1], 0.2, 0)


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    said: list[str] = []
    records = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "validation": {"loss": 3.1, "accuracy": [0.1, 0.2]}},
        {"step": 2, "loss": 2.0},
    ]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot(records, tmp_path / "a.png", "title", said.append)
    assert "pip install" in said[0]
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert plot(records, tmp_path / "a.png", "title", said.append)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_validation_of_many_steps_is_one_short_line() -> None:
    shown = described({"loss": 1.0, "accuracy": [0.5] * 40, "tokens_per_round": {3: 1.5}})
    assert shown == "validation loss 1.000, right by step " + "0.50 " * 7 + "0.50; tokens per round: 3 steps 1.50"
