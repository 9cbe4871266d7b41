"""Checks of a configuration and of the first rows of a file, without loading a model's weights."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.files.template_files import with_template_texts
from specbatch.job.row_queue import RowPreparer
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow, open_source
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.resolve import ResolvedRun
from specbatch.types import EngineLimits

_ROWS = 100


@dataclass(frozen=True)
class CheckedRows:
    """The first rows of a file, prepared. `errors`: the number of rows by the text of their error. `prompt`: the
    tokens of the first row that can run, as text; None: no row can."""

    num_rows: int
    errors: dict[str, int]
    prompt: str | None
    num_tokens: int

    def lines(self, name: str) -> list[str]:
        """Say it in words."""
        failed = sum(self.errors.values())
        found = [f"{name}: {self.num_rows - failed} of the first {self.num_rows} rows can run"]
        found += [f"{count} rows: {message}" for message, count in self.errors.items()]
        if self.prompt is not None:
            found.append(f"the first of them has {self.num_tokens} tokens:\n{self.prompt}")
        return found


class ConfigCheck:
    """A check of what `generate` would refuse, by the resolved configuration and the tokenizer of its model. It raises
    SpecbatchError for templates, schemas and grammars that cannot work."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, longest_row: int) -> None:
        self._config = config = with_template_texts(config)
        self._tokenizer = tokenizer
        self._limits = EngineLimits(longest_row - 1, len(tokenizer))
        self._parser = RowParser(config.sampling, config.data, config.model.target)
        self._texts = TextProcessor(tokenizer, config.data)
        plain = RowParser(config.sampling, replace(config.data, prompt_template=None, prompt_column=None))
        (row,) = RowPreparer(plain, self._texts, self._limits)([RawRow(0, {"prompt": "x"})])
        if row.error is not None:  # The options of `sampling` cause it, for the prompt has nothing.
            raise ConfigError(f"sampling: {row.error.message}")

    @staticmethod
    def of_run(run: ResolvedRun) -> ConfigCheck:
        return ConfigCheck(run.config, run.tokenizer, run.target.config.max_position_embeddings)

    def rows(self, ref: str) -> CheckedRows:
        """Prepare the first rows of an input as `generate` does. Raise InputError if it cannot be read, or if no row
        has the fields that prompts are made of."""
        source = with_checked_fields(open_source(ref, self._config.data), self._parser)
        raws = list(itertools.islice(source.rows(), _ROWS))
        rows = RowPreparer(self._parser, self._texts, self._limits)(raws)
        errors = Counter(row.error.message for row in rows if row.error is not None)
        first: Row | None = next((row for row in rows if row.error is None), None)
        tokens = [] if first is None else first.token_ids
        prompt = None if first is None else str(self._tokenizer.decode(tokens))
        return CheckedRows(len(rows), dict(errors), prompt, len(tokens))
