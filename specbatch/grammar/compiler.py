"""Grammars of llguidance (github.com/guidance-ai/llguidance), for one tokenizer. Nothing else imports it.

JSON is written on one line, with one space after `,` and `:`, as `json.dumps` does: a small model that may write spaces
can write them without end. A schema's `x-guidance` changes that, as llguidance describes it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llguidance

from specbatch.errors import RowError
from specbatch.grammar.constraint import ONE_LINE, Constraint
from specbatch.grammar.matcher import Matcher, Threads

_MAX_COMPILED = 1024  # copies of grammars that are kept; one takes about 50 KB
_MAX_THREADS = 16  # that compute masks
_USERS_OF_COPY = 4  # requests that share a lexer before there is another one: a schema takes a millisecond to compile
_MAX_COPY_SECONDS = 0.25  # in which a grammar is compiled again for more threads, all of them together
_NO_TOKEN = "<|specbatch: no token ends a text|>"
# Tokens that any place with room for as many characters of a JSON string takes: the library looks at the others alone.
# A place near the end of a string with a maxLength needs the short ones, or it takes ten times as long as others.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 5, 6, 8, 11, 16, 30)]
_SLICES.append(r'[^"\\\x00-\x1F\x7F]+')


def grammar_threads(num_processes: int = 1) -> int:
    """That compute masks, of each of these processes of a host."""
    return min(_MAX_THREADS, max(1, (os.cpu_count() or 1) * 3 // 4 // num_processes))


class GrammarCompiler:
    """`tokenizer`: of transformers, a fast one. `num_threads`: that compute masks. Threads may share a compiler."""

    def __init__(self, tokenizer: Any, num_threads: int | None = None) -> None:
        self._hf_tokenizer = tokenizer
        self._num_threads = num_threads or grammar_threads()
        self._threads: Threads | None = None  # made for the first grammar, as the next one
        self._tokenizer: Any = None  # llguidance's: it takes a third of a second
        self._compiled: OrderedDict[Constraint, _Grammar] = OrderedDict()
        self._num_copies = 0  # of these
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """At the beginning of a text. Raises RowError for what cannot be compiled."""
        with self._lock:
            grammar = self._compiled.get(constraint)
            if grammar is None:
                grammar = self._compile(constraint)
                self._compiled[constraint] = grammar
                self._num_copies += 1
            else:
                self._compiled.move_to_end(constraint)
            old = grammar.num_copies
            matcher = grammar.matcher()
            self._num_copies += grammar.num_copies - old
            while self._num_copies > _MAX_COMPILED and len(self._compiled) > 1:
                self._num_copies -= self._compiled.popitem(last=False)[1].num_copies
            return matcher

    def _compile(self, constraint: Constraint) -> _Grammar:
        if self._tokenizer is None or self._threads is None:
            self._tokenizer = self._wrap(constraint)
            executor = llguidance.LLExecutor(self._num_threads)
            self._threads = Threads(executor, self._num_threads, self._tokenizer.eos_token)
        threads, tokenizer = self._threads, self._tokenizer
        make = {
            "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE),
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "grammar": lambda text: llguidance.grammar_from("grammar", text),
        }[constraint.kind]
        try:
            text = make(constraint.text)
            grammar = _Grammar(lambda: llguidance.LLMatcher(tokenizer, text, log_level=0), tokenizer, threads)
        except ValueError as exc:
            raise _refused(constraint, str(exc)) from exc
        if grammar.error:
            raise _refused(constraint, grammar.error)
        start = grammar.matcher()
        if not start.mask().any() and not start.is_complete():
            raise _refused(constraint, "no text matches it")
        return grammar

    def _wrap(self, constraint: Constraint) -> Any:
        backend = getattr(self._hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _refused(constraint, "the model's tokenizer is not a fast one")
        copy = type(backend).from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        end = self._hf_tokenizer.eos_token_id
        if not isinstance(end, int):  # then an end that is no token of the model
            copy.add_special_tokens([_NO_TOKEN])
            end = copy.token_to_id(_NO_TOKEN)
        try:
            return llguidance.LLTokenizer(copy.to_str(), eos_token=end, slices=_SLICES)
        except ValueError as exc:
            raise _refused(constraint, f"the model's tokenizer cannot be used: {exc}") from exc


class _Grammar:
    """Compiled more than once, so that threads can compute its masks at the same time. Copies of a matcher of the
    library share one lexer, and its lock is held while a mask is computed: requests of a schema would wait for each
    other."""

    def __init__(self, compile_: Callable[[], Any], tokenizer: Any, threads: Threads) -> None:
        began = time.perf_counter()
        self._compile = compile_
        self._vocab_size = tokenizer.vocab_size
        self._threads = threads
        self._copies = [compile_()]
        self._users: list[weakref.WeakSet[Matcher]] = [weakref.WeakSet()]  # of each copy
        self._max_copies = min(threads.count, 1 + int(_MAX_COPY_SECONDS / (time.perf_counter() - began)))
        self.error: str = self._copies[0].get_error() if self._copies[0].is_error() else ""

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def matcher(self) -> Matcher:
        """Of the copy that the fewest matchers use."""
        counts = [len(users) for users in self._users]
        index = counts.index(min(counts))
        if counts[index] >= _USERS_OF_COPY and len(counts) < self._max_copies:
            index = len(counts)
            self._copies.append(self._compile())
            self._users.append(weakref.WeakSet())
        matcher = Matcher(self._copies[index], self._vocab_size, self._threads)
        self._users[index].add(matcher)
        return matcher


def _refused(constraint: Constraint, problem: str) -> RowError:
    # Of a long error the first lines say what is wrong; the others repeat the grammar. That of a regex is the reverse.
    problem = problem.rsplit("\nerror: ", 1)[-1].split("\n", 1)[0] if constraint.kind == "regex" else problem
    first = " ".join(" ".join(problem.split("<state>")[0].split()).split(" ")[:40])
    return RowError("invalid_value", f"{constraint.option} cannot be used: {first}")
