"""The interface of a grammar's matcher, which knows the tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # commands that run no rows do not import numpy
    import numpy as np
    from numpy.typing import NDArray


class Vocabulary(Protocol):
    """The bytes of tokens; those of no text have none."""

    texts: list[bytes]


class FollowedAutomaton(Protocol):
    """An automaton as the engine reads it (see `grammar.token_automaton`). State 0 is dead, and 1 is the start.
    After the states `leaves_Q` the host follows the output. Shape
    suffixes: Q states, K classes of bytes, B bytes."""

    @property
    def next_QK(self) -> NDArray[np.int32]: ...
    @property
    def classes_B(self) -> NDArray[np.uint8]: ...
    @property
    def accepts_Q(self) -> NDArray[np.bool_]: ...
    @property
    def forced_Q(self) -> NDArray[np.int32]: ...
    @property
    def leaves_Q(self) -> NDArray[np.bool_]: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def state_after(self, tokens: Sequence[int]) -> int: ...
    def __len__(self) -> int: ...


class GrammarMatcher(Protocol):
    """The position of a request's output in its grammar. A new matcher is before the first token. What it returns
    depends on the accepted tokens alone, and not on the calls that led to them."""

    @property
    def automaton(self) -> FollowedAutomaton | str:
        """The automaton with which the device follows the output; a text says why there is none."""
        ...

    @property
    def end(self) -> int:
        """The token that ends a text in the tokenizer."""
        ...

    def advance(self, token: int) -> bool:
        """Advance by one token, if the grammar allows it. Return whether it did."""
        ...

    def advance_by(self, tokens: Sequence[int]) -> int:
        """Advance by these tokens as far as the grammar allows. Return the number of accepted tokens."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether `advance` would accept the token."""
        ...

    def back(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        ...

    def only_token(self) -> int | None:
        """Return the only token that `mask` can have, if there is one. The mask then has this token, or none if the
        token may not come. Return None if `mask` has the tokens that `allows` accepts. A negative result says that only
        `mask` shows the tokens. This costs less than `mask`."""
        ...

    def fork(self) -> Any:
        """Return an independent matcher at the same position."""
        ...

    def is_complete(self) -> bool:
        """Return whether the output may end here."""
        ...

    def failure(self, token: int | None) -> str | None:
        """Return the error that keeps the output from going on here (with `token`, if it is given), such as a limit of
        the library. Return None if there is no error. A token that the grammar forbids is no error."""
        ...

    def may_be_forced(self) -> bool:
        """Return False if more than one token may come next, or if the output is complete. This costs much less than
        `mask`."""
        ...

    def forced_tokens(self, most: int) -> list[int]:
        """Return the only token of `mask`, if the output is not complete, and after it at most `most` - 1 likely tokens
        that may follow. The list is empty if several tokens may come, or none, or if only `mask` shows them. This costs
        less than `mask`."""
        ...

    @property
    def num_words(self) -> int:
        """The number of words of a mask. Tokens past the last word may not come."""
        ...

    def mask(self) -> NDArray[np.int32]:
        """Return the mask of the tokens that may come next: token t may come if bit t % 32 of word t // 32 is set. Bits
        of end-of-sequence tokens and of `end` have no meaning, see `is_complete`."""
        ...

    def write_masks(self, walks: Sequence[Walk], masks_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Write the masks of these walks to their lines; threads may compute them. The walks' matchers have the same
        type as this one. Masks get the width of `masks_KW`. Return `is_complete` for these lines, (K,)."""
        ...


class Walk(NamedTuple):
    """A request for masks of a matcher: one at its position, and one after each of `tokens`, which may come in this
    order. The matcher itself does not move, and it is in no other walk of a call. `line`: the line of the first mask;
    the others follow it."""

    matcher: Any
    tokens: Sequence[int]
    line: int
