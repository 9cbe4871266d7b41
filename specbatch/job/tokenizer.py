"""Prompts -> token ids, and token ids -> text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbatch.config import Config, DataSection
from specbatch.engine.resolve_data import runs_prompts_as_chat
from specbatch.errors import ConfigError, RowError
from specbatch.job.chat_template import ChatTemplate
from specbatch.job.rows import Job
from specbatch.job.stop import StopChecker, cut_at_stop
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams, StopCheck


def with_chat_template_text(config: Config) -> Config:
    """`config` with data.chat_template as the template itself where it names a file. Raises ConfigError."""
    template = config.data.chat_template
    if template is None or "{" in template or "\n" in template:
        return config
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"data.chat_template: cannot read {template}: {exc}", "give a Jinja template, or the path of one"
        ) from exc
    return replace(config, data=replace(config.data, chat_template=text))


# A prompt with more characters for each token that fits, or than a million, is too long before it is made tokens of:
# that would take minutes and gigabytes.
_MOST_PER_TOKEN, _LEAST_LIMIT = 64, 1 << 20


class TextProcessor:
    """The tokenizer of a run with the `data` options on top. `tokenizer` is a transformers tokenizer.

    Raises ConfigError or ModelError where prompts are to run as chat and the chat template is missing or cannot work.
    """

    def __init__(self, tokenizer: Any, data: DataSection) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer, data)
        self._system = data.system_prompt
        self._as_chat = runs_prompts_as_chat(data, tokenizer)
        if self._as_chat or data.chat_template is not None:
            self._chat.check()
        self._token_texts: dict[int, str] = {}

    @property
    def prints_today(self) -> bool:
        """See ChatTemplate."""
        return self._chat.prints_today

    def encode(self, job: Job, limits: EngineLimits) -> list[int]:
        """The job's prompt as token ids within `limits`. Raises RowError."""
        if job.kind == "token_ids":
            ids = list(job.content)
        elif job.kind == "messages":
            ids = self._encode_chat(job.content, limits)
        elif not job.content:
            raise RowError("empty_prompt", "the prompt is empty")
        elif self._as_chat and not job.raw:
            ids = self._encode_chat([{"role": "user", "content": job.content}], limits)
        else:
            ids = self._encode_text(job.content, limits, add_special_tokens=True)
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        # Text too: a tokenizer may know tokens that were added without growing the embedding.
        self._check_vocabulary("the prompt", ids, limits)
        if len(ids) > limits.max_prompt_tokens:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, more than the {limits.max_prompt_tokens} that fit",
            )
        self._check_vocabulary("stop_token_ids", job.params.stop_token_ids, limits)
        if (job.params.logprobs or 0) > limits.max_logprobs:
            raise RowError("invalid_value", f"logprobs must be <= {limits.max_logprobs}, not {job.params.logprobs}")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, exactly as the tokenizer joins it."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._token_texts[token_id] = text  # bounded by the vocabulary
        return text

    def stop_check(self, params: SamplingParams) -> StopCheck | None:
        return StopChecker(self.decode, params.stop) if params.stop else None

    def final_text(self, completion: Completion, params: SamplingParams) -> str:
        """The completion's text before its stop string, or without the token that stopped it."""
        ids = completion.token_ids
        if completion.finish_reason != FinishReason.STOP:
            return self.decode(ids)
        if params.stop and (cut := cut_at_stop(self.decode(ids), params.stop)) is not None:
            return cut
        return self.decode(ids[:-1])

    def chat_text(self, messages: list[dict[str, Any]]) -> str:
        """The messages as the chat template writes them, with the opening of the answer. Raises RowError."""
        if self._system is not None and not any(m["role"] in ("system", "developer") for m in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._chat.write(messages)

    def _encode_chat(self, messages: list[dict[str, Any]], limits: EngineLimits) -> list[int]:
        # The template has written the special tokens; the tokenizer must not add them again (double BOS).
        return self._encode_text(self.chat_text(messages), limits, add_special_tokens=False)

    def _encode_text(self, text: str, limits: EngineLimits, add_special_tokens: bool) -> list[int]:
        most = max(_MOST_PER_TOKEN * limits.max_prompt_tokens, _LEAST_LIMIT)
        if len(text) > most:
            raise RowError("prompt_too_long", f"the prompt has {len(text):,} characters, more than {most:,}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            bad = f"U+{ord(text[exc.start]):04X}"
            raise RowError(
                "invalid_text", f"the prompt holds {bad} at character {exc.start}, which is no text"
            ) from exc
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_vocabulary(self, what: str, ids: Sequence[int], limits: EngineLimits) -> None:
        for token in ids:
            if token >= limits.vocab_size:
                raise RowError("invalid_type", f"{what}: {token} is no token id (0 .. {limits.vocab_size - 1})")
