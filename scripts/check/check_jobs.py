"""Random rows under random settings: every result equals that of plain decoding, one row at a time, float32 on a CPU.

    python scripts/check/check_jobs.py --seconds 300
    python scripts/check/check_jobs.py --case 17            # one case again
    python scripts/check/check_jobs.py --set tensor_parallel=2 --set kv_dtype='"fp8_e4m3"'

Each case draws rows with any of the fields that a row can have, a few that are wrong, and an engine: draft method and
shape, batch, pages, chunks, a cache so small that requests are preempted, prefix cache, a plan or none, several
processes for one model, two lanes, an FP8 cache, weights in FP8. Results must be equal but for `speculation`. A case
that differs is printed, with its number. Sampled rows are drawn for with `engine.deterministic`, where chains of a
draft network, too, keep every token.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specbatch import generate_file

_IDS = 500  # token ids are below this number; random:tiny has a few more
TARGET = "random:tiny"
WRONG: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"temperature": "hot"},
    {"prompt_token_ids": [10**9]},
    {"allowed_token_ids": []},
    {"min_tokens": 99, "max_tokens": 3},
    {"logit_bias": {"x": 1}},
    {"prompt": 5},
]


FORMATS: list[dict[str, Any]] = [
    {"choice": ["yes", "yes, of course", "no"]},
    {"choice": ["a", "ab", "abc", "b" * 40]},
    {"regex": "[a-f]{0,12}(xyz){1,9}"},
    {"regex": "(the same words again ){1,4}[0-9]?"},
    {"regex": "[^a-z]{2,}"},
    {"grammar": 'start: "(" start ")" | /[0-9]+/'},
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 6}, "is_right": {"type": "boolean"}},
                    "required": ["name", "is_right"],
                    "additionalProperties": False,
                }
            },
        }
    },
]


CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if enable_thinking | default(false) %}<think>{% else %}<think></think>{% endif %}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": kind, "maxLength": 4}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name, kind in (("look", "string"), ("add", "boolean"))
]


def chat_of(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a chat, which replace a prompt."""
    words = ["the same words again", "the same words", "once", "yes", "no"]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": " ".join(rng.choices(words, k=3))}]}
    if rng.random() < 0.5:
        row["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
    if rng.random() < 0.6:
        named: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
        row |= {"tools": TOOLS, "tool_choice": rng.choice(("required", named, "auto", "none"))}
        row["parallel_tool_calls"] = rng.random() < 0.3
    return row


def row_of(rng: random.Random, common: list[int]) -> dict[str, Any]:
    """Draw a row, which sometimes has each kind of field."""

    def sometimes(share: float) -> bool:
        return rng.random() < share

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, _IDS) for _ in range(count)]

    if sometimes(0.05):
        return {"prompt_token_ids": ids(3)} | rng.choice(WRONG)
    body = ids(rng.randint(1, 30))
    if sometimes(0.4):
        body = body[:4] * rng.randint(2, 6)  # something for n-grams to find
    row: dict[str, Any] = {"prompt_token_ids": common[: rng.choice((0, 0, 17, 40))] + body}
    row["max_tokens"] = rng.randint(1, 30)
    if sometimes(0.5):
        row |= {"temperature": rng.choice((0.3, 0.8, 1.3)), "seed": rng.randrange(100)}
        row |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 50, "top_p": 0.8}))
    optional: dict[str, Any] = {
        "n": rng.randint(2, 3),
        "stop": [chr(rng.randrange(97, 123)) for _ in range(2)],
        "stop_token_ids": ids(5),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": rng.randint(0, 3),
        "prompt_logprobs": rng.randint(0, 2),
        "repetition_penalty": rng.choice((0.8, 1.3)),
        "presence_penalty": rng.choice((-1.0, 1.5)),
        "frequency_penalty": rng.choice((-0.5, 0.7)),
        "logit_bias": {str(token): rng.choice((-100, 5, 50)) for token in ids(3)},
        "allowed_token_ids": ids(rng.choice((3, 80))),
        "bad_words": [chr(rng.randrange(97, 123)), "ab"],
        "min_tokens": rng.randint(1, row["max_tokens"]),
    }
    for name, value in optional.items():
        if sometimes(0.12):
            row[name] = value
    if sometimes(0.3):
        row |= rng.choice(FORMATS)
    if sometimes(0.15):
        del row["prompt_token_ids"]
        row |= chat_of(rng)
        if row.get("tool_choice") not in (None, "auto", "none"):
            row["max_tokens"] += 80  # a whole call needs these
    return row


def engine_of(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_batch_size": rng.choice((1, 2, 5, 9)),
        "page_size": rng.choice((1, 4, 16)),
        "prefill_chunk_tokens": rng.choice((3, 17, 200)),
        "prefix_cache": rng.random() < 0.7,
        "plan_rows": rng.choice((0, 5, 1000)),
        "kv_cache_tokens": rng.choice((320, 512, 4096)),
        "tensor_parallel": 2 if rng.random() < 0.1 else 1,
    }
    steps = rng.randint(1, 5)
    method = rng.choice(("none", "ngram", "draft_model", "eagle", "eagle3", "tree"))
    if method == "tree":
        tree = {"method": rng.choice(("eagle3", "draft_model")), "topk": 3, "num_draft_tokens": rng.randint(4, 9)}
        found |= tree | {"num_steps": max(2, steps)}
    elif method != "none":
        found |= {"method": method, "num_steps": steps}
    else:
        found["method"] = "none"
    if found["method"] in ("eagle", "eagle3"):
        found["draft"] = f"random:{found['method']}"
    elif found["method"] == "draft_model":
        found["draft"] = TARGET
    if rng.random() < 0.25:
        found |= {"two_batch_overlap": "on", "max_batch_size": rng.choice((17, 40)), "kv_cache_tokens": 8192}
    if rng.random() < 0.1:
        found["kv_dtype"] = "fp8_e4m3"
    if rng.random() < 0.1 and found["tensor_parallel"] == 1:
        found["quantization"] = "fp8"
    return found


def results(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    output = path.with_name("out.jsonl")
    generate_file(path, output, overwrite=True, keep_going=True, target=TARGET, device="cpu", dtype="float32",
                  deterministic=True, chat_template=CHAT_TEMPLATE, **settings)  # fmt: skip
    return [json.loads(line) for line in output.read_text().splitlines()]


def without_drafts(result: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a result that the draft method must not change."""
    kept = {key: value for key, value in result.items() if key != "speculation"}
    if "choices" in kept:
        kept["choices"] = [{k: v for k, v in one.items() if k != "speculation"} for one in kept["choices"]]
    return kept


PLAIN = {
    "method": "none", "max_batch_size": 1, "prefix_cache": False, "plan_rows": 0, "prefill_chunk_tokens": 200,
    "kv_cache_tokens": 4096,
}  # fmt: skip


# The settings that change bits: ranks add their parts; cached keys and values, or weights and inputs, are rounded.
BITS = ("tensor_parallel", "kv_dtype", "quantization")


def check(number: int, num_rows: int, folder: Path, counts: collections.Counter[str], forced: dict[str, Any]) -> bool:
    """Check one case. `forced`: settings of the engine that are not drawn."""
    rng = random.Random(number)
    common = [rng.randrange(2, _IDS) for _ in range(40)]
    path = folder / "rows.jsonl"
    rows = [row_of(rng, common) for _ in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = engine_of(rng) | forced
    plain = results(path, PLAIN | {name: settings[name] for name in BITS if name in settings})
    found = results(path, settings)
    wrong = [i for i in range(num_rows) if without_drafts(plain[i]) != without_drafts(found[i])]
    for i in wrong[:2]:
        print(f"case {number}, row {i}: {json.dumps(rows[i])}\n  {settings}")
        print("\n".join(f"  {str(one)[:400]}" for one in map(without_drafts, (plain[i], found[i]))))
    counts["cases"] += 1
    counts["rows"] += num_rows
    counts["error rows"] += sum("error" in result for result in plain)
    counts["tool calls"] += sum("tool_calls" in str(result) for result in plain)
    counts[f"method {settings['method']}"] += 1
    for name in ("two_batch_overlap", "kv_dtype", "quantization"):
        counts[name] += name in settings
    counts["cases that differ"] += bool(wrong)
    return not wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rows", type=int, default=30, help="of a case")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="only this case")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="an engine setting of all cases"
    )
    given = parser.parse_args(arguments)
    forced = {name: json.loads(value) for name, _, value in (item.partition("=") for item in given.set)}
    end, number = time.monotonic() + given.seconds, given.first if given.case is None else given.case
    counts: collections.Counter[str] = collections.Counter()
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        while True:
            is_right &= check(number, given.rows, Path(folder), counts, forced)
            number += 1
            if given.case is not None or time.monotonic() > end:
                break
    print(json.dumps(counts))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
