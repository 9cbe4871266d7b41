"""The part of the page about the answers: shares, and the values of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specbatch.report import charts
from specbatch.report.answers import MAX_CHARS, Answers, FieldValues, Value, length_step

_NUM_SHOWN = 12  # values of a field
_NUM_REASONS = 5  # reasons why schemas check nothing
_MAX_DIFFERENT = 0.5  # a field of texts that differ more often than this shows their lengths

Shares = list[tuple[str, int, str]]  # name, number, words


def answer_facts(answers: Answers) -> dict[str, Any] | None:
    """Return what the template shows of the answers. None: there are no answers."""
    if not answers.rows:
        return None
    texts = _field(answers.texts) if _are_values(answers) else None
    return {
        "shares": list(_shares(answers)),
        "notes": list(_notes(answers)),
        "fields": [*([texts] if texts else []), *filter(None, map(_field, answers.fields.values()))],
    }


def _are_values(answers: Answers) -> bool:
    """Return whether the texts themselves are values, such as those of `choice`."""
    repeat = answers.texts.is_counted and len(answers.texts.values) <= _MAX_DIFFERENT * answers.rows
    return repeat and not answers.fields and not answers.texts.long_texts


def _shares(answers: Answers) -> Iterator[tuple[str, str, str]]:
    checked = answers.valid + answers.not_valid
    if answers.asked:
        yield _share("Are JSON", answers.json, answers.asked, "answers of rows that ask for JSON")
    elif answers.other_json:
        yield _share("Are JSON", answers.other_json, answers.rows, "answers; no row asks for JSON")
    if checked:
        yield _share("Match their schema", answers.valid, checked, "answers that are JSON and have a schema")
    yield _share("Cut by max_tokens", answers.cut, answers.rows, "answers; the end of the context cuts, too")


def _share(name: str, part: int, whole: int, words: str) -> tuple[str, str, str]:
    shown = f"{part / whole:.2%}"
    if part < whole and shown == "100.00%":
        shown = "99.99%"
    return name, shown, f"{part:,} of {whole:,} {words}"


def _notes(answers: Answers) -> Iterator[str]:
    if answers.cut_not_json:
        yield f"Answers that are no JSON because they were cut: {answers.cut_not_json:,}. A larger max_tokens helps."
    reasons = answers.not_checked.most_common()
    for reason, rows in reasons[:_NUM_REASONS]:
        yield f"Answers that were not checked: {rows:,}, because {reason}."
    if others := sum(rows for _, rows in reasons[_NUM_REASONS:]):
        yield f"Answers that were not checked for other reasons: {others:,}."
    if answers.unknown_formats:
        names = ", ".join(answers.unknown_formats)
        yield f"Formats that were not checked: {names}. pip install 'jsonschema[format-nongpl]' adds checks."
    if answers.formats.not_kept:
        yield f"Rows that were not checked, because rows have too many different formats: {answers.formats.not_kept:,}."
    if answers.fields_left_out:
        yield f"Values of fields that came after the first {len(answers.fields)} fields: {answers.fields_left_out:,}."


def _field(field: FieldValues) -> dict[str, Any] | None:
    """Return what is shown of a field. None: nothing, because the fields in it say it."""
    kinds = field.kinds
    if not set(kinds) - {"object", "list"}:
        return None
    found: dict[str, Any] = {"name": field.name, "kinds": _kinds(kinds), "shares": None, "plot": None, "how": ""}
    different = len(field.values)
    if field.num_numbers > kinds["text"] and (different > _NUM_SHOWN or not field.is_counted):
        mean = field.total / field.num_numbers
        found["how"] = f"From {_number(field.low)} to {_number(field.high)}, mean {_number(mean)}."
        if field.is_counted:
            counts = [(float(value or 0), float(n)) for (kind, value), n in field.values.items() if kind == "number"]
        else:
            sampled = field.numbers.items
            counts = [(value, field.num_numbers / len(sampled)) for value in sampled]
            if len(sampled) < field.num_numbers:
                found["how"] += f" The bars are estimated from a random sample of {len(sampled):,}."
        found["plot"] = charts.number_histogram(counts, field.name, "answers")
    elif field.long_texts or not field.is_counted or different > max(_NUM_SHOWN, _MAX_DIFFERENT * field.times):
        if field.lengths:
            found["plot"] = charts.histogram(
                field.lengths, "characters", f"length of {field.name}", "characters", "answers", length_step
            )
            texts = sum(kind == "text" for kind, _ in field.values)
            found_texts = f"{texts:,}" if field.is_counted else f"at least {texts:,}"
            repeated = f" Different texts of at most {MAX_CHARS} characters: {found_texts}." if texts else ""
            found["how"] = f"The lengths of its texts.{repeated}"
    elif field.values:
        found["shares"] = _values(field)
        if different > _NUM_SHOWN:
            found["how"] = f"The {_NUM_SHOWN} most frequent of {different:,} different values."
    return found


def _kinds(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {times:,}" for kind, times in sorted(kinds.items(), key=lambda item: -item[1]))


def _values(field: FieldValues) -> Shares:
    whole = field.times
    ordered = sorted(field.values.items(), key=lambda item: (-item[1], item[0][0], str(item[0][1])))
    shown = ordered[:_NUM_SHOWN]
    if {kind for (kind, _), _ in shown} == {"number"} and len(ordered) <= _NUM_SHOWN:
        shown.sort(key=lambda item: float(item[0][1] or 0))
    is_text = {kind for kind, _ in field.values} <= {"text", "null"}
    found = [(_shown(value, is_text), times, f"{times:,} ({times / whole:.1%})") for value, times in shown]
    if rest := sum(times for _, times in ordered[_NUM_SHOWN:]):
        found.append(("all others", rest, f"{rest:,} ({rest / whole:.1%})"))
    return found


def _shown(value: Value, is_text: bool) -> str:
    """Return a value as text. In a field with values of several types, texts are in quotes."""
    kind, content = value
    if kind == "text":
        return str(content) if is_text and content and content != "null" else json.dumps(content, ensure_ascii=False)
    if kind == "number" and isinstance(content, int | float):
        return _exact(content)
    return json.dumps(content)


def _exact(value: int | float) -> str:
    """Return a number with all its digits, so that different numbers differ."""
    return f"{int(value):,}" if abs(value) < 1e21 and value == int(value) else f"{float(value):,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:,.4g}"
