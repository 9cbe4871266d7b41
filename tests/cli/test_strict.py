"""The strict reader of dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from specbatch.errors import ConfigError, FieldError
from specbatch.strict.option import AT_LEAST_1, option, option_doc, option_range, required
from specbatch.strict.reader import Option, Reader, options_of
from specbatch.strict.reader import option_paths as paths_of


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


def read(tree: Any) -> Car:
    car: Car = Reader(Car).read(Car, tree, "")
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
            Reader(Wheel).value(options_of(Wheel)["size"], value, "size")
        assert caught.value.type == kind


def test_a_hint_of_the_caller_comes_before_the_usual_one() -> None:
    def explain(path: str, options: Mapping[str, Option], key: str, value: Any) -> str | None:
        return f"{path}/{key}/{value}/{len(options)}" if key == "sise" else None

    with pytest.raises(ConfigError) as caught:
        Reader(Wheel, explain).read(Wheel, {"sise": 7}, "wheel")
    assert caught.value.hint == "wheel/sise/7/2"


def test_paths_descriptions_and_ranges() -> None:
    assert paths_of(Car) == ["wheels", "spare.size", "spare.colour", "names", "gears", "weight", "twice", "extra"]
    size = Wheel.__dataclass_fields__["size"]
    assert (option_doc(size), option_range(size)) == ("Size in inches.", ">= 1")
