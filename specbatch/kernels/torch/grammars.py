"""Grammars on the device, in plain torch: automata follow the nodes of draft trees, and forbid tokens.

Shape suffixes: B requests, N tree nodes, T computed tokens, V vocabulary, W words of a mask, K end tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import BROKEN, DEAD, FREE, MAX_STOP_IDS, Field, GrammarBuffers, TrieLevel


def follow_trees(
    tokens_BN: Tensor,
    req_idx_B: Tensor,
    grammars: GrammarBuffers,
    num_nodes_B: Tensor | None = None,
    parents_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Follow the tokens of draft trees in the automata of their requests, and put in forced tokens.

    After a node whose state forces a token, its first child gets that token, unless a child has it. A chain with
    `num_nodes_B` nodes ends before its first forbidden token; otherwise it is made longer by forced tokens, as far as
    it has room. Return the tokens, the numbers of nodes
    and the states (B, N) int32. The state of a node whose token is forbidden is DEAD.
    """
    batch, num_nodes = tokens_BN.shape
    tokens_BN, automata_B = tokens_BN.clone(), grammars.automata_S[req_idx_B]
    counts_B = None if num_nodes_B is None else num_nodes_B.clone()
    states_BN = torch.zeros((batch, num_nodes), dtype=torch.int32, device=tokens_BN.device)
    states_BN[:, 0] = grammars.states_S[req_idx_B]
    has_child_BN = torch.zeros_like(states_BN, dtype=torch.bool)
    for node in range(1, num_nodes):
        parent_B = torch.full_like(automata_B, node - 1).long() if parents_BN is None else parents_BN[:, node]
        is_real_B = parent_B >= 0
        index_B1 = parent_B.clamp(min=0)[:, None]
        before_B = torch.where(is_real_B, states_BN.gather(1, index_B1)[:, 0], FREE)
        forced_B = grammars.forced_Q[before_B.long()].long()
        takes_B = is_real_B & (forced_B >= 0) & ~has_child_BN.gather(1, index_B1)[:, 0]
        if parents_BN is not None:  # siblings have different tokens
            takes_B &= ~((parents_BN == parent_B[:, None]) & (tokens_BN == forced_B[:, None])).any(dim=1)
        has_child_BN.scatter_(1, index_B1, has_child_BN.gather(1, index_B1) | is_real_B[:, None])
        tokens_BN[:, node] = torch.where(takes_B, forced_B, tokens_BN[:, node])
        if counts_B is not None and parents_BN is None:
            counts_B += takes_B & (counts_B == node)
            is_real_B = is_real_B & (node < counts_B)
            if is_real_B.device.type == "cpu" and not is_real_B.any():
                break  # Nor is any later node.
        after_B = torch.where(is_real_B, _after(before_B, automata_B, tokens_BN[:, node], grammars), FREE)
        states_BN[:, node] = after_B
        if counts_B is not None and parents_BN is None:
            counts_B = torch.where(after_B == DEAD, node, counts_B)
    return tokens_BN, counts_B, states_BN


def _after(state_B: Tensor, automata_B: Tensor, token_B: Tensor, grammars: GrammarBuffers) -> Tensor:
    """Return the states after tokens."""
    token_B = token_B.long()
    is_token_B = (token_B >= 0) & (token_B < len(grammars.starts_V) - 1)
    index_B = torch.where(is_token_B, token_B, 0)
    start_B, end_B = grammars.starts_V[index_B].long(), grammars.starts_V[index_B + 1].long()
    length_B = torch.where(is_token_B, end_B - start_B, 0)
    found_B, last = state_B, len(grammars.bytes_F) - 1
    # Only a CPU is read, so that a CUDA graph can hold this.
    most = grammars.max_token_bytes if length_B.device.type != "cpu" else int(length_B.max())
    for i in range(most):
        byte_B = grammars.bytes_F[(start_B + i).clamp(max=last)].long()
        class_B = grammars.classes_GB[automata_B.long(), byte_B].long()
        found_B = torch.where(i < length_B, grammars.next_QK[found_B.long(), class_B], found_B)
    return torch.where((length_B == 0) & (state_B != FREE), DEAD, found_B)


def advance_states(
    req_idx_B: Tensor,
    is_live_B: Tensor,
    states_BN: Tensor,
    tokens_BM: Tensor,
    ints_SF: Tensor,
    grammars: GrammarBuffers,
    path_BM: Tensor | None = None,
    num_path_B: Tensor | None = None,
) -> None:
    """Write the states of live requests after they have committed tokens. `states_BN`: the states of nodes, see
    `follow_trees`. `path_BM`: the nodes before each of the committed tokens, of which a request has `num_path_B`; None:
    the root is before the only token. A state that no text leads on from becomes BROKEN. A request that leaves its
    automaton is marked done."""
    state_B, token_B = states_BN[:, 0], tokens_BM[:, 0]
    if path_BM is not None and num_path_B is not None:
        last_B1 = num_path_B[:, None] - 1
        state_B = states_BN.gather(1, path_BM.gather(1, last_B1))[:, 0]
        token_B = tokens_BM.gather(1, last_B1)[:, 0]
    after_B = _after(state_B, grammars.automata_S[req_idx_B], token_B, grammars)
    after_B = torch.where(after_B == DEAD, BROKEN, after_B)
    grammars.states_S[req_idx_B] = torch.where(is_live_B, after_B, grammars.states_S[req_idx_B])
    leaves_B = is_live_B & grammars.leaves_Q[after_B.long()]
    ints_SF[req_idx_B, Field.DONE] = torch.where(leaves_B, 1, ints_SF[req_idx_B, Field.DONE])


def forbid_by_states(
    logits_TV: Tensor, states_T: Tensor, req_idx_T: Tensor, ints_SF: Tensor, grammars: GrammarBuffers
) -> None:
    """Set the logits of tokens that may not come after these states to -inf, in place. Where a text may end, the tokens
    `eos_K` and the stop tokens of the request may come. FREE and DEAD forbid nothing, because DEAD is never reached,
    and neither do states after which a request leaves its automaton."""
    vocab = logits_TV.shape[1]
    if logits_TV.device.type != "cpu":
        _forbid_all(logits_TV, states_T, req_idx_T, ints_SF, grammars)
        return
    for row, (state, line) in enumerate(zip(states_T.tolist(), req_idx_T.tolist(), strict=True)):
        if state <= DEAD or grammars.leaves_Q[state]:
            continue
        if (token := int(grammars.forced_Q[state])) >= 0:
            is_legal_V = torch.zeros(vocab, dtype=torch.bool, device=logits_TV.device)
            is_legal_V[token] = True
        else:
            words_W = _mask(state, int(grammars.automata_S[line]), grammars)
            bits = torch.arange(32, dtype=torch.int32, device=logits_TV.device)
            is_legal_V = ((words_W[:, None] >> bits) & 1).bool().flatten()[:vocab]
        if grammars.accepts_Q[state]:
            ends = torch.cat((grammars.eos_K, ints_SF[line, Field.STOP : Field.STOP + MAX_STOP_IDS]))
            is_legal_V[ends[(ends >= 0) & (ends < vocab)]] = True
        logits_TV[row].masked_fill_(~is_legal_V, -torch.inf)


def _forbid_all(
    logits_TV: Tensor, states_T: Tensor, req_idx_T: Tensor, ints_SF: Tensor, grammars: GrammarBuffers
) -> None:
    """Do what `forbid_by_states` does. The host reads nothing, so that a CUDA graph can hold this."""
    count, vocab = logits_TV.shape
    tokens_V = torch.arange(vocab, device=logits_TV.device)
    automata_T = grammars.automata_S[req_idx_T]
    after_X = _after(
        states_T.repeat_interleave(vocab), automata_T.repeat_interleave(vocab), tokens_V.repeat(count), grammars
    )
    forced_T1 = grammars.forced_Q[states_T.long()][:, None]
    is_legal_TV = torch.where(forced_T1 >= 0, tokens_V == forced_T1, after_X.view(count, vocab) > DEAD)
    ends_TE = ints_SF[req_idx_T, Field.STOP : Field.STOP + MAX_STOP_IDS]
    is_end_TV = (ends_TE[:, :, None] == tokens_V).any(dim=1) | (grammars.eos_K[:, None] == tokens_V).any(dim=0)
    is_legal_TV |= is_end_TV & grammars.accepts_Q[states_T.long()][:, None]
    is_legal_TV |= ((states_T <= DEAD) | grammars.leaves_Q[states_T.long()])[:, None]
    logits_TV.masked_fill_(~is_legal_TV, -torch.inf)


def _mask(state: int, automaton: int, grammars: GrammarBuffers) -> Tensor:
    """Return the mask of a state, which is computed if it is not kept."""
    index = state % len(grammars.owners_C)
    if int(grammars.owners_C[index]) != state:
        num_words = grammars.masks_CW.shape[1]
        is_legal_V = _legal_tokens(state, automaton, grammars, 32 * num_words)
        shifts = torch.arange(32, device=is_legal_V.device)
        words = (is_legal_V.view(num_words, 32).long() << shifts).sum(dim=1)
        grammars.masks_CW[index] = torch.where(words >= 2**31, words - 2**32, words).int()
        grammars.owners_C[index] = state
    return grammars.masks_CW[index]


def _legal_tokens(state: int, automaton: int, grammars: GrammarBuffers, size: int) -> Tensor:
    """(size,) bool: whether the bytes of each token lead on from a state. It runs on a CPU."""
    if grammars.trie is None:
        grammars.trie = _trie(grammars)
    next_X, classes_B = grammars.next_QK.numpy().ravel(), grammars.classes_GB[automaton].numpy()
    num_classes = grammars.next_QK.shape[1]
    is_legal = np.zeros(size, dtype=np.bool_)
    states = np.array([state])
    for level in grammars.trie:
        states = next_X.take(states.take(level.parents_N) * num_classes + classes_B.take(level.bytes_N))
        leads_on = states > DEAD
        is_legal[level.tokens_E] = leads_on.take(level.ends_E)
        if not leads_on.any():
            break
    return torch.from_numpy(is_legal)


def _trie(grammars: GrammarBuffers) -> list[TrieLevel]:
    """Return the tree of all tokens' bytes, by depth."""
    starts_V, bytes_F = grammars.starts_V.numpy().astype(np.int64), grammars.bytes_F.numpy()
    token = np.flatnonzero(starts_V[1:] > starts_V[:-1])
    at, end, node = starts_V[token], starts_V[token + 1], np.zeros(len(token), dtype=np.int64)
    levels = []
    while len(token):
        found, node = np.unique(256 * node + bytes_F[at], return_inverse=True)
        at = at + 1
        ends = at == end
        levels.append(TrieLevel(found >> 8, (found & 255).astype(np.uint8), token[ends], node[ends]))
        token, at, end, node = token[~ends], at[~ends], end[~ends], node[~ends]
    return levels
