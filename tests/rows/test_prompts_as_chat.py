"""data.prompts_as_chat where it is left open: the model's chat template decides, and the first lines say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specbatch.config import DataSection
from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.setup.resolve import resolve
from specbatch.setup.sampling import runs_prompts_as_chat

TINY = ["model.target=random:tiny", "engine.device=cpu", "speculation.method=none"]


@pytest.mark.parametrize(
    ("chosen", "template", "own", "expected"),
    [
        (None, None, "model's", True),
        (None, None, None, False),
        (None, "given", None, True),
        (False, "given", "model's", False),
        (True, None, "model's", True),
        (True, "given", None, True),
    ],
)
def test_the_template_decides(chosen: bool | None, template: str | None, own: str | None, expected: bool) -> None:
    data = DataSection(prompts_as_chat=chosen, chat_template=template)
    assert runs_prompts_as_chat(data, SimpleNamespace(chat_template=own)) is expected


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts_as_chat"):
        runs_prompts_as_chat(DataSection(prompts_as_chat=True), SimpleNamespace(chat_template=None))


def test_resolving_decides_and_says_so() -> None:
    run = resolve(load_config(None, TINY))
    assert run.config.data.prompts_as_chat is True
    assert [note for note in run.notes if note.startswith("data.prompts_as_chat: true")]
    run = resolve(load_config(None, [*TINY, "data.prompts_as_chat=false"]))
    assert run.config.data.prompts_as_chat is False
    assert not [note for note in run.notes if note.startswith("data.prompts_as_chat")]
