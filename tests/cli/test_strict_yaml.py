"""YAML that would hang, overflow or crash the reader: one short error, in files, in --set, and in tasks of eval."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, shown
from specbatch.evals.load import load_task
from specbatch.strict.yaml import load_yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DIGITS = "9" * 5000
PROBLEMS = {
    "alias bomb": (BOMB, "more than 100,000 values"),
    "merge bomb": (MERGE_BOMB, "more than 100,000 values"),
    "alias of itself": ("sampling: &s {stop: [*s]}", "an alias (*name) of what it is a part of"),
    "nested lists": ("[" * 2_000, "nested more than 50 deep (line 1, column 51)"),
    "nested mappings": ("{a: " * 2000 + "1" + "}" * 2000, "nested more than 50 deep"),
    "nested blocks": ("- " * 3000 + "1", "nested more than 50 deep"),
    "long integer": (f"engine: {{seed: {DIGITS}}}", "an integer of 5,000 digits (line 1, column 16)"),
    "long binary integer": (f"engine: {{seed: 0b{'1' * 5000}}}", "an integer of 5,002 digits"),
    "not an integer": ("engine: {seed: !!int twelve}", "'twelve' is no integer"),
    "bad date": ("sampling: {seed: !!timestamp 2024-13-45}", "month must be in 1..12"),
    "key twice": (f"sampling: {{n: 1, {'k' * 900}: 2, {'k' * 900}: 3}}", "the key 'kkkkk"),
    "merge twice": ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "the key '<<' is given twice (line 2, column 13)"),
    "merge of a number": ("sampling: {<<: 3}", "expected a mapping or list of mappings for merging"),
    "list as a key": ("sampling: {? [n] : 1}", "['n'] cannot be a key (line 1, column 14)"),
    "not closed": ("sampling: {n: [1", "but got '<stream end>' (line 1, column 17)"),
    "tab": ("a:\n\tb: 1", "found character '\\t' that cannot start any token (line 2, column 1)"),
    "long tag": (f"sampling: !{'t' * 5000} 1", "could not determine a constructor"),
    "control character": ("sampling: {stop: \x01}", "special characters are not allowed"),
}


@pytest.mark.parametrize(("text", "words"), PROBLEMS.values(), ids=PROBLEMS)
def test_problems_are_one_short_line_wherever_yaml_is_read(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (load_config, load_task):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert caught.value.message.startswith(f"{path} is not valid YAML: ")
        assert words in caught.value.message
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < len(str(path)) + 350


@pytest.mark.parametrize("text", [BOMB, "[" * 2_000, DIGITS, "!!timestamp 2024-13-45"], ids=lambda text: text[:9])
def test_problems_in_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"engine.seed={text}"])
    assert "the value is not valid YAML" in caught.value.message
    assert len(caught.value.message) < 500
    assert load_config(None, [f"data.system_prompt={text}"]).data.system_prompt == text  # text is text


SEVERAL = f"[{','.join(['1'] * 2_000)}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"engine: {{device: {SEVERAL}}}", "engine.device must be text, not [1, 1, 1, 1, 1, 1, ...]"),
        (f"speculation: {{method: {SEVERAL}}}", "speculation.method must be one of"),
        (f"sampling: {{stop: {SEVERAL}}}", "sampling.stop[0] must be text, not 1"),
        (f"? {'k' * 9_000}\n: 1", "unknown option kkk"),
        (f"engine: {{seed: {'9' * 90}}}", "not an integer of more than 60 digits"),
        (f"sampling: {{temperature: {'9' * 90}}}", "not an integer of more than 60 digits"),
        (f"speculation: {{method: {'n' * 9_000}}}", "speculation.method must be one of"),
        ("sampling: 3", "sampling must be a mapping of options, not 3"),
    ],
    ids=lambda text: text[:20],
)
def test_values_are_quoted_in_a_few_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "x.yaml")
    assert words in caught.value.message
    assert len(caught.value.message) < 250


def test_what_people_do_write(tmp_path: Path) -> None:
    text = """
x: &usual {n: 2, top_k: 5}
y: {<<: *usual, n: 3}
z: {<<: [*usual, {top_k: 6, m: 1}]}
stop: [2024-01-01, =, 1e-3, 1_000, 0x10, yes, "no", ~]
deep: [[[[[[[[[[1]]]]]]]]]]
"""
    found = load_yaml(text)
    assert found["y"] == {"n": 3, "top_k": 5}
    assert found["z"] == {"n": 2, "top_k": 5, "m": 1}
    nested = load_yaml(
        "a: &a {kk: 1, ll: 1}\nb: &b {<<: *a, kk: 2, mm: 2}\nc: {nn: 3, <<: [*b, *a, {ll: 4, oo: 4}], mm: 5}"
    )
    assert nested["c"] == {"kk": 2, "ll": 1, "mm": 5, "nn": 3, "oo": 4}
    assert nested["b"] == {"kk": 2, "ll": 1, "mm": 2}
    assert load_yaml("x: {<<: {<<: [], n: 1}, m: 2}") == {"x": {"n": 1, "m": 2}}
    assert found["stop"] == ["2024-01-01", "=", 0.001, 1000, 16, "yes", "no", None]
    (tmp_path / "x.yaml").write_text("sampling: {stop: [2024-01-01, 2024-13-45]}")
    assert load_config(tmp_path / "x.yaml").sampling.stop == ("2024-01-01", "2024-13-45")


def test_shown() -> None:
    assert [shown(v) for v in (None, True, 1.5, "a", [1, "b"])] == ["null", "true", "1.5", "'a'", "[1, 'b']"]
    assert len(shown("x" * 10**6)) == 60
