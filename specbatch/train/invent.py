"""Prompts that the target invents: it continues its chat template up to the user's words (Magpie, Xu et al. 2024,
arXiv:2406.08464).

A head learns from the target's answers. Prompts of many kinds give many kinds of answers, but few people have such a
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specbatch.errors import ConfigError, RowError
from specbatch.rows.tokenizer import TextProcessor
from specbatch.train.answers import Pipeline, run_rows
from specbatch.train.prompts import Messages, read_lines, write_job

_MARK = "\u2042specbatch\u2042"  # a placeholder for the user's words
_TEMPERATURE, _TOP_P = 1.0, 0.95  # a wide choice, without the unlikely tokens after which small models write nonsense
_MAX_TOKENS = 256  # a prompt that is not finished by then is dropped
_FEWEST_CHARACTERS = 12


def opening(tokenizer: PreTrainedTokenizerBase, texts: TextProcessor) -> tuple[str, str]:
    """Return the chat template's text before the user's words, and its text after them, stripped of white space. It
    raises ConfigError for a template that refuses or changes the user's words."""
    try:
        written = texts.chat_text([{"role": "user", "content": _MARK}])
    except RowError as error:
        raise ConfigError(f"--invent: {error.message}", "give files of prompts") from error
    before, mark, after = written.partition(_MARK)
    if not mark:
        raise ConfigError("--invent: the chat template does not repeat what the user says")
    # Text prompts get the tokens that begin a text from the tokenizer; the template may have written them, too.
    begin = tokenizer.bos_token
    if isinstance(begin, str) and tokenizer.encode("a")[0] == tokenizer.bos_token_id:
        before = before.removeprefix(begin)
    return before, after.strip()


def ends(after: str, tokenizer: PreTrainedTokenizerBase, texts: TextProcessor) -> dict[str, Any]:
    """Return the sampling options that end the user's words where the template goes on with `after`: at its first line,
    and at its special tokens, which decoded text does not show."""
    ids = tokenizer.encode(after, add_special_tokens=False)
    special = [token for token in dict.fromkeys(ids) if texts.token_text(token).strip() and not texts.decode([token])]
    return {"stop": after.splitlines()[:1], "stop_token_ids": special}


def invent(
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    texts: TextProcessor,
    folder: Path,
    pipeline: Pipeline,
    *,
    overwrite: bool = False,
) -> list[Messages]:
    """Let the target invent `count` prompts, and return the good ones without repetitions: they are finished, not too
    short, and do not begin another conversation.

    This is a job like the answers (folder/invented.jsonl), so it resumes and is not done twice. It raises
    SpecbatchError.
    """
    before, after = opening(tokenizer, texts)
    row = {"prompt": before, "temperature": _TEMPERATURE, "top_p": _TOP_P, "max_tokens": _MAX_TOKENS}
    row |= ends(after, tokenizer, texts)
    rows, results = folder / "invent.jsonl", folder / "invented.jsonl"
    write_job(rows, [{"id": i, **row, "seed": seed + i} for i in range(count)], results, overwrite=overwrite)
    how = ["speculation.method=none", f"sampling.temperature={_TEMPERATURE}", "data.prompts_as_chat=false"]
    run_rows(rows, results, how, pipeline, overwrite=overwrite)
    return sensible([r["text"] for r in read_lines(results) if r["finish_reason"] == "stop"], tokenizer)


def sensible(found: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Messages]:
    """Return the prompts of `found`, in order, without repetitions and fragments."""
    special = [token for token in tokenizer.all_special_tokens if token.strip()]
    kept: dict[str, None] = {}
    for text in map(str.strip, found):
        if len(text) >= _FEWEST_CHARACTERS and not any(token in text for token in special):
            kept[text] = None
    return [[{"role": "user", "content": text}] for text in kept]
