"""Templates that are in files, and prompt templates that would give all rows the same prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbatch.config import Config, DataSection
from specbatch.errors import ConfigError
from specbatch.files.paths import files_read
from specbatch.files.template_files import with_template_texts
from specbatch.rows.templates import PromptTemplate


def texts(**data: str) -> DataSection:
    return with_template_texts(Config(data=DataSection(**data))).data


def test_a_chat_template_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ messages }}")
    for name in ("t.jinja", "@t.jinja", str(tmp_path / "t.jinja")):
        assert texts(chat_template=name).chat_template == "{{ messages }}"
    config = Config(data=DataSection(chat_template="t.jinja"))
    assert with_template_texts(with_template_texts(config)) == with_template_texts(config)
    with pytest.raises(ConfigError, match=r"data.chat_template: cannot read missing.jinja"):
        texts(chat_template="missing.jinja")


@pytest.mark.parametrize("name", ["t.txt", "t.jinja", "t.j2", "@t.prompt", "@t.txt"])
def test_a_prompt_template_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name.removeprefix("@")).write_bytes("\ufeffQ: {q}\r\nA:\r\n".encode())
    assert texts(prompt_template=name).prompt_template == "Q: {q}\nA:"
    found = files_read(Config(data=DataSection(prompt_template=name)), None)
    assert found == {"the prompt template (data.prompt_template)": Path(name.removeprefix("@"))}


def test_a_prompt_template_whose_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"{q} caf\xe9")
    Path("folder.txt").mkdir()
    for name in ("missing.txt", "@missing", "latin.txt", "folder.txt", "@a\0b"):
        with pytest.raises(ConfigError, match=r"data.prompt_template: cannot read "):
            texts(prompt_template=name)


@pytest.mark.parametrize("text", ["Read {name}.txt", "@{name}", "{name}.j2", "a\nb.txt", "Hello", "@", ""])
def test_prompt_templates_that_are_no_files(text: str) -> None:
    assert texts(prompt_template=text).prompt_template == text


def test_a_prompt_template_without_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_text("{q}")
    for text, hint in (
        ("Hello", "@PATH reads a file"),
        ("", "written {name}"),
        ("prompts", "@prompts reads the file"),
        ("Q: {% raw %}{{ question }}{% endraw %}", "@PATH reads a file"),
    ):
        with pytest.raises(ConfigError, match=r"names no field, so all rows would have the same prompt") as caught:
            PromptTemplate(text)
        assert caught.value.hint is not None
        assert hint in caught.value.hint
