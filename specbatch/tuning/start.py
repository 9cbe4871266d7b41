"""What `specbatch tune` can check before it loads a model. It needs no torch, whose import takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.pipeline.preview import with_checked_fields
from specbatch.pipeline.rows import RowParser
from specbatch.pipeline.sources import Source, open_source
from specbatch.pipeline.tokenizer import with_chat_template_text
from specbatch.tuning.options import TuneOptions
from specbatch.tuning.rows import check_enough


@dataclass(frozen=True)
class Rows:
    """What to tune on."""

    config: Config  # with data.chat_template as text
    parser: RowParser
    source: Source


def open_rows(options: TuneOptions, config: Config) -> Rows:
    """Raises SpecbatchError for an output that cannot be written, a configuration that leaves nothing to tune, and rows
    that cannot be read or are too few."""
    options.check()
    if config.speculation.method == "none":
        raise ConfigError(
            "there is nothing to tune: speculation.method is none", hint="use ngram, which needs no model"
        )
    if config.speculation.simulate_acceptance is not None:
        raise ConfigError(
            "speculation.simulate_acceptance accepts by lot: there is nothing to tune", hint="set it to null"
        )
    config = with_chat_template_text(config)
    parser, source = RowParser(config.sampling, config.data), open_source(options.data, config.data)
    check_enough(source)
    return Rows(config, parser, with_checked_fields(source, parser))
