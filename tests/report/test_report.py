"""`specbatch report`: what it counts, and that the page holds no foreign markup and loads nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.errors import InputError
from specbatch.files.jsonl import encode_line
from specbatch.files.local import identify_input
from specbatch.files.result_files import write_lines
from specbatch.report import charts
from specbatch.report.collect import Summary, Window, Windows, summarize
from specbatch.report.command import ReportOptions, write_page
from specbatch.report.rows import Results
from specbatch.report.sampling import Sample
from specbatch.results.partial import PartialLines, header_line

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\x1b\ud800\u202e</pre></style>"


def native(index: int, text: str = "an answer", tokens: int = 9, **fields: Any) -> dict[str, Any]:
    rounds = max(tokens // 3, 1)
    return {
        "id": f"r{index}",
        "index": index,
        "text": text,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 20 + index % 7, "completion_tokens": tokens},
        "speculation": {
            "rounds": rounds,
            "drafted": 3 * rounds,
            "accepted": 2 * rounds,
            "acceptance_length": 3.0,
            "accept_histogram": [0, 0, rounds],
        },
        **fields,
    }


def failed(index: int, message: str = "it failed", kind: str = "invalid_json") -> dict[str, Any]:
    return {
        "id": None,
        "index": index,
        "text": None,
        "finish_reason": "error",
        "error": {"type": kind, "message": message},
    }


def batch(index: int, text: str | None = "an answer") -> dict[str, Any]:
    body = {**native(index), "choices": [{"message": {"content": text}, "finish_reason": "tool_calls"}]}
    if text is None:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": "<b>"}'}}
        body["choices"][0]["message"]["tool_calls"] = [call]
    for name in ("id", "index", "text", "finish_reason"):
        del body[name]
    return {"id": f"batch_req_{index:012d}", "custom_id": f"c{index}", "response": {"body": body}, "error": None}


def write_results(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.unlink(missing_ok=True)
    suffix = "".join(path.suffixes[1:])
    write_lines(path, map(encode_line, lines), suffix)
    return path


def page_of(path: Path, **options: Any) -> str:
    return write_page(ReportOptions(path, **options), Console(quiet=True)).read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Checks that all elements are closed, and collects what they are."""

    VOID = ("meta", "br", "img", "path", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID or (tag == "path" and "dot" in str(attrs)):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_texts_of_rows_are_no_markup(tmp_path: Path) -> None:
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    lines = [
        native(0, HOSTILE, id=HOSTILE, metadata={HOSTILE: HOSTILE}, reasoning_content=HOSTILE, tool_calls=[call]),
        failed(1, HOSTILE, HOSTILE),
    ]
    path = write_results(tmp_path / "d.results.jsonl", lines)
    job = {"specbatch": "0", f"data.{HOSTILE}": HOSTILE}
    stats = {"job": job, "notes": [HOSTILE], "device": HOSTILE, "input": HOSTILE, "models": {"target": HOSTILE}}
    stats["session"] = {"joules": 1234.5, "output_tokens_per_joule": 2.5}
    (tmp_path / "d.results.stats.json").write_text(json.dumps(stats))
    text = page_of(path)
    tags = Tags(text)
    assert not {"script", "img", "iframe", "link"} & set(tags.names)
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert tags.links == []
    assert "1,234 J, 2.5 output tokens per joule" in tags.words
    assert tags.words.count("alert(2)") >= 9
    assert "default-src 'none'" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert "://" not in text


def test_the_page_has_all_sections(tmp_path: Path) -> None:
    lines = [native(i, tokens=3 + i % 40) for i in range(200)] + [failed(200 + i, f"line {i}") for i in range(4)]
    text = page_of(write_results(tmp_path / "d.results.jsonl", lines))
    words = Tags(text).words
    for part in (
        "Acceptance by position",
        "Acceptance length over the file",
        "Length of the answers",
        "How rows ended",
        "Failed rows over the file",
        "line 0",
        "200, 201, 202, 203",
        "Slowest rows",
        "Rows to look at",
        "draft 2: accepted in",
        "Configuration and versions",
        "200 answered",
        "1.96% of the rows",
    ):
        assert part in words, part
    assert "line 3" not in words.split("Rows to look at")[0], "three messages of a type are enough"


@pytest.mark.parametrize("name", ["d.results.jsonl", "d.results.jsonl.gz", "d.results.jsonl.zst", "d.results.parquet"])
@pytest.mark.parametrize("make", [native, batch])
def test_all_formats_of_results(tmp_path: Path, name: str, make: Any) -> None:
    path = write_results(tmp_path / name, [make(i) for i in range(5)])
    results = Results.open(path)
    summary = summarize(results.rows())
    assert (summary.totals.ok, results.damaged, len(summary.samples.items)) == (5, 0, 5)
    assert summary.samples.items[2].text == "an answer"
    assert "5 answered" in page_of(path)
    assert (tmp_path / "d.results.report.html").exists()


def test_calls_of_batch_lines(tmp_path: Path) -> None:
    words = Tags(page_of(write_results(tmp_path / "d.jsonl", [batch(0, None)]))).words
    assert 'weather({"a": "<b>"})' in words


def test_an_unfinished_job(tmp_path: Path) -> None:
    header = header_line({"specbatch": "0", "model.target": "org/Model"})
    lines = PartialLines(header)
    rows = [lines.row(1, encode_line(native(i, f"answer {i}"))) for i in (4, 1, 3, 1)]
    damaged = bytearray(lines.row(1, encode_line(native(7))))
    damaged[-5] ^= 1
    torn = lines.row(1, encode_line(native(9)))[:-9]
    partial = tmp_path / "d.results.jsonl.partial"
    partial.write_bytes(header + lines.record({"specbatch_longest_row": 9}) + b"".join(rows) + bytes(damaged) + torn)
    for named in (partial, tmp_path / "d.results.jsonl"):
        words = Tags(page_of(named)).words
        for part in ("not finished", "3 answered", "org/Model", "not counted here: 1.", "over time"):
            assert part in words, part
        assert "count once here: 1." in words
        (tmp_path / "d.results.report.html").unlink()


@pytest.mark.parametrize("lines", [[], [failed(0)], [native(0, "", 1, speculation={**native(0)["speculation"],
    "rounds": 0, "drafted": 0, "accepted": 0, "acceptance_length": None, "accept_histogram": []})]])  # fmt: skip
def test_files_with_little_in_them(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    assert "No drafts were made" in Tags(page_of(write_results(tmp_path / "d.jsonl", lines))).words


def test_lines_that_are_no_results_are_counted(tmp_path: Path) -> None:
    """Of types and sizes that specbatch does not write."""
    counts = native(0)["speculation"]
    wrong: list[dict[str, Any]] = [
        {"text": 5},
        {"reasoning_content": {}},
        {"tool_calls": "abc"},
        {"usage": {"prompt_tokens": "7", "completion_tokens": 1}},
        {"usage": {"prompt_tokens": 10**400, "completion_tokens": -1}},
        *({"speculation": {**counts, "acceptance_length": length}} for length in ("2", 1e300, float("nan"), -1)),
        *({"speculation": {**counts, "accept_histogram": counted}} for counted in ("abc", [None], [-1], 3)),
        {"speculation": {**counts, "rounds": True}},
        {"error": "text"},
    ]
    lines = [native(0), *({**native(i), **fields} for i, fields in enumerate(wrong, 1)), failed(99, "m" * 10**6)]
    path = tmp_path / "d.results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(path)
    assert f"not counted here: {len(wrong)}." in Tags(page).words
    assert len(page) < 10**5


def test_memory_does_not_grow_with_the_rows() -> None:
    windows, sample, summary = Windows(), Sample[int](50), Summary()
    for i in range(100_000):
        windows.add(Window(1, 0, 2, 3.0 if i < 50_000 else 6.0))
        sample.add(i)
    assert sum(window.rows for window in windows.windows) == 100_000
    assert 120 <= len(windows.windows) <= 240
    lengths = [window.committed / window.rounds for window in windows.windows]
    assert (lengths[0], lengths[-1]) == (1.5, 3.0)
    assert lengths == sorted(lengths)
    assert len(sample.items) == 50
    assert 30_000 < sum(sample.items) / 50 < 70_000
    assert summary.totals.rows == 0


def test_the_same_file_gives_the_same_page(tmp_path: Path) -> None:
    path = write_results(tmp_path / "d.jsonl", [native(i, tokens=random.Random(i).randint(1, 99)) for i in range(300)])
    assert page_of(path) == page_of(path)


def test_the_slowest_rows_come_first() -> None:
    path_rows = [native(i, tokens=t) for i, t in enumerate([9, 90, 30, *[3] * 40])]
    summary = summarize(map(_row, path_rows))
    slowest = summary.slowest.items
    assert [row.index for row in slowest[:4]] == [1, 2, 0, 3]
    assert len(slowest) == 15


def _row(line: dict[str, Any]) -> Any:
    from specbatch.report.rows import read_row

    return read_row(line)


def test_prompts_are_those_of_the_unchanged_input(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    messages = [{"role": "user", "content": "asked in a chat"}, {"role": "assistant", "content": "an answer"}]
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    rows: list[Any] = [{"prompt": "asked <b>plainly"}, line, {"question": "a column"}, 7]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_results(tmp_path / "d.results.jsonl", [native(i) for i in range(4)])
    facts = {f"input.{name}": value for name, value in identify_input(data)[0].items()}
    job = {"specbatch": "0", "input.kind": "file", **facts}
    (tmp_path / "d.results.stats.json").write_text(json.dumps({"job": job, "input": "d.jsonl"}))
    words = Tags(page_of(path)).words
    for part in ("asked <b>plainly", "user: asked in a chat", "a column"):
        assert part in words
    data.write_text(data.read_text().replace("plainly", "otherly"))
    words = Tags(page_of(path)).words
    assert "asked <b>otherly" not in words
    assert "--input names it" in words
    with pytest.raises(InputError, match="is not the input of this job, or has changed"):
        page_of(path, input=data)
    with pytest.raises(InputError, match="there is no input file"):
        page_of(path, input=tmp_path / "none.jsonl")


SPEED = {"candidate": {"label": "3/1/4"}, "tokens_per_second": 120.0, "tokens_per_round": 2.5}
TUNED = {
    "verdict": "1.50x as fast as plain decoding <b>",
    "live": [{"what": "3/1/4", "predicted": 120.0, "measured": 118.5, "low": 110.0, "high": 125.0}],
    "by_batch": [{"batch": 8, "ranked": [SPEED], "plain": {"candidate": None, "tokens_per_second": 80.0}}],
}
EVALUATED = {
    "tasks": {
        "gsm8k": {
            "accuracy": {"strict": {"value": 0.25, "interval": [0.175, 0.343]}, "loose": {"value": None}},
            "rows": {"total": 100, "failed": 2},
            "output_tokens_per_second": 1234.5,
            "acceptance_length": 2.25,
            "compare": {"speed_up": 1.75},
        },
        "mt_bench_speed": {"accuracy": {}, "rows": {"total": 80, "failed": 0}},
    }
}


def test_tune_and_eval_are_on_the_page(tmp_path: Path) -> None:
    path = write_results(tmp_path / "d.jsonl", [native(0)])
    (tmp_path / "tuned.report.json").write_text(json.dumps(TUNED))
    (tmp_path / "tuned.acceptance.png").write_bytes(b"\x89PNG")
    (tmp_path / "results.json").write_text(json.dumps(EVALUATED))
    for tune in (tmp_path, tmp_path / "tuned.yaml", tmp_path / "tuned.report.json"):
        tags = Tags(page_of(path, tune=tune, evaluation=tmp_path))
        assert tags.links == ["data:image/png;base64,iVBORw=="]
        for part in (
            "1.50x as fast",
            "118.5",
            "3/1/4",
            "1.50",
            "25.0% (17.5% to 34.3%)",
            "1,234",
            "2.25",
            "1.75",
            "mt_bench_speed",
        ):
            assert part in tags.words, part
    for name, text in (("tuned.report.json", "{}"), ("results.json", '{"tasks": 3}'), ("results.json", "?")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=r"is no report|of another version|cannot read"):
            page_of(path, **({"tune": tmp_path} if name.startswith("tuned") else {"evaluation": tmp_path}))
    with pytest.raises(InputError, match="cannot read"):
        page_of(path, tune=tmp_path / "other.yaml")


def test_the_command(tmp_path: Path) -> None:
    path = write_results(tmp_path / "d.results.jsonl", [native(0)])
    run = CliRunner()
    for _ in range(2):
        done = run.invoke(app, ["report", str(path)])
        assert done.exit_code == 0, done.output
    page = tmp_path / "d.results.report.html"
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("<html>mine</html>")
    pandas.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    for arguments, words in (
        ([str(path)], "was not written by specbatch"),
        ([str(path), "-o", str(path)], "is the results"),
        ([str(tmp_path / "none.jsonl")], "there is no result file"),
        ([str(tmp_path / "other.parquet")], "was not written by specbatch"),
        ([str(page), "-o", str(tmp_path / "p.html")], "has no result of specbatch"),
    ):
        done = run.invoke(app, ["report", *arguments])
        assert done.exit_code == 2
        assert words in " ".join(done.output.split()), done.output
    assert page.read_text() == "<html>mine</html>"


@pytest.mark.parametrize(
    ("low", "high", "whole", "marks"),
    [
        (0, 1, False, [0, 0.25, 0.5, 0.75, 1]),
        (1, 5.3, False, [1, 2, 4, 6]),
        (0, 3, True, [0, 1, 2, 3]),
        (0, 9, True, [0, 5, 10]),
        (0, 0, True, [0, 1]),
        (1, 1, False, [1]),
        (0, 4321, True, [0, 2000, 4000, 6000]),
    ],
)
def test_ticks(low: float, high: float, whole: bool, marks: list[float]) -> None:
    found = charts.ticks(low, high, 4, whole=whole)
    assert found[: len(marks)] == pytest.approx(marks)
    assert found[-1] >= high
    assert len(found) <= 6


def test_histograms_count_every_row() -> None:
    for counts in (Counter({5: 3}), Counter({1: 990, 2: 5, 5000: 5}), Counter(dict.fromkeys(range(1000), 1))):
        found = charts.histogram(counts, "tokens", "lengths")
        rows = [int(n.replace(",", "")) for tip, *_ in found.bars for n in re.findall(r"tokens: ([\d,]+) rows", tip)]
        assert sum(rows) == counts.total()
        assert len(rows) <= 40
    tail = charts.histogram(Counter({1: 990, 2: 5, 5000: 5}), "tokens", "lengths").bars[-1]
    assert "and more tokens" in tail[0]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is there")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", [0, 1])  # dark, light
def test_in_a_browser(tmp_path: Path, width: int, scheme: int) -> None:
    """The page is drawn, and is not wider than the window."""
    image = pytest.importorskip("PIL.Image")
    lines = [native(i, "a word " * (i % 90), 3 + i % 90, id="x" * 300) for i in range(300)]
    lines += [failed(300, "y" * 400)]
    page = tmp_path / "p.html"
    page_of(write_results(tmp_path / "d.results.jsonl", lines), output=page)
    shot = tmp_path / "p.png"
    options = [f"--window-size={width},2500", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}"]
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        *options,
        page.as_uri(),
    ]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    picture = image.open(shot).convert("RGB")
    assert picture.size == (width, 2500)
    background = picture.getpixel((0, 0))
    assert (sum(background) < 200) == (scheme == 0)
    assert len(picture.getcolors(1 << 24)) > 50
    edge = {picture.getpixel((width - 1, y)) for y in range(2500)}
    assert edge == {background}, "nothing reaches the edge"


@pytest.mark.parametrize(
    "stats",
    [
        {"rows": []},
        {"tokens": {"prompt": "many"}},
        {"versions": 3},
        {"notes": [1]},
        {"session": {"seconds": None}},
        {"speculation": {"accept_histogram": "x"}},
        {"session": {"seconds": {}}, "config": {}},
    ],
)
def test_statistics_of_wrong_types_are_an_error(tmp_path: Path, stats: dict[str, Any]) -> None:
    path = write_results(tmp_path / "d.results.jsonl", [native(0)])
    (tmp_path / "d.results.stats.json").write_text(json.dumps({"job": {"specbatch": "0"}, **stats}))
    try:
        page_of(path)
    except InputError as exc:
        assert "d.results.stats.json is damaged" in exc.message  # noqa: PT017
    else:
        assert stats["session"] == {"seconds": {}}, "only fields that are missing are no error"


def test_the_page_has_no_secrets_of_urls(tmp_path: Path) -> None:
    path = write_results(tmp_path / "d.results.jsonl", [native(0)])
    stats = {"job": {"specbatch": "0"}, "input": "https://me:s3cr3t@h/d.jsonl?sig=s3cr3t"}
    (tmp_path / "d.results.stats.json").write_text(json.dumps(stats))
    assert "https://***@h/d.jsonl?sig=***" in page_of(path)
    assert "s3cr3t" not in page_of(path)
