"""The rules of a request as transformers' logits processors, in vLLM's order."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specbatch.types import SamplingParams

BadWords = tuple[tuple[int, ...], ...]


class OfOutput(LogitsProcessor):  # type: ignore[misc]
    """A wrapper of another processor, which then sees the output alone."""

    def __init__(self, processor: LogitsProcessor, num_prompt: int) -> None:
        self._processor = processor
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed: Tensor = self._processor(input_ids[:, self._num_prompt :], scores)
        return changed


class CountPenalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's frequency and presence penalty, which transformers lacks."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0], minlength=scores.shape[1]).to(scores.dtype)
        return scores - counts * self._frequency - counts.clamp(max=1) * self._presence


def processors_of(
    params: SamplingParams, bad_words: BadWords, eos: tuple[int, ...], num_prompt: int, vocab_size: int
) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        found.append(SuppressTokensLogitsProcessor(sorted(set(range(vocab_size)) - set(params.allowed_token_ids))))
    if bad_words:
        found.append(OfOutput(NoBadWordsLogitsProcessor([list(word) for word in bad_words]), num_prompt))
    if params.min_tokens:
        ends = torch.tensor(sorted({*eos, *params.stop_token_ids}))
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends))
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    found.append(OfOutput(CountPenalties(params.frequency_penalty, params.presence_penalty), num_prompt))
    return found
