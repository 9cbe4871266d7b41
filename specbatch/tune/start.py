"""What `specbatch tune` can check before it loads a model. It needs no torch, whose import takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbatch.config import Config
from specbatch.errors import ConfigError, InputError
from specbatch.job.paths import check_can_write, check_input_name, check_written, files_read, output_file
from specbatch.job.rows import RowParser, with_checked_fields
from specbatch.job.sources import Source, open_source
from specbatch.job.tokenizer import with_chat_template_text
from specbatch.tune.files import tuned_files
from specbatch.tune.options import TuneOptions
from specbatch.tune.rows import check_enough


@dataclass(frozen=True)
class Rows:
    """What to tune on, and where the result goes."""

    output: Path  # no link
    config: Config  # with data.chat_template as text
    parser: RowParser
    source: Source


def open_rows(options: TuneOptions, config: Config) -> Rows:
    """Raises SpecbatchError for an output that cannot be written, a configuration that leaves nothing to tune, and rows
    that cannot be read or are too few."""
    output = _checked_output(options, config)
    if config.speculation.method == "none":
        raise ConfigError(
            "there is nothing to tune: speculation.method is none", hint="use ngram, which needs no model"
        )
    if config.speculation.simulate_acceptance is not None:
        raise ConfigError(
            "speculation.simulate_acceptance accepts drafts at random: there is nothing to tune", hint="set it to null"
        )
    config = with_chat_template_text(config)
    parser, source = RowParser(config.sampling, config.data), open_source(options.data, config.data)
    check_enough(source)
    return Rows(output, config, parser, with_checked_fields(source, parser))


def _checked_output(options: TuneOptions, config: Config) -> Path:
    check_input_name(options.data)
    if options.output.suffix not in (".yaml", ".yml"):
        raise InputError(f"the output {options.output} is no .yaml file", "it is a configuration: -o tuned.yaml")
    output = output_file(options.output, formats="")
    files = tuned_files(output)
    check_written(files, files_read(config, options.config_file, input=Path(options.data)))
    check_can_write(file for file in files if file.path.parent.is_dir())
    return output
