"""The strict reader of dataclasses, and names of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from specbatch import retired
from specbatch.config_load import load_config, option_paths
from specbatch.errors import ConfigError, FieldError
from specbatch.option import AT_LEAST_1, option, option_doc, option_range, required
from specbatch.retired import Retired, current_statistics
from specbatch.strict import Option, Reader, options_of
from specbatch.strict import option_paths as paths_of


@dataclass(frozen=True)
class Wheel:
    size: int = required("Size in inches.", AT_LEAST_1)
    colour: Literal["black", "white"] = option("black", "Of the rim.")


def _even(path: str, value: int) -> None:
    if value % 2:
        raise ConfigError(f"{path} is odd")


def _doubled(reader: Reader, value: Any, path: str) -> int:
    return 2 * int(value)


@dataclass(frozen=True)
class Car:
    wheels: tuple[Wheel, ...] = option((), "All of them.")
    spare: Wheel | None = option(None, "The one in the boot.")
    names: tuple[str, ...] = option((), "What it is called.")
    gears: tuple[int, ...] | None = option(None, "Gear ratios.", _even)
    weight: float = option(1.5, "In tonnes.")
    twice: int = option(0, "Read in a way of its own.", read=_doubled)
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: str = field(default="", metadata={"in_file": False})


OLD = {
    "colour": Retired("wheels[].colour"),
    "wheels[].rim": Retired("wheels[].size"),
    "wheels[].colour=grey": Retired(),
}


def read(tree: Any) -> Car:
    car: Car = Reader(Car, OLD).read(Car, tree, "")
    return car


def test_values_have_the_types_of_their_fields() -> None:
    car = read({"wheels": [{"size": 3}], "names": "Bug", "gears": [2, 4], "weight": 2, "twice": 4, "extra": {"a": 1}})
    assert car == Car((Wheel(3),), None, ("Bug",), (2, 4), 2.0, 8, {"a": 1})
    assert type(car.weight) is float
    assert read({"spare": {"size": 1, "colour": "white"}}).spare == Wheel(1, "white")
    assert read({"spare": None, "gears": None}) == read({}) == read(None) == Car()


@pytest.mark.parametrize(
    ("tree", "message", "hint"),
    [
        ({"wheels": [{}]}, "wheels[0].size is missing", None),
        ({"wheels": [{"size": 0}]}, "wheels[0].size must be >= 1, not 0", None),
        ({"wheels": [{"size": "x"}]}, "wheels[0].size must be an integer >= 1, not 'x'", None),
        ({"wheels": [{"size": True}]}, "wheels[0].size must be an integer >= 1, not true", None),
        ({"wheels": {"size": 1}}, "wheels must be a list of mappings, not a mapping", None),
        ({"wheels": [[]]}, "wheels[0] must be a mapping of options, not a list", None),
        (
            {"wheels": [{"size": 1, "colour": "Blac"}]},
            "wheels[0].colour must be one of black, white, not 'Blac'",
            "black",
        ),
        ({"names": 3}, "names must be text or a list of texts, not 3", None),
        ({"names": ["a", 3]}, "names[1] must be text, not 3", None),
        ({"gears": [2, 3]}, "gears[1] is odd", None),
        ({"weight": float("nan")}, "weight must be a finite number, not nan", None),
        ({"weight": None}, "weight must be a number, not null", None),
        ({"extra": {1: 2}}, "extra must be a mapping with names as keys, not a mapping", None),
        ({"path": "x"}, "unknown option path", "known here"),
        ({"wieght": 1}, "unknown option wieght", "did you mean weight?"),
        ({"wheels": [{"size": 1, "weight": 3}]}, "unknown option wheels[0].weight", "did you mean weight?"),
        ({"colour": "black"}, "colour is now wheels[].colour", "write wheels[].colour"),
        ({"wheels": [{"rim": 3}]}, "wheels[0].rim is now wheels[].size", "write wheels[].size"),
        ({"wheels": [{"size": 1, "colour": "grey"}]}, "wheels[0].colour=grey was removed", None),
    ],
)
def test_mistakes_name_path_legal_values_and_the_nearest(tree: Any, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tree)
    assert caught.value.message == message
    assert (hint or "") in (caught.value.hint or "")


def test_a_wrong_type_differs_from_a_wrong_value() -> None:
    for value, kind in (("x", "invalid_type"), (0, "invalid_value")):
        with pytest.raises(FieldError) as caught:
            Reader(Wheel, {}).value(options_of(Wheel)["size"], value, "size")
        assert caught.value.type == kind


def test_a_hint_of_the_caller_comes_before_the_usual_one() -> None:
    def explain(path: str, options: Mapping[str, Option], key: str, value: Any) -> str | None:
        return f"{path}/{key}/{value}/{len(options)}" if key == "sise" else None

    with pytest.raises(ConfigError) as caught:
        Reader(Wheel, {}, explain).read(Wheel, {"sise": 7}, "wheel")
    assert caught.value.hint == "wheel/sise/7/2"


def test_paths_descriptions_and_ranges() -> None:
    assert paths_of(Car) == ["wheels", "spare.size", "spare.colour", "names", "gears", "weight", "twice", "extra"]
    size = Wheel.__dataclass_fields__["size"]
    assert (option_doc(size), option_range(size)) == ("Size in inches.", ">= 1")


def test_retired_names_are_no_names_of_today_and_their_successors_are() -> None:
    today = set(option_paths())
    for name, entry in retired.OPTIONS.items():
        path, is_value, _ = name.partition("=")
        assert (path in today) == bool(is_value), name
        assert entry.successor is not None or entry.hint, name
        if entry.successor is not None:
            assert entry.successor.partition("=")[0] in today, name


@pytest.mark.parametrize("name", retired.OPTIONS)
def test_a_retired_option_is_an_error_in_files_and_in_set(tmp_path: Path, name: str) -> None:
    path, _, value = name.partition("=")
    section, _, key = path.rpartition(".")
    (tmp_path / "old.yaml").write_text(f"{section}: {{{key}: {value or 'true'}}}")
    entry = retired.OPTIONS[name]
    for config, sets in ((tmp_path / "old.yaml", []), (None, [f"{path}={value or 'true'}"])):
        with pytest.raises(ConfigError) as caught:
            load_config(config, sets)
        assert caught.value.message.startswith(name)
        assert (entry.successor or "was removed") in caught.value.message
        assert caught.value.hint


def test_statistics_of_an_earlier_version_are_read_under_their_new_names() -> None:
    table = {
        "session.old": Retired("session.new"),
        "gone": Retired(hint="nobody read it"),
        "moved": Retired("other.place"),
        "absent": Retired("x"),
        "rows.deep.absent": Retired("y"),
    }
    old = {"session": {"old": 3}, "gone": 1, "moved": 2, "rows": 7}
    found, notes = current_statistics(old, table)
    assert found == {"session": {"new": 3}, "other": {"place": 2}, "rows": 7}
    assert old["session"] == {"old": 3}, "the caller's are as they were"
    assert notes == [
        "session.old, a statistic of an earlier version, is now session.new",
        "gone, a statistic of an earlier version, is not read: nobody read it",
        "moved, a statistic of an earlier version, is now other.place",
    ]
    assert current_statistics(found, table) == (found, [])
