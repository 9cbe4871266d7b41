"""What a grammar says about the next tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # commands that run no rows do without numpy
    import numpy as np
    from numpy.typing import NDArray


class GrammarMatcher(Protocol):
    """Where the output of a request is in its grammar; at first before its first token. What it returns depends on the
    tokens alone, however they were reached."""

    def advance(self, token: int) -> bool:
        """Go one token further, if the grammar allows it. Returns whether it did."""
        ...

    def advance_by(self, tokens: Sequence[int]) -> int:
        """Go as far as the grammar allows these tokens. Returns how many it did."""
        ...

    def allows(self, token: int) -> bool:
        """Whether `advance` would go on."""
        ...

    def back(self, num_tokens: int) -> None: ...

    def only_token(self) -> int | None:
        """None: `mask` has the tokens that `allows` takes. Else it has this one, if that may come, and no other; below
        0: only the mask shows what it has. It costs less than that."""
        ...

    def fork(self) -> Any:
        """A matcher at the same place, which goes on by itself."""
        ...

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        ...

    def failure(self, token: int | None) -> str | None:
        """The error that keeps the output from going on here (with `token`, if it is given), such as a limit of the
        library. None: there is none; a token that the grammar forbids is none."""
        ...

    def may_be_forced(self) -> bool:
        """False: more than one token may come next, or the output is complete. It costs much less than `mask`."""
        ...

    def forced_tokens(self, most: int) -> list[int]:
        """The only token of `mask`, where the output is not complete, and at most `most` - 1 likely ones that may come
        after it. Empty: more may come, or none, or only the mask shows it. It costs less than that."""
        ...

    @property
    def num_words(self) -> int:
        """Of a mask. Tokens past the last word may not come."""
        ...

    def mask(self) -> NDArray[np.int32]:
        """Which tokens may come next: token t if bit t % 32 of word t // 32 is set. Bits of end-of-sequence tokens
        mean nothing, see `is_complete`."""
        ...

    def write_masks(self, walks: Sequence[Walk], masks_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The masks of these, of the same kind as this one, to their lines; threads may compute them. Masks get the
        width of `masks_KW`. Returns (K,) `is_complete` for these lines."""
        ...


class Walk(NamedTuple):
    """Masks of a matcher: of its place, and of the places after each of `tokens`, which may come in turn. The matcher
    itself does not move, and it is in no other walk of a call. `line`: of the first mask; the others follow it."""

    matcher: Any
    tokens: Sequence[int]
    line: int
