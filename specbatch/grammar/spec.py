"""What a matcher is made of: small, and other processes can make the same one of it."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.reasoning import AfterReasoning, Reasoning
from specbatch.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class MatcherSpec:
    """`reasoning`: what comes before the text of the constraint; None: nothing does."""

    constraint: Constraint
    reasoning: Reasoning | None = None

    def make(self, compiler: GrammarCompiler) -> GrammarMatcher:
        """At the beginning of an output. Raises RowError for a constraint that cannot be compiled."""
        answer = compiler.matcher(self.constraint)
        return answer if self.reasoning is None else AfterReasoning(answer, *self.reasoning)
