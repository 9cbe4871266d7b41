"""What random numbers decide. They depend on nothing but what they are for: Philox4x32-10 (Salmon et al., SC 2011),
counter based, see `kernels.torch.sampling.uniform`.

Key: the 64-bit seed. Counter: token position, kind of draw and sample number, stream low, stream high (`RngKey`). So a
draw does not depend on the batch, the schedule, a preemption or a restart.
"""

from __future__ import annotations

from enum import IntEnum


class Draw(IntEnum):
    """What a draw decides about the token at its position. All draws are independent."""

    SAMPLE = 0  # the token itself, drawn from the target's distribution; and coupled drafts, see `draft.chain`
    DRAFT = 1  # the token that the draft network drafts
    ACCEPT = 2  # whether this draft is accepted
    RESIDUAL = 3  # the token instead of a rejected draft
