"""Grammars of llguidance (github.com/guidance-ai/llguidance), for one tokenizer. Nothing else imports it.

JSON is written on one line, with one space after `,` and `:`, as `json.dumps` does: a small model that may write spaces
can write them without end. A schema's `x-guidance` changes that, as llguidance describes it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.errors import RowError
from specbatch.grammar.constraint import ONE_LINE, Constraint
from specbatch.grammar.masks import only_token

_MAX_COMPILED = 1024  # grammars that are kept; one takes about 50 KB
_MAX_THREADS = 16  # that compute masks
_NO_TOKEN = "<|specbatch: no token ends a text|>"
# Tokens that any place with room for as many characters of a JSON string takes: the library looks at the others alone.
# A place near the end of a string with a maxLength needs the short ones, or it takes ten times as long as others.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 5, 6, 8, 11, 16, 30)]
_SLICES.append(r'[^"\\\x00-\x1F\x7F]+')
_PIP = "pip install 'specbatch[grammar]'"


class GrammarCompiler:
    """`tokenizer`: of transformers, a fast one. Threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._hf_tokenizer = tokenizer
        self._executor: Any = None  # of llguidance, as the next one
        self._tokenizer: Any = None  # llguidance's, made for the first grammar: it takes a third of a second
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """At the beginning of a text. Raises RowError for what cannot be compiled."""
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compile(constraint)
                self._compiled[constraint] = compiled
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(constraint)
        return Matcher(compiled, self._tokenizer.vocab_size, self._executor)

    def _compile(self, constraint: Constraint) -> Any:
        llguidance = _library(constraint)
        if self._tokenizer is None:
            self._tokenizer = self._wrap(constraint)
            self._executor = llguidance.LLExecutor(min(_MAX_THREADS, max(1, (os.cpu_count() or 1) * 3 // 4)))
        make = {
            "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE),
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "grammar": lambda text: llguidance.grammar_from("grammar", text),
        }[constraint.kind]
        try:
            compiled = llguidance.LLMatcher(self._tokenizer, make(constraint.text), log_level=0)
        except ValueError as exc:
            raise _refused(constraint, str(exc)) from exc
        if compiled.is_error():
            raise _refused(constraint, compiled.get_error())
        start = Matcher(compiled, self._tokenizer.vocab_size, self._executor)
        if not start.mask().any() and not start.is_complete():
            raise _refused(constraint, "no text matches it")
        return compiled

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
            return _library(constraint).LLTokenizer(copy.to_str(), eos_token=end, slices=_SLICES)
        except ValueError as exc:
            raise _refused(constraint, f"the model's tokenizer cannot be used: {exc}") from exc


class Matcher:
    """See `types.GrammarMatcher`."""

    def __init__(self, compiled: Any, vocab_size: int, executor: Any) -> None:
        """`executor`: threads of llguidance."""
        self._compiled = compiled
        self._executor = executor
        self._tokens: list[int] = []
        self._vocab_size = vocab_size
        self._start()

    def advance(self, token: int) -> bool:
        return self.advance_by([token]) == 1

    def advance_by(self, tokens: Sequence[int]) -> int:
        if not tokens or self._matcher.is_stopped():
            return 0
        if max(tokens) >= self._vocab_size:
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token >= self._vocab_size)]
        count: int = self._matcher.try_consume_tokens(list(tokens))
        self._tokens += tokens[:count]
        return count

    def back(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        del self._tokens[-num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):
            self._start()  # an error is never left; what came before it may go on elsewhere
            self._matcher.consume_tokens(self._tokens)

    def may_be_forced(self) -> bool:
        return bool(self._matcher.compute_ff_bytes()) or self._matcher.is_stopped()

    def forced_token(self) -> int | None:
        if self._has_ended or not self.may_be_forced():
            return None
        # The library's mask is the first of these. Where there is none, a longer token may begin with the same text.
        token = next(iter(self._matcher.compute_ff_tokens()), None)
        return token if token is not None and self._takes(token) else None

    def is_complete(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    def mask(self) -> NDArray[np.int32]:
        mask_W: NDArray[np.int32] = self.masks([self])[0]
        return mask_W

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.int32]:
        num_words = -(-self._vocab_size // 32)
        masks_BW = np.empty((len(matchers), num_words), dtype=np.int32)
        live = [(one._matcher, i) for i, one in enumerate(matchers) if not one._has_ended]
        if len(live) > 1:
            self._executor.unsafe_compute_mask_ptr(live, masks_BW.ctypes.data, 4 * num_words, len(matchers))
        elif live:
            [(matcher, i)] = live
            matcher.unsafe_compute_mask_ptr(masks_BW[i].ctypes.data, 4 * num_words)
        for one, mask_W in zip(matchers, masks_BW, strict=True):
            # Also by a limit, or an end that was found late.
            if one._has_ended or (one.may_be_forced() and not one._takes_only(mask_W)):
                mask_W[:] = 0
        return masks_BW

    def _takes_only(self, mask_W: NDArray[np.int32]) -> bool:
        """False: one token alone may come, and the library refuses it."""
        token = only_token(mask_W)
        return token is None or self._takes(token) or bool(self._matcher.is_accepting())

    def _takes(self, token: int) -> bool:
        """The library forces the text `<think>` as the token of that name, which it has as a mark and not as that text:
        it refuses that."""
        return bool(self._matcher.validate_tokens([token]) == 1)

    @property
    def _has_ended(self) -> bool:
        return bool(self._matcher.is_error() or self._matcher.is_stopped())

    def _start(self) -> None:
        self._matcher = self._compiled.deep_copy()


def _library(constraint: Constraint) -> Any:
    try:
        import llguidance
    except ImportError as exc:
        message = f"{constraint.option} needs the package llguidance: {_PIP}"
        raise RowError("unsupported_parameter", message) from exc
    return llguidance


def _refused(constraint: Constraint, problem: str) -> RowError:
    # Of a long error the first lines say what is wrong; the others repeat the grammar. That of a regex is the reverse.
    problem = problem.rsplit("\nerror: ", 1)[-1].split("\n", 1)[0] if constraint.kind == "regex" else problem
    first = " ".join(" ".join(problem.split("<state>")[0].split()).split(" ")[:40])
    return RowError("invalid_value", f"{constraint.option} cannot be used: {first}")
