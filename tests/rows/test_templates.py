"""Templates that cannot work, or that take too much: found before a model is loaded, or bounded in the row."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config import DataSection
from specbatch.errors import ConfigError, InputError, ModelError, RowError
from specbatch.evals.templates import Renderer
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.rows.row import Row
from specbatch.rows.templates import PromptTemplate
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.bounds import Bounded, OutOfBounds, Stoppable
from specbatch.text.chat_template import ChatTemplate
from specbatch.types import EngineLimits

MEMORY_BEFORE = resource.getrlimit(resource.RLIMIT_AS)  # all of these tests
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
DOUBLING = "{% set n = namespace(s='x') %}{% for i in range(90) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def chat_template(template: str, own: bool = False, seconds: float = 0.5) -> ChatTemplate:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = template if own else None
    return ChatTemplate(tokenizer, DataSection(chat_template=None if own else template), Bounded(seconds, 1 << 28))


TEXTS = "{{ messages|map(attribute='content')|join }}"  # a template must write each message
DAY = "{{ strftime_now('%d %b %Y %H:%M') }}"


@pytest.mark.parametrize(
    ("template", "tools", "day", "text"),
    [
        (DAY, [], "2001-02-03", "03 Feb 2001 00:00"),
        ({"default": "", "tool_use": DAY + "{{ tools and '' }}"}, [{}], "2001-02-03", "03 Feb 2001 00:00"),
        ("{{ date_string }}" + DAY, [], None, "26 Jul 2024" + "26 Jul 2024 00:00"),
        ("\n  {% if 1 %}\n  " + DAY + "{% endif %}", [], "2001-02-03", "\n  03 Feb 2001 00:00"),
        (
            "  {% macro m(f) %}{{ strftime_now(f) if strftime_now is defined }}{% endmacro %}\n{{ m('%Y') }}",
            [],
            "2001-02-03",
            "2001",
        ),
    ],
)
def test_the_current_day_is_that_of_the_job(template: Any, tools: list[Any], day: str | None, text: str) -> None:
    tokenizer = byte_tokenizer(300)
    if isinstance(template, dict):
        template = {name: one + TEXTS for name, one in template.items()}
    else:
        template += TEXTS
    tokenizer.chat_template = template
    written = ChatTemplate(tokenizer, DataSection(chat_template_date="2001-02-03"))
    assert (written.printed_day, written.write(MESSAGES, tools=tools)) == (day, text + "hiho")


INVALID = [
    "{% for m in messages %}",
    "{{ messages",
    "{{ messages|nofilter }}",
    "{% frobnicate %}",
    "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "{{ 2 ** 3 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
]


@pytest.mark.parametrize("template", INVALID)
@pytest.mark.parametrize("own", [False, True])
def test_templates_that_are_not_valid(template: str, own: bool) -> None:
    with pytest.raises(ModelError if own else ConfigError, match="template is not valid"):
        chat_template(template, own).check()


@pytest.mark.parametrize("template", [LOOPS, DOUBLING, "{{ 'x' * 99999999999 }}", "{{ 'x'|center(99999999999) }}"])
def test_templates_that_do_not_finish(template: str) -> None:
    with pytest.raises(ConfigError, match="does not end: it takes more than"):
        chat_template(template).check()


def test_templates_that_write_megabytes() -> None:
    with pytest.raises(ConfigError, match="writes 5,000,000 characters for a message of one word"):
        chat_template("{{ 'x' * 5000000 }}").check()


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f(**{'a': 1}) }}{{ f( **{'a': 1}) }}" + TEXTS,
        "{{ raise_exception('no') }}",  # these may take what the rows hold
        "{{ messages[1]['content'] }}",
        "{% generation %}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}"
        + TEXTS,
    ],
)
def test_templates_that_may_work(template: str) -> None:
    chat_template(template).check()


@pytest.mark.parametrize("what", [LOOPS, "{{ 'x' * 99999999999 }}", "{{ range(100001) }}", "{{ strftime_now(5) }}"])
def test_a_row_that_takes_too_much_is_its_own_error(what: str) -> None:
    template = chat_template("{% if messages|length > 1 %}" + what + "{% endif %}{{ messages[0]['content'] }}")
    template.check()
    with pytest.raises(RowError) as caught:
        template.write(MESSAGES)
    assert caught.value.type == "chat_template_error"
    assert template.write(MESSAGES[:1]) == "hi"


@pytest.mark.parametrize("attack", ["messages.__class__", "messages|attr('__class__')", "''.__class__.__mro__[1]"])
def test_templates_do_not_see_the_interpreter(attack: str) -> None:
    template = chat_template("{{ (" + attack + ").__subclasses__() }}")
    with pytest.raises(RowError):
        template.write(MESSAGES)


def test_a_broken_template_that_nothing_uses_is_no_hindrance() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = "{% for m in messages %}"
    limits = EngineLimits(100, 300)
    with pytest.raises(ModelError):
        TextProcessor(tokenizer, DataSection())
    texts = TextProcessor(tokenizer, DataSection(prompts_as_chat=False))
    assert texts.encode(Row(0, content="a"), limits)
    with pytest.raises(RowError, match="is not valid"):
        texts.encode(Row(0, kind="messages", content=MESSAGES), limits)
    assert TextProcessor(tokenizer, DataSection(chat_template=TEXTS)).chat_text(MESSAGES) == "hiho"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ subject or '-' }}: {{ body }}", "-: it broke"),
        ("{{subject}}{{body}}", "it broke"),
        ("{% if subject %}{{ subject }}{% endif %}{{ body|upper }} {{ tags|join(', ') }}", "IT BROKE a, b"),
        ("{{ row['First name'] }} {{ body }}", "Ada it broke"),
        ("{{ missing|default('none') }} {{ body }}", "none it broke"),
        ("{% if missing is defined %}x{% endif %}{{ body }}", "it broke"),
        ('Answer as {"label": ...}: {{ body }}', 'Answer as {"label": ...}: it broke'),
        ("{First name} {tags[1]} {n:04d} {body!r} {subject}.", "Ada b 0007 'it broke' ."),
        ("\\boxed{{x}} {body}", "\\boxed{x} it broke"),
        ('{{"a": 1}} {body}\n', '{"a": 1} it broke\n'),
        ("{{ body }}\n", "it broke\n"),
    ],
)
def test_prompts_of_fields(template: str, text: str) -> None:
    row = {"subject": None, "body": "it broke", "tags": ["a", "b"], "First name": "Ada", "n": 7}
    assert PromptTemplate(template).fill(row) == text


NAMES = ["row", "range", "self", "true", "loop", "First name", "x-y", "items", "0a", "class", "🎉"]


@pytest.mark.parametrize("name", NAMES)
def test_a_short_form_is_that_of_python_for_each_name(name: str) -> None:
    row = {name: "it's", "row": "R", "w": 6, "d": {"k": [1, "two"]}, "n": 3.14159} | {name: "it's"}
    for template in (
        f"{{{name}}}", f"{{{name}!r:>12}}|{{{name}:*^{{w}}}}",
        f"{{{{\"k\": {{{name}}}}}}} {{n:.2f}} {{d[k][1]!a}}\n", f"🎉\r\n{{{name}:🎉>8}}\\u0041",
    ):  # fmt: skip
        assert PromptTemplate(template).fill(row) == template.format_map(row)


def test_the_whole_row() -> None:
    template = PromptTemplate('{{ row["First name"] }}: {{ subject or "-" }}')
    assert template.fields == ("First name", "subject")
    assert template.fill({"First name": "Ann", "subject": None, "row": "R"}) == "Ann: -"
    with pytest.raises(RowError, match="the row has no 'First name'"):
        template.fill({"subject": "a"})
    own = PromptTemplate('{{ row["row"] }}{{ a or "-" }}')
    assert (own.fields, own.fill({"row": "R", "a": None})) == (("a", "row"), "R-")
    assert PromptTemplate("{{ row|tojson }}").fill({"a": None}) == '{"a": null}'
    with pytest.raises(RowError, match=r"the row's field of this name is row\['row'\]"):
        PromptTemplate("{{ row }}").fill({"row": "R"})
    local = PromptTemplate("{% for row in rows %}{{ row['x'] }}{% endfor %}")
    assert (local.fields, local.fill({"rows": [{"x": 1}, {"x": 2}]})) == (("rows",), "12")
    optional = PromptTemplate("{% if row['a b'] is defined %}x{% endif %}{{ row['c']|default('-') }}{{ d }}")
    assert (optional.fields, optional.fill({"d": 1})) == (("d",), "-1")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{text[upper]}", "string indices must be integers|indices must be"),
        ("{d[keys]}", "it has no 'keys'"),
        ("{d[nokey]!r}", "it has no 'nokey'"),
        ("{n[real]}", "not subscriptable"),
        ("{{ d.keys }}", "builtin_function_or_method is no text"),
        ("{{ self }}", "TemplateReference is no text"),
        ("{{ d|map('upper') }}", "generator is no text"),
        ("{{ d.nokey }}", "no attribute 'nokey'"),
        ("{{ text }} {First name}", r"in which \{First name\} is no field"),
    ],
)
def test_nothing_is_written_that_no_row_has(template: str, message: str) -> None:
    row = {"text": "a", "d": {"k": 1}, "n": 7, "First name": "Ann", "self": "S"}
    with pytest.raises(RowError, match=message):
        PromptTemplate(template).fill(row)


def test_fields_that_a_row_must_have() -> None:
    template = PromptTemplate("{{ subject or '-' }} {{ body }} {{ note|default('') }} {{ row['x'] }}")
    assert template.fields == ("body", "subject", "x")
    for row, message in (
        ({"subject": "a", "x": 1}, "the row has no 'body'"),
        ({"subject": None, "body": None, "x": None}, "no content in 'body' and 'subject' and 'x'"),
        ({"subject": "a", "body": "b"}, "the row has no 'x'"),
    ):
        with pytest.raises(RowError, match=message):
            template.fill(row)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ subject }} {body}", r"a Jinja template, in which \{body\} is no field"),
        ("{% if a %}{body:>10}{% endif %}", r"in which \{body:>10\} is no field"),
        ("{{ body|nofilter }}", "No filter named 'nofilter'"),
        ("{% for x in a %}{{ x }}", "not a valid template"),
        ("{{ 'x' }}", "names no field"),
    ],
)
def test_prompt_templates_that_cannot_work(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptTemplate(template)


def test_prompt_templates_do_not_see_the_interpreter() -> None:
    for template in ("{{ body.__class__.__mro__ }}", "{{ body|attr('__class__') }}", "{body[__class__]}"):
        with pytest.raises(RowError, match="does not fit the row"):
            PromptTemplate(template).fill({"body": "x"})


def test_text_that_cannot_fit_is_not_tokenized() -> None:
    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            pytest.fail("tokenized")

    texts = TextProcessor(Tokenizer(), DataSection())
    with pytest.raises(RowError) as caught:
        texts.encode(Row(0, content="x" * (1 << 21)), EngineLimits(1000, 300))
    assert caught.value.type == "prompt_too_long"


def test_bounds_leave_no_trace() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    for work in ("'x' * 99999999999", "[i for i in iter(int, 1)]", "1 / 0", "1"):
        try:
            with Bounded(0.2, 1 << 28):
                eval(work)
        except (OutOfBounds, ZeroDivisionError):
            pass
        assert resource.getrlimit(resource.RLIMIT_AS) == MEMORY_BEFORE
        assert signal.getsignal(signal.SIGALRM) == handler


def test_a_lower_limit_of_the_user_is_kept() -> None:
    lower = psutil.Process().memory_info().vms + (1 << 28), MEMORY_BEFORE[1]
    resource.setrlimit(resource.RLIMIT_AS, lower)
    try:
        with Bounded(10, 1 << 30):
            assert resource.getrlimit(resource.RLIMIT_AS) == lower
    finally:
        resource.setrlimit(resource.RLIMIT_AS, MEMORY_BEFORE)


def test_an_alarm_that_was_set_before_is_kept() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    with Bounded():
        pass
    assert signal.setitimer(signal.ITIMER_REAL, *before)[0] > 900


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_memory_is_bounded_in_each_thread() -> None:
    """The limit belongs to the process: the first block sets and restores it."""
    found: list[object] = []

    def work() -> None:
        try:
            with Bounded(10, 1 << 28):
                found.append(resource.getrlimit(resource.RLIMIT_AS))
                "x" * (1 << 36)
        except OutOfBounds as exc:
            found.append(str(exc))

    with Bounded(10, 1 << 29):
        limit = resource.getrlimit(resource.RLIMIT_AS)
        assert limit != MEMORY_BEFORE
        in_thread(work).join()
        assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert found[0] == limit
    assert re.fullmatch("it takes more than [0-9,]+ MiB of memory", str(found[1]))
    assert resource.getrlimit(resource.RLIMIT_AS) == MEMORY_BEFORE
    in_thread(work).join()
    assert found[2] not in (limit, MEMORY_BEFORE)
    # The limit holds for the engine, too, which may allocate meanwhile.
    most, *_ = cast(tuple[int, int], found[2])
    assert most - psutil.Process().memory_info().vms > psutil.virtual_memory().available // 4 > 1 << 28
    assert resource.getrlimit(resource.RLIMIT_AS) == MEMORY_BEFORE


@pytest.mark.parametrize("template", [LOOPS, "{{ messages }}"])
def test_a_thread_that_waits_ends_a_template_that_does_not_end(template: str) -> None:
    """Only that template, and not what the thread does after it."""
    chat = chat_template(TEXTS + "{% if messages|length > 1 %}" + template + "{% endif %}", seconds=0.05)
    chat.check()
    found: list[str] = []

    def work() -> None:
        for _ in range(2):
            try:
                found.append(chat.write(MESSAGES))
            except RowError as exc:
                found.append(exc.message)

    thread = in_thread(work)
    while thread.is_alive():
        chat.stop_late()
        time.sleep(0.01)
    assert len(found) == 2
    if template == LOOPS:
        assert set(found) == {"the chat template does not end: it takes more than 0.05 seconds"}
    else:
        assert "hi" in found[0]


def test_a_block_that_ends_is_not_stopped_later() -> None:
    """However close its end is to the look of the other thread."""
    block = Stoppable(0.0)  # always late
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    num_stopped = num_blocks = 0

    def work() -> None:
        nonlocal num_stopped, num_blocks
        for _ in range(1000):
            num_blocks += 1
            try:
                with block:
                    if num_blocks % 2:
                        time.sleep(0)  # the other thread runs
            except OutOfBounds:
                num_stopped += 1

    thread = in_thread(work)
    while thread.is_alive():
        block.stop_late()
    sys.setswitchinterval(before)
    assert num_blocks == 1000
    assert 0 < num_stopped < 1000


def test_a_block_keeps_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that releases it gets it back after milliseconds where an engine computes in another one."""
    calls: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append("sleep"))
    monkeypatch.setattr(os, "pread", lambda *args: calls.append("pread"))
    chat = chat_template(TEXTS)

    def work() -> None:
        for _ in range(3):
            assert "hi" in chat.write(MESSAGES)
            calls.append("written")

    in_thread(work).join()
    assert calls == ["written"] * 3


def test_templates_of_tasks_are_bounded() -> None:
    with pytest.raises(InputError, match="it takes more than"):
        Renderer("prompt.question", "{{ ('x' * 3000000000)|length }}")({}, "row 1")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{a[0].__class__}", "does not name a field"),
        ("{a[0].__class__[x]}", "does not name a field"),
        ("{a[0].__class__.__init__.__globals__[sys]}", "does not name a field"),
        ("{a:{b.__class__}}", "does not name a field"),
        ("{a!x}", "unknown conversion"),
        ("{a!}", "not a valid template"),
        ("{a:q}", "is not a format"),
        ("{a!r:d}", "is not a format"),
        ("{a:>9999999999}", "more than 10,000 characters"),
        ("{a:.999999f}", "more than 10,000 characters"),
        ("{a:" + "9" * 6000 + "}", "more than 10,000 characters"),
    ],
)
def test_formats_that_no_row_can_fill(template: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptTemplate(template)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{a:>4}|{n:04d}|{n:,}|{f:.2f}|{f:.0%}", "   x|0007|7|0.25|25%"),
        ("{a!r:>5} {l[0]} {d[k]}", "  'x' 1 v"),
        ("{a:{w}} {{}}", "x   {}"),
    ],
)
def test_formats_that_rows_fill(template: str, filled: str) -> None:
    row = {"a": "x", "n": 7, "f": 0.25, "l": [1], "d": {"k": "v"}, "w": 3}
    assert PromptTemplate(template).fill(row) == filled


@pytest.mark.parametrize("width", ["99999999999", "x", "{a}"])
def test_formats_that_a_row_asks_for_are_bounded(width: str) -> None:
    with pytest.raises(RowError, match="does not fit the row"):
        PromptTemplate("{a:{w}}").fill({"a": "x", "w": width})


@pytest.mark.parametrize("command", ["generate", "tune"])
@pytest.mark.parametrize(
    "option", ["data.chat_template={% for m in messages %}", "data.prompt_template={prompt:>9999999999}"]
)
def test_commands_end_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbatch.setup.build.build", lambda *_: pytest.fail("weights were read"))
    Path("d.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(8)))
    options = ["model.target=random:tiny", "engine.device=cpu", "speculation.method=ngram", option]
    arguments = [command, "d.jsonl", *(part for text in options for part in ("--set", text))]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert "template" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.jsonl"]
