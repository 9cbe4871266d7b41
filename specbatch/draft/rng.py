"""The kinds of random draws. The generator is Philox4x32-10, which is counter based (Salmon et al., SC 2011); see
`kernels.torch.sampling.uniform`.

Key: the 64-bit seed. Counter: token position, kind of draw and sample number, stream low, stream high (`RngKey`). So a
draw does not depend on the batch, the schedule, a preemption or a restart.
"""

from __future__ import annotations

from enum import IntEnum


class Draw(IntEnum):
    """The decision that a draw makes about the token at its position. All draws are independent."""

    SAMPLE = 0  # draws the token from the target's distribution, and coupled drafts, see `draft.chain`
    DRAFT = 1  # draws the token that the draft network drafts; `draft.chain` says how chains with scores are keyed
    ACCEPT = 2  # accepts or rejects a draft
    RESIDUAL = 3  # draws the token that replaces a rejected draft
