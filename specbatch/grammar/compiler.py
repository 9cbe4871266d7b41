"""The compiler of grammars for one tokenizer, by llguidance (github.com/guidance-ai/llguidance). No other module
imports that library.

JSON is written on one line, with one space after `,` and `:`, as `json.dumps` does: a small model that may write spaces
can write them without end. A schema's `x-guidance` changes that, as llguidance describes it.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import llguidance

from specbatch.errors import RowError
from specbatch.grammar import characters
from specbatch.grammar.automaton import Automaton, AutomatonBuilder
from specbatch.grammar.characters import NotRegularError
from specbatch.grammar.constraint import MAX_CHARS, ONE_LINE, Constraint
from specbatch.grammar.deep_thread import Abandoned, DeepThread
from specbatch.grammar.matcher import DEAD_END, Matcher, Threads, first_words
from specbatch.grammar.reasoning import AfterReasoning, Reasoning
from specbatch.grammar.schema_automaton import MAX_LEVELS, Leaves, schema_automaton
from specbatch.grammar.token_automaton import TokenAutomaton, TokenBytes, check, with_tokens
from specbatch.matcher import GrammarMatcher

# Limits of the compiled text. Choices become a regex, in which a character can take eight characters. Schemas and
# grammars can be deeply nested, see `DeepThread`.
_MAX_CHARS = {"regex": 8 * MAX_CHARS, "json_schema": MAX_CHARS, "grammar": MAX_CHARS}
# A compilation may take that long, and an automaton, too. Other bounds of automata are numbers, so that all processes
# decide alike.
_MAX_SECONDS = 30.0
# Limits of the library, five and four times its own: an object with 500 optional keys has 2,000 items in a row.
_MAX_ITEMS_IN_ROW, _MAX_ITEMS_IN_STEP = 10_000, 200_000
# The most copies of grammars that are kept, and the most characters of all of them. A copy takes about 50 KB, or 60
# bytes for each character.
_MAX_COMPILED, _MAX_KEPT_CHARS = 1024, 8 << 20
_MAX_AUTOMATON_CHARS = 1 << 16  # A longer schema or regex gets no automaton.
# The first grammars of a job get automata: each takes about 0.1 seconds of Python's time.
_MAX_AUTOMATA = 128
_MAX_THREADS = 16  # the most threads that compute masks
_USERS_OF_COPY = 4  # requests that share a lexer before there is another one: a schema takes a millisecond to compile
_MAX_COPY_SECONDS = 0.25  # the longest time for all copies of a grammar, which is compiled again for more threads
_NO_TOKEN = "<|specbatch: no token ends a text|>"
# Classes of tokens that are allowed wherever a JSON string has room for that number of characters. There the library
# checks only the other tokens. Near the end of a string with a maxLength only the short classes fit: without them, a
# mask takes ten times as long there.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 5, 6, 8, 11, 16, 30)]
_SLICES.append(r'[^"\\\x00-\x1F\x7F]+')


def grammar_threads(num_processes: int = 1) -> int:
    """Return the number of threads that compute masks in each of `num_processes` processes of a host."""
    return min(_MAX_THREADS, max(1, (os.cpu_count() or 1) * 3 // 4 // num_processes))


class GrammarCompiler:
    """A compiler of grammars, which threads may share. `tokenizer`: a fast tokenizer of transformers. `num_threads`:
    the number of threads that compute masks."""

    def __init__(
        self,
        tokenizer: Any,
        num_threads: int | None = None,
        *,
        max_seconds: float | None = _MAX_SECONDS,
        max_automata: int = _MAX_AUTOMATA,
        max_levels: int = MAX_LEVELS,
    ) -> None:
        """`max_seconds`: the longest time of a compilation, and of an automaton; None: there is no limit.
        `max_automata`: the number of grammars that get automata, with which the device follows them. `max_levels`: see
        `schema_automaton`."""
        self._max_automata, self._max_levels = max_automata, max_levels
        self._hf_tokenizer = tokenizer
        self._max_seconds = math.inf if max_seconds is None else max_seconds
        self._is_ending = threading.Event()
        self._num_threads = num_threads or grammar_threads()
        self._threads: Threads | None = None  # made for the first grammar, like the tokenizer
        self._tokenizer: Any = None  # llguidance's tokenizer, which takes a third of a second to make
        self._of_bytes: Any = None  # a tokenizer of llguidance's whose tokens are bytes
        self._vocabulary: TokenBytes | None = None
        self._leaves, self._num_automata = Leaves(), 0
        self._compiled: OrderedDict[Constraint, _Grammar | RowError] = OrderedDict()
        self._num_copies = self._num_chars = 0  # They count what is kept.
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint, *, on_host: bool = False) -> Matcher:
        """Return a matcher at the beginning of a text. It raises RowError if the constraint cannot be compiled, or not
        within `max_seconds`. `on_host`: the host follows the output, even if there is an automaton."""
        with self._lock:
            grammar = self._compiled.get(constraint)
        if grammar is None:  # the lock is free while this compiles, so that other threads get their matchers
            grammar = self._compiled_or_error(constraint)
            if self._is_ending.is_set():
                raise _refused(constraint, "the job is ending")
        with self._lock:
            kept = self._compiled.pop(constraint, None)
            self._count(constraint, kept, -1)
            kept = kept or grammar
            try:
                if isinstance(kept, RowError):
                    raise kept
                return kept.matcher(on_host=on_host)
            finally:
                self._compiled[constraint] = kept
                self._count(constraint, kept, 1)
                while len(self._compiled) > 1 and (
                    self._num_copies > _MAX_COMPILED or self._num_chars > _MAX_KEPT_CHARS
                ):
                    self._count(*self._compiled.popitem(last=False), -1)

    def _count(self, constraint: Constraint, grammar: _Grammar | RowError | None, times: int) -> None:
        copies = grammar.num_copies if isinstance(grammar, _Grammar) else int(grammar is not None)
        self._num_copies += times * copies
        self._num_chars += times * copies * len(constraint.text)

    def close(self) -> None:
        """Stop waiting for grammars: `matcher` raises RowError for those that are being compiled."""
        self._is_ending.set()

    def _compiled_or_error(self, constraint: Constraint) -> _Grammar | RowError:
        """Compile a constraint, or return the error. An error is kept, too: another row may have the same constraint,
        and it can take long to find the error."""
        try:
            return self._compile(constraint)
        except RowError as exc:
            return exc
        except Abandoned:
            return _refused(constraint, f"to compile it takes longer than {self._max_seconds:g} seconds")
        except (MemoryError, RuntimeError) as exc:  # no memory, or no memory for another thread
            return _refused(constraint, f"to compile it failed: {exc or type(exc).__name__}")

    def _compile(self, constraint: Constraint) -> _Grammar:
        if (size := len(constraint.text)) > (most := _MAX_CHARS[constraint.kind]):
            raise _refused(constraint, f"it has {size:,} characters, and {most:,} can be compiled")
        with self._lock:
            if self._tokenizer is None or self._threads is None:
                self._tokenizer = self._wrap(constraint)
                executor = llguidance.LLExecutor(self._num_threads)
                self._threads = Threads(executor, self._num_threads, self._tokenizer.eos_token)
                self._of_bytes, self._vocabulary = llguidance.LLTokenizer("byte"), TokenBytes(self._tokenizer)
            threads, tokenizer = self._threads, self._tokenizer
        options: Any = ONE_LINE
        make = {
            "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options),
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "grammar": lambda text: llguidance.grammar_from("grammar", text),
        }[constraint.kind]
        limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=_MAX_ITEMS_IN_STEP)
        try:
            text = self._on_thread(lambda: make(constraint.text))
            made = partial(llguidance.LLMatcher, tokenizer, text, log_level=0, limits=limits)
            grammar = _Grammar(lambda: self._on_thread(made), tokenizer, threads)
        except ValueError as exc:
            raise _refused(constraint, str(exc)) from exc
        if grammar.error:
            raise _refused(constraint, grammar.error)
        start = grammar.matcher()
        if not start.mask().any() and not start.is_complete():
            problem = start.failure(None)
            raise _refused(constraint, "no text matches it" if problem is None or problem == DEAD_END else problem)
        try:
            work = DeepThread(lambda: self._automaton(constraint, text, made()))
            grammar.automaton = work.result(self._max_seconds, self._is_ending)
        except NotRegularError as exc:
            grammar.automaton = str(exc)
        except (Abandoned, RecursionError):
            grammar.automaton = "its automaton takes long to make"
        except Exception as exc:  # The host can follow the grammar, so an error here ends neither the job nor the row.
            grammar.automaton = f"its automaton cannot be made: {type(exc).__name__}"
        return grammar

    def _automaton(self, constraint: Constraint, text: str, compiled: Any) -> TokenAutomaton:
        """Return the automaton of a grammar. It raises NotRegularError if it has none. `text`, `compiled`: llguidance's
        grammar."""
        with self._lock:
            self._num_automata += 1
            if self._num_automata > self._max_automata:
                raise NotRegularError(f"the job has more than {self._max_automata} grammars")
        if len(constraint.text) > _MAX_AUTOMATON_CHARS:
            raise NotRegularError(f"it has more than {_MAX_AUTOMATON_CHARS:,} characters")
        if constraint.kind == "json_schema":
            automaton = schema_automaton(constraint.text, self._leaves, self._max_levels)
        elif constraint.kind == "regex":
            automaton = _regex_automaton(constraint.text)
        else:
            raise NotRegularError("it is not a schema, a regex or a choice")
        check(automaton, llguidance.LLMatcher(self._of_bytes, text, log_level=0))
        assert self._vocabulary is not None
        return with_tokens(automaton, compiled, self._vocabulary)

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        return DeepThread(work).result(self._max_seconds, self._is_ending)

    def _wrap(self, constraint: Constraint) -> Any:
        backend = getattr(self._hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _refused(constraint, "the model's tokenizer is not a fast one")
        copy = type(backend).from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        end = self._hf_tokenizer.eos_token_id
        if not isinstance(end, int):  # the library needs an end token, so it gets one that the model does not have
            copy.add_special_tokens([_NO_TOKEN])
            end = copy.token_to_id(_NO_TOKEN)
        try:
            return llguidance.LLTokenizer(copy.to_str(), eos_token=end, slices=_SLICES)
        except ValueError as exc:
            raise _refused(constraint, f"the model's tokenizer cannot be used: {exc}") from exc


class _Grammar:
    """A grammar that is compiled more than once, so that threads can compute its masks at the same time. The library's
    copies of a matcher share one lexer, whose lock is held while a mask is computed: requests with the same schema
    would wait for each other."""

    def __init__(self, compile_: Callable[[], Any], tokenizer: Any, threads: Threads) -> None:
        began = time.perf_counter()
        self._compile = compile_
        self._vocab_size = tokenizer.vocab_size
        self._threads = threads
        self._copies = [compile_()]
        self._users: list[weakref.WeakSet[Matcher]] = [weakref.WeakSet()]  # the matchers of each copy
        self._max_copies = min(threads.count, 1 + int(_MAX_COPY_SECONDS / (time.perf_counter() - began)))
        # The automaton that the device can follow, or the reason why there is none.
        self.automaton: TokenAutomaton | str = ""
        self.error: str = self._copies[0].get_error() if self._copies[0].is_error() else ""

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def matcher(self, *, on_host: bool = False) -> Matcher:
        """Return a matcher of the copy that the fewest matchers use. `on_host`: see `GrammarCompiler.matcher`."""
        counts = [len(users) for users in self._users]
        index = counts.index(min(counts))
        needs_masks = on_host or isinstance(self.automaton, str)
        if needs_masks and counts[index] >= _USERS_OF_COPY and len(counts) < self._max_copies:
            try:
                self._copies.append(self._compile())
                self._users.append(weakref.WeakSet())
                index = len(counts)
            except (Abandoned, MemoryError, RuntimeError):  # the copies that exist are enough
                self._max_copies = len(counts)
        matcher = Matcher(self._copies[index], self._vocab_size, self._threads, self.automaton)
        self._users[index].add(matcher)
        return matcher


def _regex_automaton(regex: str) -> Automaton:
    builder = AutomatonBuilder()
    start = builder.state()
    end = builder.part(start, characters.to_bytes(characters.of_regex(regex), quoted=False))
    builder.skip(end, builder.end)
    return builder.build(start)


def _refused(constraint: Constraint, problem: str) -> RowError:
    # The first lines of a long error say what is wrong, and the others repeat the grammar. The error of a regex says it
    # in its last lines.
    problem = problem.rsplit("\nerror: ", 1)[-1].split("\n", 1)[0] if constraint.kind == "regex" else problem
    return RowError("invalid_value", f"{constraint.option} cannot be used: {first_words(problem)}")


@dataclass(frozen=True, slots=True)
class MatcherSpec:
    """The specification of a matcher. It is small, and other processes can make the same matcher from it. `reasoning`:
    the tokens of the reasoning before the constraint's text; None: there is no reasoning."""

    constraint: Constraint
    reasoning: Reasoning | None = None

    def make(self, compiler: GrammarCompiler) -> GrammarMatcher:
        """Make a matcher at the beginning of an output. It raises RowError for a constraint that cannot be compiled."""
        answer = compiler.matcher(self.constraint, on_host=self.reasoning is not None)
        return answer if self.reasoning is None else AfterReasoning(answer, *self.reasoning)
