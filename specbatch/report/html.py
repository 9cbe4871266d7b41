"""Parts of the page: escaped text, tables, figures. All text of rows goes through `text`."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def text(value: object) -> str:
    """Escaped, for HTML and for attributes; characters that HTML does not allow become U+FFFD."""
    return html.escape(_CONTROLS.sub("\ufffd", str(value)))


def clipped(value: str, limit: int) -> str:
    """The beginning of a long text, which says how much is left out; not yet escaped."""
    return value if len(value) <= limit else f"{value[:limit]} … ({len(value) - limit:,} more characters)"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[int] = (),
    wide: Sequence[int] = (),
    lines: Sequence[int] = (),
) -> str:
    """Make a table. `rows`: cells in HTML. `numbers`: the columns that are aligned to the right. `wide`: the columns
    with long texts. `lines`: the columns whose texts are cut at the end of the line."""
    kinds = [
        "num" if i in numbers else "wide" if i in wide else "line" if i in lines else "" for i in range(len(columns))
    ]
    head = "".join(f'<th class="{kind}">{text(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values (in HTML), one pair a line."""
    cells = "".join(f'<tr><th scope="row">{text(name)}</th><td>{value}</td></tr>' for name, value in pairs)
    return f'<div class="scroll"><table class="facts"><tbody>{cells}</tbody></table></div>'


def tiles(pairs: Sequence[tuple[str, str, str]]) -> str:
    """The main figures: (name, value, note)."""
    cells = "".join(
        f'<div class="tile"><div class="name">{text(name)}</div><div class="value">{text(value)}</div>'
        f'<div class="note">{text(note)}</div></div>'
        for name, value, note in pairs
    )
    return f'<div class="tiles">{cells}</div>'


def figure(title: str, plot: str, how: str) -> str:
    """A plot with a sentence that says how to read it."""
    return f'<figure><figcaption>{text(title)}</figcaption>{plot}<p class="how">{text(how)}</p></figure>'


def figures(parts: Sequence[str], kind: str = "figures") -> str:
    """Next to each other, as far as there is room. `kind`: figures, or pictures, which need more room."""
    return f'<div class="{kind}">{"".join(parts)}</div>'


def section(title: str, *parts: str) -> str:
    name = re.sub(r"\W+", "-", title.lower())
    return f'<section id="{name}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def paragraph(value: str) -> str:
    return f"<p>{text(value)}</p>"
