"""A check of grammars' automata: the legal tokens along random texts, by the automaton and by llguidance.

    python scripts/check/check_walks.py --steps 1000000 -o walks.json      # a CPU, about ten minutes

The grammars are the 20 schemas of `json_schemas.jsonl`, generated schemas, and generated regexes. The tokenizers are
that of the built-in model (byte-level BPE, 49,152 tokens), and two that are trained here on Python's own library: a
byte-level one with up to 150,000 tokens, and one like SentencePiece's, with a token for each byte that no other has.

Where a grammar forces bytes, llguidance allows one token only. It depends on the last token, too, so it can be another
one than the automaton's where a character's bytes come in other tokens than the usual ones. Such steps are counted as
`forced_differ`, with examples; `differ` must be 0. Walks that leave an automaton end there, and are counted as `left`.
Grammars without an automaton are counted by their reason.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specbatch.errors import RowError
from specbatch.grammar.automaton import DEAD, START
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, with_exact_formats
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.results.stats import commit, versions

SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")
BUILT_IN = "builtin:smollm2-135m-instruct"
END = "<|end|>"
WORDS = [
    "red",
    "green",
    "blue",
    "größe",
    "名前",
    "a b",
    'say "x"',
    "back\\slash",
    "naïve",
    "",
    "🙂",
    "true",
    "12",
    "x/y",
]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]+$", "[0-9]{3}", r"^\d{4}-\d{2}$", "^(foo|bar)*$", r"\w+@\w+", "^.{1,3}$"]
PATTERNS += [r"^[^\"\\]*$", r"^\s?x\s$", "^(a|ab)(c|bcd)?$", "^é+$", r"^[\x20-\x7e]{0,8}$", r"^\p{L}+$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "uuid", "hostname"]
PARTS = ["a", "[a-c]+", "(foo|bar)", r"\d{1,3}", "[^x]?", "é", "(ab)*", "z{2}", "(1|12|123)", "[ -~]", "\\.", "(|q)"]


def generated_value(rng: random.Random, depth: int) -> dict[str, Any]:
    """Generate a schema."""
    kinds = ["string"] * 4 + ["integer", "number", "boolean", "null", "enum"]
    kinds += ["array", "object", "anyOf", "any"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "string":
        one: dict[str, Any] = {"type": "string"}
        what = rng.choice(["length", "pattern", "format", "none"])
        if what == "length":
            low = rng.choice([0, 0, 1, 3])
            one |= {"minLength": low, "maxLength": low + rng.choice([0, 1, 5, 20])}
        elif what == "pattern":
            one["pattern"] = rng.choice(PATTERNS)
        elif what == "format":
            one["format"] = rng.choice(FORMATS)
        return one
    if kind in ("integer", "number"):
        return {"type": kind} | _bounds(rng, kind)
    if kind == "enum":
        values = rng.sample([*WORDS, 1, 20, -3, True, None], rng.randint(1, 6))
        return {"enum": values}
    if kind == "array":
        low = rng.choice([0, 1, 2])
        one = {"type": "array", "items": generated_value(rng, depth - 1), "minItems": low}
        return one | ({"maxItems": low + rng.choice([0, 1, 3])} if rng.random() < 0.6 else {})
    if kind == "object":
        return generated_object(rng, depth - 1)
    if kind == "any":
        return {}
    if kind == "anyOf":
        return {"anyOf": [generated_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    return {"type": kind}


def _bounds(rng: random.Random, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    low = rng.choice([-1000, -12, -1, 0, 1, 7, 99, 2.5 if kind == "number" else 2])
    if rng.random() < 0.6:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([2, 10, 105, 5000])
    if kind == "integer" and rng.random() < 0.2:
        found["multipleOf"] = rng.choice([2, 3, 7])
    return found


def generated_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample([word for word in WORDS if word], rng.randint(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: generated_value(rng, depth) for name in names}
    found = {"type": "object", "properties": properties, "required": required}
    return found if rng.random() < 0.2 else found | {"additionalProperties": False}


def constraints(num_schemas: int, num_regexes: int, seed: int) -> list[Constraint]:
    rng = random.Random(seed)
    schemas = [json.loads(line)["schema"] for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    schemas += [generated_object(rng, 2) for _ in range(num_schemas)]
    found = [Constraint("schema", "json_schema", with_exact_formats(json.dumps(schema))) for schema in schemas]
    for _ in range(num_regexes):
        parts = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 6)))
        found.append(Constraint("regex", "regex", parts if rng.random() < 0.7 else f"({parts}){{1,3}}"))
    return found


def library_texts() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [file.read_text(encoding="utf-8", errors="ignore") for file in sorted(folder.glob("*/*.py"))[:900]]


def trained(kind: str, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer."""
    common: dict[str, Any] = {"special_tokens": [END], "show_progress": False}
    if kind == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=150_000, min_frequency=1, initial_alphabet=alphabet, **common)
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence(  # type: ignore[assignment]
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(  # type: ignore[assignment]
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        common["special_tokens"] = [END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=20_000, max_token_length=16, limit_alphabet=200, **common)
    backend.train_from_iterator(_lines(texts), trainer)
    if kind != "byte_level":  # tokens for bytes are no special tokens
        data = json.loads(backend.to_str())
        data["added_tokens"] = [one for one in data["added_tokens"] if not one["content"].startswith("<0x")]
        backend = Tokenizer.from_str(json.dumps(data))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)


def _lines(texts: list[str]) -> list[str]:
    return [line for text in texts for line in text.splitlines()]


class Legal:
    """The legal tokens of the states of an automaton."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self._automaton = automaton
        self._next_QB = automaton.next_QK[:, automaton.classes_B]
        self._known: dict[int, NDArray[np.bool_]] = {}

    def after(self, state: int) -> NDArray[np.bool_]:
        if state not in self._known:
            self._known[state] = self._computed(state)
        return self._known[state]

    def _computed(self, state: int) -> NDArray[np.bool_]:
        words = self._automaton.vocabulary
        found = np.zeros(len(words.texts), dtype=np.bool_)
        if (token := int(self._automaton.forced_Q[state])) >= 0:
            found[token] = True
            return found
        index = np.flatnonzero(words.lengths_V)
        states, at = np.full(len(index), state), 0
        while len(index):
            states = self._next_QB[states, words.bytes_LV[at, index]]
            at += 1
            found[index[(states != DEAD) & (words.lengths_V[index] == at)]] = True
            continues = (states != DEAD) & (words.lengths_V[index] > at)
            index, states = index[continues], states[continues]
        return found


def texts_of(automaton: TokenAutomaton, tokens: Iterable[int]) -> list[str]:
    return [automaton.vocabulary.texts[token].decode(errors="replace") for token in tokens]


def walk(compiler: GrammarCompiler, end: int, wanted: list[Constraint], num_steps: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    reasons: Counter[str] = Counter()
    count = dict.fromkeys(("steps", "walks", "left", "differ", "forced_differ"), 0)
    examples: list[str] = []
    each = max(1, num_steps // len(wanted))
    for constraint in wanted:
        try:
            start = compiler.matcher(constraint)
        except RowError as exc:
            reasons[f"error: {exc.message[:60]}"] += 1
            continue
        automaton = start.automaton
        if not isinstance(automaton, TokenAutomaton):
            reasons[automaton] += 1
            continue
        reasons["device"] += 1
        legal = Legal(automaton)
        left = each
        while left > 0:
            matcher, state = start.fork(), START
            tokens: list[int] = []
            count["walks"] += 1
            for _ in range(min(left, 120)):
                left -= 1
                if automaton.leaves_Q[state]:
                    count["left"] += 1
                    break
                count["steps"] += 1
                theirs = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[
                    : len(automaton.vocabulary.texts)
                ]
                theirs = theirs.astype(np.bool_)
                theirs[end] = False
                mine = legal.after(state)
                if (mine != theirs).any() or matcher.is_complete() != automaton.accepts_Q[state]:
                    is_forced = automaton.forced_Q[state] >= 0
                    count["forced_differ" if is_forced else "differ"] += 1
                    if len(examples) < 20:
                        last, other = (
                            texts_of(automaton, ids) for ids in (tokens[-3:], np.flatnonzero(mine ^ theirs)[:4])
                        )
                        examples.append(f"{constraint.text[:80]} after {last}: {other}")
                options = np.flatnonzero(theirs & (mine if mine.any() else theirs))
                options = options if len(options) else np.flatnonzero(theirs)
                if not len(options):
                    break
                # Long tokens and short ones, so that texts end at times.
                tokens.append(int(options[rng.integers(len(options))]))
                if not matcher.advance(tokens[-1]):
                    break
                state = automaton.automaton.step(state, automaton.vocabulary.texts[tokens[-1]])
    return {**count, "grammars": dict(reasons.most_common()), "examples": examples}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000, help="of all tokenizers together")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--regexes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of tokenizers: built_in byte_level sentencepiece")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    wanted = constraints(args.schemas, args.regexes, args.seed)
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": commit(), "versions": versions()}
    names = args.only or ["built_in", "byte_level", "sentencepiece"]
    texts = library_texts() if set(names) != {"built_in"} else []
    failed = False
    for name in names:
        built_in = name == "built_in"
        tokenizer: Any = load_tokenizer(resolve_model(BUILT_IN)) if built_in else trained(name, texts)
        began = time.perf_counter()
        found = walk(
            GrammarCompiler(tokenizer, max_automata=len(wanted)),
            tokenizer.eos_token_id,
            wanted,
            args.steps // len(names),
            args.seed,
        )
        found |= {"vocabulary": len(tokenizer), "seconds": round(time.perf_counter() - began, 1)}
        failed |= bool(found["differ"])
        report[name] = found
        print(json.dumps({"check": "walks", "tokenizer": name, **found}), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    print("walks: FAILED" if failed else "walks: ok")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
