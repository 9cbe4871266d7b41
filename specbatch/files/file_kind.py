"""The kind of a file's content, by its first bytes: a file whose name says another kind is refused before a model is
loaded."""

from __future__ import annotations

import re

from specbatch.errors import InputError
from specbatch.files.jsonl import decode_value

HEAD = 1 << 16  # bytes that are enough
_BINARY = (  # first bytes, what they are, how to make an input of it
    (b"\x1f\x8b", "gzip", "add .gz to its name; or: zcat FILE | specbatch generate -"),
    (
        b"\x28\xb5\x2f\xfd",
        "zstd",
        "a name that ends in .zst, such as data.jsonl.zst; or: zstdcat FILE | specbatch generate -",
    ),
    (b"BZh91AY&SY", "bzip2", "bzcat FILE | gzip > data.jsonl.gz"),
    (b"\xfd7zXZ\0", "xz", "xzcat FILE | gzip > data.jsonl.gz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "extract the file that is in it"),
    (b"PK\x03\x04", "a zip archive or an Excel workbook", "extract the file that is in it, or save the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file", "save the sheet as CSV"),
    (b"PAR1\x15", "parquet", "a name that ends in .parquet"),
    (b"ARROW1\0\0", "an Arrow file", "a name that ends in .arrow"),
    (b"Obj\x01", "Avro", "convert it to parquet"),
    (b"SQLite format 3\0", "a SQLite database", "export the table as CSV"),
    (b"%PDF-", "PDF", None),
    (b"\x93NUMPY", "a NumPy array", None),
    (b"\x80\x04\x95", "a Python pickle", "write its rows as JSON lines"),
    (b"version https://git-lfs", "the pointer of Git LFS to a file", "git lfs pull"),
)
_TO_UTF8 = "iconv -f {} -t UTF-8 FILE > NEW_FILE"
_MAGIC = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}  # kind of a file by the end of its name
_MARKUP = re.compile(rb"<(!doctype|html|\?xml|head|body)\b", re.IGNORECASE)
_ARRAY = re.compile(rb"\[\s*(\{|\]?\s*\Z)")
_PRETTY = re.compile(rb"\{[ \t]*\r?\n")


def check_content(name: str, head: bytes, suffix: str) -> None:
    """Raises InputError if the file `name`, which begins with `head`, is not what the last part of its name, such as
    .gz or .csv, says."""
    found = binary_kind(head)
    kind, hint = found if found is not None else (None, None)
    wanted = _MAGIC.get(suffix)
    if kind == wanted or (suffix == ".arrow" and (found is None or kind == "an Arrow file")):  # a stream has no mark
        return
    if kind is not None:
        raise InputError(f"{name} is {kind}, not {wanted or _article(suffix)}", hint)
    raise InputError(f"{name} is not {wanted}, as its name says", "check how it was made or downloaded")


def check_text(name: str, head: bytes, suffix: str) -> None:
    """Raises InputError if the text in a file is not what `suffix` says: .jsonl, .csv, .tsv or .json. See
    `check_content`."""
    if (found := binary_kind(head)) is not None:
        raise InputError(f"{name} is {found[0]}, not {_article(suffix)}", found[1])
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _MARKUP.match(text):
        raise InputError(f"{name} is a page of HTML or XML, not {_article(suffix)}", "check its address, and the login")
    if suffix == ".jsonl" and _ARRAY.match(text) and not _begins_with_a_row(text):
        raise InputError(
            f"{name} is a JSON array, not JSON lines", "a name that ends in .json; or: jq -c '.[]' FILE > data.jsonl"
        )
    if suffix == ".jsonl" and _PRETTY.match(text):
        raise InputError(
            f"{name} has JSON over several lines, not JSON lines",
            "a name that ends in .json; or: jq -c . FILE > data.jsonl",
        )
    if suffix in (".csv", ".tsv") and (text.startswith(b'{"') or _ARRAY.match(text)):
        raise InputError(f"{name} is JSON, not {_article(suffix)}", "a name that ends in .jsonl or .json")


def _begins_with_a_row(text: bytes) -> bool:
    """Return whether the first line is JSON by itself, and others come after it. The line is one bad row then."""
    first, _, rest = text.partition(b"\n")
    try:
        decode_value(first.decode())
    except ValueError:
        return False
    return bool(rest.strip())


def binary_kind(head: bytes) -> tuple[str, str | None] | None:
    """Return the kind of a binary file and a hint, or None for text and for unknown files."""
    for magic, kind, hint in _BINARY:
        if head.startswith(magic):
            return kind, hint
    encoding = _wide_encoding(head)
    return None if encoding is None else (f"{encoding} text", _TO_UTF8.format(encoding))


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by their marks, or by the zeros that ASCII characters have there."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    first = head[:4]
    if len(first) == 4 and (first[::2] == b"\0\0") != (first[1::2] == b"\0\0"):
        little = first[1::2] == b"\0\0"
        return "UTF-16LE" if little else "UTF-16BE"
    return None


def _article(suffix: str) -> str:
    return {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON"}.get(suffix, suffix.strip(".").upper())
