"""A round of requests with grammars whose target runs, while the host does what comes between two rounds."""

from __future__ import annotations

from typing import NamedTuple

from specbatch.engine.executor import Begun, Launched
from specbatch.engine.grammar_round import GrammarRound
from specbatch.engine.sequence import Sequence


class OpenRound(NamedTuple):
    rows: list[Sequence]
    grammar: GrammarRound
    begun: Begun

    def complete(self) -> Launched:
        """Launch the rest: check and acceptance. Where that fails, the requests are as they were before the round."""
        try:
            return self.begun.complete()
        except BaseException:
            for seq in self.rows:
                seq.num_in_flight -= self.begun.max_path
                seq.rounds_in_flight -= 1
            raise

    def that_count(self) -> list[Sequence | None]:
        """Its requests; None in place of those that had begun it with a token that their grammar refuses."""
        for seq in self.rows:
            if seq.goes_back:
                seq.num_in_flight -= self.begun.max_path
                seq.rounds_in_flight -= 1
                if not seq.is_finished:
                    seq.counts.record(0, 0, 0, 0)
        return [None if seq.goes_back else seq for seq in self.rows]
