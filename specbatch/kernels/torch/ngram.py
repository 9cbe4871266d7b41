"""N-gram drafts, in plain torch.

Shape suffixes as in `sampling.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_lookup(
    tokens_SL: Tensor,
    predicted_SL: Tensor,
    req_idx_B: Tensor,
    num_tokens_S: Tensor,
    num_predicted_S: Tensor,
    limit_S: Tensor,
    min_match: int,
    max_match: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft by n-grams (prompt lookup, Saxena 2023). The drafts are the continuation of the last earlier occurrence of
    the longest suffix of min_match to max_match tokens. At the end of the text they go on with the drafts themselves.
    An occurrence in the prediction comes after all occurrences in the text.

    `tokens_SL`: int32, the tokens of each request, of which the first `num_tokens_S` count. `predicted_SL`: the same of
    predictions, of which the first `num_predicted_S` count. `req_idx_B`: the request index of each sequence. `limit_S`:
    the maximum length of each text, which limits the drafts.

    Return (drafts_BD, num_drafts_B, matched_B), int64, D = num_drafts: drafts padded with 0, and none if there is no
    occurrence; the number of tokens that the suffix has, or 0.
    """
    # The text and the prediction after it.
    history = torch.cat((tokens_SL[req_idx_B], predicted_SL[req_idx_B]), dim=1)
    length_B1 = num_tokens_S[req_idx_B].long()[:, None]
    width, text_width = history.shape[1], tokens_SL.shape[1]
    predicted_end_B1 = text_width + num_predicted_S[req_idx_B].long()[:, None]
    ends = torch.arange(width, device=history.device)  # the end of an occurrence: the index of the token after it
    index = ends - text_width * (ends >= text_width)  # the same in the text, or in the prediction
    # (B, L): the number of tokens before `end` that equal the text's last ones, up to max_match.
    matched = torch.zeros_like(history, dtype=torch.int64)
    running = (ends < length_B1) | ((ends >= text_width) & (ends < predicted_end_B1))
    for back in range(1, max_match + 1):
        suffix = history.gather(1, (length_B1 - back).clamp(0, width - 1))
        before = history.roll(back, dims=1)
        running = running & (index >= back) & (length_B1 >= back) & (before == suffix)
        matched = matched + running
    best = torch.where(matched >= min_match, matched * width + ends, 0).amax(dim=1, keepdim=True)
    found_B1, start_B1 = best > 0, best % width

    drafted = torch.arange(num_drafts, device=history.device)
    last_B1 = torch.where(start_B1 < text_width, length_B1, predicted_end_B1)
    source = start_B1 + drafted % (last_B1 - start_B1).clamp(min=1)
    count_B1 = (limit_S[req_idx_B].long()[:, None] - length_B1).clamp(0, num_drafts) * found_B1
    drafts = torch.where(drafted < count_B1, history.gather(1, source.clamp(0, width - 1)).long(), 0)
    return drafts, count_B1[:, 0], (best // width)[:, 0]
