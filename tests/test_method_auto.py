"""speculation.method: auto: the head that comes with specbatch, for its target only; else lookups."""

from __future__ import annotations

import pytest

from specbatch.config_load import load_config
from specbatch.engine.resolve import resolve
from specbatch.engine.resolve_speculation import decide_method
from specbatch.errors import ConfigError

TARGET, HEAD = "builtin:smollm2-135m-instruct", "builtin:smollm2-135m-instruct-eagle3"


def test_the_default_drafts_with_the_head_of_the_default_target() -> None:
    config, notes = load_config(None, []), list[str]()
    decided = decide_method(config.speculation, config.model.target, notes)
    assert (config.model.target, decided.method, decided.draft) == (TARGET, "eagle3", HEAD)
    assert HEAD in notes[0]


def test_other_targets_look_up() -> None:
    run = resolve(load_config(None, ["model.target=shape:tiny"]))
    assert (run.config.speculation.method, run.config.speculation.draft) == ("ngram", None)
    assert run.config.speculation.num_draft_tokens == 6
    assert any(note.startswith("speculation.method: ngram") for note in run.notes)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_what_is_named_is_left_alone(method: str) -> None:
    section, notes = load_config(None, [f"speculation.method={method}"]).speculation, list[str]()
    assert decide_method(section, TARGET, notes) is section
    assert not notes


def test_a_draft_wants_its_method_named() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft is set") as caught:
        resolve(load_config(None, ["model.target=shape:tiny", "speculation.draft=somewhere"]))
    assert "eagle3" in str(caught.value.hint)
