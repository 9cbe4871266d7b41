"""The gated delta rule: the tensors that its kernels read and write.

A layer with a Gated DeltaNet (Yang et al. 2024) has a *state* for each value head: a matrix S that maps keys to values.
A token with key k, value v, decay g and rate beta changes it:

    S <- exp(g) S + beta (v - exp(g) S k) k^T,    output: S q

q, k and v come from a short causal convolution over the tokens' projections, so that the state of a request also has
its last inputs. In prompts all tokens stay, and the state moves over them. In rounds it is not known yet which nodes
stay. So a round only keeps what they put into the layer, and the next one begins with a *replay*: it applies those that
were accepted. The state is read and written once a round, for any number of nodes.

Shape suffixes: T packed tokens, S lines, H value heads, V and K dimensions of value and key heads, C channels of the
convolution, W inputs of the convolution, R inputs that are kept, P parts of a state.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHUNK = 16  # tokens of a prompt that are computed at once on CUDA: the smallest tile of tensor cores
PART = 8  # value dimensions of a head's part, which one program of a round computes


def parts_of_head(value_dim: int) -> int:
    """Return the number of parts of a head's state."""
    return -(-value_dim // PART)


class DeltaWeights(NamedTuple):
    """The weights of a layer between its projections. Floats are float32 at least."""

    conv_CW: Tensor  # The last input is that of the token itself. The dtype is the model's.
    decay_H: Tensor  # A token's decay g is this negative number, multiplied by softplus of its gate.
    bias_H: Tensor  # is added to the gates of the decay
    num_key_heads: int

    @property
    def num_heads(self) -> int:
        return self.decay_H.shape[0]


class LayerStates(NamedTuple):
    """The states of one layer: a line for each request index, one for padding, and one for each checkpoint.

    Line s covers the first `lengths_SP[s]` tokens of its sequence. The input of the token at position p is at p % R. An
    input is there if p is one of the W - 1 positions before that length, or a node of the last round.
    """

    states_SHVK: Tensor  # float32 at least
    inputs_SRC: Tensor  # inputs of the convolution; the dtype is the model's
    gates_SR2H: Tensor  # the rate's gate of each value head, then the decay's gate of each; the dtype is the model's
    lengths_SP: Tensor  # int32; the same number for all parts, each of which is written by one program
