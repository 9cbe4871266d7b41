"""Log-probabilities of tokens, as completions have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:  # commands that run no rows do not import numpy
    import numpy as np
    from numpy.typing import NDArray

LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks; the value is OpenAI's


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of the target model, from its raw logits before edits, temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(slots=True, repr=False, eq=False)
class TokenLogprobs(Sequence[TokenLogprob]):
    """A sequence of `TokenLogprob`, each with k likely tokens. It is kept in columns, because objects for each token
    took the host longer than all its other work for the token."""

    token_ids: list[int]  # n
    values: NDArray[np.float64]  # (n, 1 + k): the value of each token, then those of its k likely tokens
    top_ids: NDArray[np.int32]  # (n, k)

    @classmethod
    def of(cls, tokens: Iterable[TokenLogprob]) -> TokenLogprobs:
        import numpy as np  # imported here, because commands that run no rows do not need it

        found = list(tokens)
        k = len(found[0].top) if found else 0
        values = np.array([(own, *(other for _, other in top)) for _, own, top in found], dtype=np.float64)
        top_ids = np.array([[other for other, _ in one.top] for one in found], dtype=np.int32)
        return cls([one.token_id for one in found], values.reshape(-1, 1 + k), top_ids.reshape(len(found), k))

    @property
    def num_top(self) -> int:
        """k: the number of likely tokens of each token."""
        return int(self.top_ids.shape[1])

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprob]:
        for token, (own, *others), top_ids in zip(
            self.token_ids, self.values.tolist(), self.top_ids.tolist(), strict=True
        ):
            yield TokenLogprob(token, own, tuple(zip(top_ids, others, strict=True)))

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenLogprobs) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"TokenLogprobs.of({list(self)})"
