"""Tables at the end of a command: in a log as at a terminal, and acceptance that explains itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.job.terminal import acceptance_text, print_notes, print_table
from specbatch.results.stats import RowTotals, Session, build_report


def printed(terminal: bool) -> list[str]:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("rows", "3 ok")
    table.add_row("output", "a-folder-with-a-long-name/" * 3 + "[x].jsonl".replace("[", "\\["))
    file = io.StringIO()
    print_table(table, Console(file=file, width=60, force_terminal=terminal, color_system=None))
    return file.getvalue().splitlines()


def test_a_log_has_no_blanks_at_the_ends_of_lines_and_no_line_is_folded() -> None:
    assert printed(False) == ["rows    3 ok", "output  " + "a-folder-with-a-long-name/" * 3 + "[x].jsonl"]
    assert all(len(line) <= 60 for line in printed(True))


def counts(**rounds: int) -> SpeculationCounts:
    """`plain`: rounds without drafts; `kept`: with one draft that is kept; `last`: that ends its row; `lost`: that is
    not kept."""
    found = SpeculationCounts()
    for kind, (drafted, accepted, committed) in {
        "plain": (0, 0, 1),
        "kept": (1, 1, 2),
        "last": (1, 1, 1),
        "lost": (1, 0, 1),
    }.items():
        for _ in range(rounds.get(kind, 0)):
            found.record(drafted=drafted, depth=drafted, accepted=accepted, committed=committed)
    return found


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        ({}, None),
        ({"plain": 9}, "1.00 tokens per round, no drafts"),
        ({"plain": 999, "kept": 1}, "1.00 tokens per round, drafts in less than 1% of rounds, 100% of drafts accepted"),
        ({"plain": 96, "kept": 4}, "1.04 tokens per round, drafts in 4% of rounds, 100% of drafts accepted"),
        ({"last": 7}, "1.00 tokens per round (2.00 without the ends of rows), 100% of drafts accepted"),
        ({"kept": 97, "last": 1, "lost": 2}, "1.97 tokens per round, 98% of drafts accepted"),
    ],
)
def test_acceptance_goes_with_the_accepted_drafts(rounds: dict[str, int], text: str | None) -> None:
    speculation = counts(**rounds)
    totals = RowTotals(ok=1, speculation=speculation)
    config: dict[str, Any] = {
        "model": {"target": "t"},
        "speculation": {"draft": None, "simulate_acceptance": None},
        "engine": {"device": "cpu"},
    }
    session = Session(engine=EngineStats(speculation=speculation))
    report = build_report({}, "d", Path("o"), totals, 0, session, config=config, models={}, made_by={})
    assert acceptance_text(report["speculation"], report["session"]["draft_rate_by_position"]) == text


def test_notes_end_lines_between_words_on_a_terminal_only() -> None:
    note = "speculation.method: ngram " + "a-folder/" * 8 + " and some words after it, more than one line has"
    texts = []
    for terminal in (True, False):
        file = io.StringIO()
        print_notes([note], Console(file=file, width=40, force_terminal=terminal, color_system=None))
        texts.append(file.getvalue())
    assert texts[1] == f"{note}\n"
    lines = texts[0].splitlines()
    assert " ".join(lines) == note
    assert all(len(line) <= 40 or " " not in line for line in lines)
    assert len(lines) == 4
