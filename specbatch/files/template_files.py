"""The templates of a configuration that are in files: data.chat_template and data.prompt_template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbatch.config import Config
from specbatch.errors import ConfigError

_SUFFIXES = (".txt", ".jinja", ".jinja2", ".j2")
_ANY_FILE = "@"  # before a path of any name


def with_template_texts(config: Config) -> Config:
    """`config` with the texts of the templates that name files. Raises ConfigError."""
    data = config.data
    chat, prompt = chat_template_file(data.chat_template), prompt_template_file(data.prompt_template)
    if chat is not None:
        text = _text("data.chat_template", chat, "give a Jinja template, or the path of a file with one")
        data = replace(data, chat_template=text)
    if prompt is not None:
        text = _text("data.prompt_template", prompt, "give a template such as 'Q: {question}', or the path of one")
        # An editor ends the last line. That line break is not part of the prompt, as in Jinja templates.
        data = replace(data, prompt_template=text.removesuffix("\n"))
    return replace(config, data=data)


def chat_template_file(value: str | None) -> Path | None:
    """The file that data.chat_template names; None: it is a template itself. A template has a brace."""
    return _path(value) if value is not None and _is_one_word(value) else None


def prompt_template_file(value: str | None) -> Path | None:
    """The file that data.prompt_template names; None: it is a template itself."""
    if value is None or not _is_one_word(value):
        return None
    is_named = value.startswith(_ANY_FILE) and value != _ANY_FILE
    return _path(value) if is_named or value.endswith(_SUFFIXES) else None


def _is_one_word(value: str) -> bool:
    return "{" not in value and "\n" not in value


def _path(value: str) -> Path:
    return Path(value.removeprefix(_ANY_FILE))


def _text(option: str, path: Path, hint: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError, RuntimeError) as exc:  # not UTF-8, a null character, no such home
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{option}: cannot read {path}: {reason}", hint) from exc
