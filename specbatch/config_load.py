"""The configuration of a command: a YAML file and `--set a.b=c` -> `Config`, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import specbatch
from specbatch.config import Config
from specbatch.errors import ConfigError, cut
from specbatch.strict.reader import Option, Reader, join, options_of, read_mapping, read_text
from specbatch.strict.reader import option_paths as paths_of
from specbatch.strict.yaml import YamlProblem, load_yaml

LOCAL_NAME = "specbatch.yaml"


def load_config(
    path: Path | str | None = None, sets: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Config:
    """Load a configuration. `path`: a file or the name of a packaged configuration; None: ./specbatch.yaml if it
    exists, else the packaged default. `sets` (`a.b=text`) and `values` (by full name: `a.b`) override its options.

    Options that a file leaves out have the defaults of `specbatch.config`. It raises ConfigError.
    """
    if path is None and Path(LOCAL_NAME).is_file():
        path = LOCAL_NAME
    if path is None:
        tree = read_mapping(default_config_text(), "the packaged default.yaml")
    else:
        path = find_config(Path(path))
        tree = read_mapping(read_text(path, "configuration", packaged_configs()), str(path))
    reader = Reader(Config, _of_vllm)
    for item in sets:
        _apply_set(tree, item, reader)
    for name, value in (values or {}).items():
        _put(tree, name, value)
    config: Config = reader.read(Config, tree, "")
    config = dataclasses.replace(config, given_sampling=frozenset(tree.get("sampling") or ()))
    _check_relations(config)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as dicts, lists and scalars in schema order, which YAML and JSON can hold."""
    found: dict[str, Any] = _plain(config)
    return found


def dump_config(config: Config) -> str:
    """Return the configuration as YAML, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def option_paths() -> list[str]:
    """List the full path of every option, in schema order."""
    return paths_of(Config)


def configs_folder() -> Path:
    """Return the folder of the packaged configurations and eval tasks: in the package, or next to it in a checkout."""
    package = Path(specbatch.__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def packaged_configs() -> dict[str, Path]:
    """Return the packaged configurations by name."""
    return {path.stem: path for path in sorted(configs_folder().glob("*.yaml"))}


def packaged_tasks() -> dict[str, Path]:
    """Return the packaged eval tasks by name."""
    return {path.stem: path for path in sorted((configs_folder() / "evals").glob("*.yaml"))}


def find_config(path: Path) -> Path:
    """Return `path`, or the packaged configuration of this name if there is no such file."""
    return path if path.exists() else packaged_configs().get(str(path), path)


def default_config_text() -> str:
    """Return the text of the packaged default.yaml, comments included."""
    return (configs_folder() / "default.yaml").read_text(encoding="utf-8")


def write_template(path: Path, text: str) -> None:
    """Write a configuration as a file to edit. It raises ConfigError if the file exists or cannot be
    written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already", "specbatch init OTHER.yaml writes elsewhere") from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def _apply_set(tree: dict[str, Any], item: str, reader: Reader) -> None:
    path, equals, text = item.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"--set {cut(item)}: expected a.b=value", "for example --set sampling.temperature=0.7")
    *sections, name = path.split(".")
    cls: Any = Config
    node: Any = tree
    for depth, key in enumerate(sections):
        option = _option(reader, cls, ".".join(sections[:depth]), key, text)
        if option.is_list or not dataclasses.is_dataclass(option.kind):
            raise ConfigError(f"--set {cut(item)}: {'.'.join(sections[: depth + 1])} has no options of its own")
        cls = option.kind
        if isinstance(node, dict):  # else the file is wrong here, which the reader reports
            if node.get(key) is None:  # the section is missing, or every line of it is commented out
                node[key] = {}
            node = node[key]
    value = _set_value(item, text, _option(reader, cls, ".".join(sections), name, text))
    if isinstance(node, dict):
        old = node.get(name)
        node[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set an option that exists."""
    *sections, name = path.split(".")
    node: Any = tree
    for key in sections:
        if isinstance(node, dict):
            node[key] = node.get(key) or {}
            node = node[key]
    if isinstance(node, dict):  # else the file is wrong here, which the reader reports
        node[name] = value


def _option(reader: Reader, cls: Any, path: str, key: str, text: str) -> Option:
    return options_of(cls).get(key) or reader.refuse(cls, path, key, text)


def _set_value(item: str, text: str, option: Option) -> Any:
    """Read a value as YAML. An option that holds text gets the text as it is ("Q: {question}" is no mapping)."""
    takes_text = option.kind is str and not option.is_list
    try:
        value = load_yaml(text)
    except YamlProblem as exc:
        if takes_text:
            return text
        raise ConfigError(f"--set {cut(item)}: the value is not valid YAML: {exc}") from exc
    is_null = value is None and text.strip() in ("null", "~")
    is_read = option.read is not None and isinstance(value, dict)
    return text if takes_text and not (isinstance(value, str) or is_null or is_read) else value


def _of_vllm(path: str, options: Mapping[str, Option], key: str, value: Any) -> str | None:
    """Explain vLLM's num_speculative_tokens, whose name is like num_draft_tokens, but whose value is one less."""
    if key != "num_speculative_tokens":
        return None
    option = join(path if "num_steps" in options else "speculation", "num_steps")
    drafts, nodes = (f": {value}", str(int(value) + 1)) if str(value).isdecimal() else ("", "one more")
    return (
        f"vLLM's num_speculative_tokens{drafts} is {option}{drafts}; num_draft_tokens is {nodes}, for it counts the "
        "last committed token too"
    )


def _check_relations(config: Config) -> None:
    ngram = config.speculation.ngram
    if ngram.max_match < ngram.min_match:
        raise ConfigError(
            f"speculation.ngram.max_match ({ngram.max_match}) must be >= "
            f"speculation.ngram.min_match ({ngram.min_match})"
        )
    corpus = config.speculation.corpus
    if corpus is not None and not Path(corpus).expanduser().is_file():
        raise ConfigError(
            f"speculation.corpus: {corpus} does not exist, or is no file", "name the finished result file of a job"
        )
    if config.cluster.address is not None and config.cluster.workers is None:
        raise ConfigError("cluster.address is set, but cluster.workers is not", "give the number: --workers N")
    if config.data.prompt_template is not None and config.data.prompt_column is not None:
        raise ConfigError(
            "data.prompt_template and data.prompt_column are both set; a prompt comes from one of them",
            'with one column, data.prompt_template="{column}" means data.prompt_column=column',
        )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in options_of(type(value))}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
