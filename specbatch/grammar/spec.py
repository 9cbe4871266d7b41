"""The specification of a matcher. It is small, and other processes can make the same matcher from it."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.reasoning import AfterReasoning, Reasoning
from specbatch.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class MatcherSpec:
    """The specification of a matcher. `reasoning`: the tokens of the reasoning before the constraint's text; None:
    there is no reasoning."""

    constraint: Constraint
    reasoning: Reasoning | None = None

    def make(self, compiler: GrammarCompiler) -> GrammarMatcher:
        """Make a matcher at the beginning of an output. It raises RowError for a constraint that cannot be compiled."""
        answer = compiler.matcher(self.constraint)
        return answer if self.reasoning is None else AfterReasoning(answer, *self.reasoning)
