"""What can be chosen: a shape of neural drafts, or the three numbers of prompt lookup. None is plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.draft.shape import DraftShape
from specbatch.tune.errors import TuningError


@dataclass(frozen=True, slots=True)
class NgramShape:
    """Prompt lookup: nodes verified (root included), shortest and longest suffix to look up, in tokens."""

    num_draft_tokens: int
    min_match: int
    max_match: int

    def __str__(self) -> str:
        return f"{self.num_draft_tokens} ({self.min_match}-{self.max_match})"

    def check(self) -> None:
        """Raises TuningError for numbers that no engine takes."""
        if self.num_draft_tokens < 2:
            raise TuningError(f"prompt lookup needs at least 2 num_draft_tokens, got {self.num_draft_tokens}")
        if not 1 <= self.min_match <= self.max_match:
            raise TuningError(f"min_match {self.min_match} and max_match {self.max_match} are no range from 1 on")


Candidate = DraftShape | NgramShape


def label(candidate: Candidate | None) -> str:
    """As tables show it: num_steps/topk/num_draft_tokens, num_draft_tokens (min_match-max_match), or `plain`."""
    return "plain" if candidate is None else str(candidate)


def num_nodes(candidate: Candidate | None) -> int:
    """Tokens of a row that a round verifies, the root among them."""
    return 1 if candidate is None else candidate.num_draft_tokens


def num_steps(candidate: Candidate | None) -> int:
    """Longest path of drafts."""
    if candidate is None:
        return 0
    return candidate.num_steps if isinstance(candidate, DraftShape) else candidate.num_draft_tokens - 1


def max_path(candidate: Candidate | None) -> int:
    """Most tokens that a round commits: the longest path of the tree, the root counted."""
    return min(num_steps(candidate) + 1, num_nodes(candidate))


def lookahead(candidate: Candidate | None, draft_kv_offset: int) -> int:
    """Cache slots past the committed ones that a round may write; `lead` as in `speculation.neural.num_lookahead`, the
    same rule: 1 for a draft model, 0 for a draft head."""
    if candidate is None:
        return 1 + draft_kv_offset
    if isinstance(candidate, NgramShape):
        return candidate.num_draft_tokens
    return max(
        candidate.num_draft_tokens + draft_kv_offset, draft_kv_offset + candidate.topk * (candidate.num_steps - 1)
    )
