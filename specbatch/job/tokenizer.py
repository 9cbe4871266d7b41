"""Prompts -> token ids, and token ids -> text up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbatch.config import Config, DataSection
from specbatch.engine.resolve_data import runs_prompts_as_chat
from specbatch.errors import ConfigError, RowError
from specbatch.job.rows import Job
from specbatch.job.templates import ChatTemplate
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams, StopCheck

# Tokens without visible text (special tokens, pieces of a character) that are held back before the window moves on
# regardless: characters take at most 4 bytes, so a longer run is no character in the making.
_MAX_HELD = 8


class StopChecker:
    """A `types.StopCheck`: the number of tokens to keep once a stop string is complete, else None.

    Tokens are decoded one by one after a short window of earlier ones (decoders join and strip across tokens), and an
    unfinished character (a trailing U+FFFD) waits for its last byte. The answer is the same however many tokens
    arrive per call.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        assert stops, "no stop strings"
        assert all(stops), stops
        self._decode = decode
        self._stops = tuple(stops)
        self._tail_chars = max(map(len, stops)) - 1
        self._seen = 0  # tokens fed
        self._reset()

    def __call__(self, tokens: Sequence[int], num_new: int) -> int | None:
        if len(tokens) - num_new < self._seen:  # the caller went back (preemption): start again
            self._reset()
        for position in range(self._seen, len(tokens)):
            hit = self._feed(tokens, position)
            self._seen = position + 1
            if hit and self._seen > len(tokens) - num_new:
                return self._seen
        return None

    def _reset(self) -> None:
        self._seen = 0
        self._window = 0  # tokens[window:read] are context that is decoded again
        self._read = 0  # tokens[:read] are whole characters, or as many as are held back
        self._given = 0  # characters of decode(tokens[window:]) that have been searched
        self._tail = ""  # the last characters, where a stop string may have begun

    def _feed(self, tokens: Sequence[int], position: int) -> bool:
        end = position + 1
        text = self._decode(tokens[self._window : end])
        whole = text.rstrip("\ufffd")  # a token may end in the middle of a character and still complete others
        fresh = whole[self._given :]
        if (whole == text and fresh) or end - self._read >= _MAX_HELD:
            self._window = max(self._read, end - _MAX_HELD)  # short, through endless special tokens, too
            self._read = end
            context = self._decode(tokens[self._window : end])
            # A character can be incomplete here, after special tokens: its last byte is still to come.
            self._given = len(context if whole == text else context.rstrip("\ufffd"))
        else:
            self._given = max(self._given, len(whole))
        region = self._tail + fresh
        self._tail = region[-self._tail_chars :] if self._tail_chars else ""
        return any(stop in region for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """`text` before the earliest stop string; None where it holds none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


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
