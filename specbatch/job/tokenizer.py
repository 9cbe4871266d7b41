"""Prompts -> token ids, and token ids -> text up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbatch.config import Config, DataSection
from specbatch.engine.resolve_data import runs_prompts_as_chat
from specbatch.errors import ConfigError, FieldError, RowError
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.grammar.reasoning import Reasoning
from specbatch.grammar.spec import MatcherSpec
from specbatch.grammar.tool_calls import calls_of
from specbatch.job.chat_fields import NO_CHAT_FIELDS, ChatFields
from specbatch.job.chat_output import MARKS, REASONING_MARKS, AnswerReader, Thinking, ends_in_reasoning
from specbatch.job.chat_template import ChatTemplate
from specbatch.job.choices import ChoiceTokens, tokens_of_ids, tokens_of_text
from specbatch.job.rows import Prompt
from specbatch.job.stops import StopChecker, StopTokens, TokenTexts, adds_its_own_text, cut_at_stop
from specbatch.matcher import GrammarMatcher
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams, StopCheck, check_unicode


def with_chat_template_text(config: Config) -> Config:
    """`config` with the text of data.chat_template, if that names a file. Raises ConfigError."""
    template = config.data.chat_template
    if template is None or "{" in template or "\n" in template:
        return config
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"data.chat_template: cannot read {template}: {exc}",
            "give a Jinja template, or the path of a file with one",
        ) from exc
    return replace(config, data=replace(config.data, chat_template=text))


# A prompt with more characters than both of these is too long without being tokenized: that could take minutes and
# gigabytes.
_MAX_CHARS_PER_TOKEN, _MAX_CHARS = 64, 1 << 20
_MAX_STOP_SETS = 256  # whose tokens are kept; rows can have their own
_MARK_TOKENS = 16  # at most, in which a prompt's last mark is


class TextProcessor:
    """The tokenizer of a run with its `data` options. `tokenizer` is a transformers tokenizer.

    Raises ConfigError or ModelError if prompts run as chat and the chat template is missing or cannot work.
    """

    def __init__(self, tokenizer: Any, data: DataSection) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer, data)
        self._system = data.system_prompt
        self._separate_reasoning = data.separate_reasoning
        self._as_chat = runs_prompts_as_chat(data, tokenizer)
        self._chat.examine()
        if self._as_chat or data.chat_template is not None:
            self._chat.check()
        self._token_texts: dict[int, str] = {}
        self._own_texts = TokenTexts(self.decode, self.token_text)
        self._is_plain = adds_its_own_text(tokenizer)
        self._stop_tokens: dict[frozenset[str], StopTokens] = {}  # by the last characters of stop strings
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        self._marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in MARKS if mark in special}
        known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        self._mark_ids = {mark: known[mark] for mark in MARKS if mark in known}
        self._grammars = GrammarCompiler(tokenizer)

    @property
    def printed_day(self) -> str | None:
        """See ChatTemplate."""
        return self._chat.printed_day

    def encode(self, prompt: Prompt, limits: EngineLimits) -> list[int]:
        """The prompt as token ids within `limits`. Raises RowError."""
        (ids,) = self.encode_batch([prompt], limits)
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_batch(self, prompts: Sequence[Prompt], limits: EngineLimits) -> list[list[int] | RowError]:
        """Each prompt as token ids within `limits`, or its error. The interpreter is free while text is tokenized."""
        found: list[list[int] | RowError] = []
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}  # whether special tokens are added -> prompt -> text
        for number, prompt in enumerate(prompts):
            try:
                if prompt.chat.given and not self._is_chat(prompt):
                    raise RowError("invalid_value", f"{prompt.chat.given[0]} is for chats, and this prompt is not one")
                if prompt.kind == "token_ids":
                    found.append(list(prompt.content))
                    continue
                text, add_special_tokens = self._text(prompt)
                _check_text(text, limits)
                texts[add_special_tokens][number] = text
                found.append([])
            except RowError as exc:
                found.append(exc)
        for add_special_tokens, by_number in texts.items():
            encoded = self._tokenize(list(by_number.values()), add_special_tokens)
            for number, ids in zip(by_number, encoded, strict=True):
                found[number] = ids
        return [
            ids if isinstance(ids, RowError) else _within(limits, prompt, ids)
            for prompt, ids in zip(prompts, found, strict=True)
        ]

    def stop_late(self) -> None:
        """To be called by a thread that waits for one in `encode_batch`: ends a chat template that does not end."""
        self._chat.stop_late()

    def close(self) -> None:
        """Stop what prepares a row in the background: no row is wanted any longer."""
        self._grammars.close()

    def answer_reader(self, prompt: Prompt, token_ids: Sequence[int]) -> AnswerReader:
        """What reads the answers to `prompt`, which `encode` has made `token_ids` of."""
        if not self._is_chat(prompt):
            return AnswerReader()
        chat, facts = prompt.chat, self._chat.facts
        separate = self._separate_reasoning if chat.separate_reasoning is None else chat.separate_reasoning
        thinking: Thinking = "none"
        if facts.thinks if separate is None else separate:
            end = self._tokenizer.decode(list(token_ids[-_MARK_TOKENS:]), skip_special_tokens=False)
            thinking = "open" if ends_in_reasoning(end) else "marked"
        calls = self._chat.tool_facts.calls if chat.tools else None
        return AnswerReader(thinking, calls, chat.tool_names, None if chat.parallel_tool_calls else 1)

    def matcher(self, prompt: Prompt, thinking: Thinking = "none") -> tuple[GrammarMatcher, MatcherSpec] | None:
        """Of an output that begins, and what it is made of; None: it may be any text. Reasoning (see `answer_reader`)
        is any text, where its end is a token. Raises RowError for a grammar that cannot be used."""
        constraint = _constraint(prompt.params)
        if prompt.chat.required:
            if constraint is not None:
                raise RowError("invalid_value", f"tool_choice and {constraint.option} are given; give one of them")
            constraint = self._required_calls(prompt)
        if constraint is None:
            return None
        begin, end = (self._mark_ids.get(mark) for mark in REASONING_MARKS)
        if thinking == "open" and end is None:
            message = f"{constraint.option}: the prompt begins the model's reasoning, and </think> is not a token"
            hint = "give chat_template_kwargs that switch the reasoning off, or separate_reasoning: false"
            raise RowError("unsupported_parameter", f"{message}; {hint}")
        spec = MatcherSpec(constraint)
        if not (thinking == "none" or end is None or (thinking == "marked" and begin is None)):
            reasoning = Reasoning(begin if thinking == "marked" else None, end, len(self._tokenizer))
            spec = MatcherSpec(constraint, reasoning)
        return spec.make(self._grammars), spec

    def _required_calls(self, prompt: Prompt) -> Constraint:
        if (calls := self._chat.tool_facts.calls) is None:
            message = "tool_choice must be none or auto: the format of this model's calls is not known"
            raise RowError("unsupported_parameter", message)
        if prompt.params.ignore_eos:
            raise RowError("invalid_value", "ignore_eos and tool_choice are given, but a complete call has to end")
        chat = prompt.chat
        return calls_of(chat.required, calls, several=chat.parallel_tool_calls, tokens=self._mark_ids)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raises ConfigError for the grammar of a configuration."""
        try:
            if (constraint := _constraint(params)) is not None:
                self._grammars.matcher(constraint)
        except RowError as exc:
            raise ConfigError(f"sampling.{exc.message}") from exc

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, exactly as the tokenizer joins it. Marks of reasoning and of tool calls stay,
        also where they are special tokens."""
        start = 0
        texts: list[str] = []
        for end, token in enumerate(token_ids if self._marks else ()):
            if token in self._marks:
                texts += [self._decode(token_ids[start:end]), self._marks[token]]
                start = end + 1
        return "".join([*texts, self._decode(token_ids[start:])]) if texts else self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """The text of one token, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._token_texts[token_id] = text  # bounded by the vocabulary
        return text

    def bad_words(self, params: SamplingParams, limits: EngineLimits) -> tuple[tuple[int, ...], ...]:
        """`params.bad_words` as token ids, without and with a space before them. Raises RowError for these and for all
        other rules that the engine cannot follow."""
        from specbatch.engine.rules import make_rules  # here, because it imports torch

        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                _check_vocabulary("bad_words", ids, limits)
                words[tuple(ids)] = None
        try:
            make_rules(params, tuple(words), limits)
        except FieldError as exc:
            raise RowError(exc.type, exc.message) from exc
        return tuple(words)

    def choice_tokens(self, prompt: Prompt, limits: EngineLimits) -> list[ChoiceTokens]:
        """`prompt` with each of its choices. Raises RowError."""
        for choice in prompt.choices:
            _check_text(choice, limits)
        if prompt.kind == "token_ids":
            found = tokens_of_ids(prompt.content, prompt.choices, lambda texts: self._tokenize(texts, False))
        else:
            text, add_special_tokens = self._text(prompt)
            found = tokens_of_text(text, prompt.choices, lambda texts: self._tokenize(texts, add_special_tokens))
        for one in found:
            if isinstance(error := _within(limits, prompt, one.token_ids), RowError):
                raise error
        return found

    def stop_check(self, params: SamplingParams) -> StopCheck | None:
        if not params.stop:
            return None
        last_chars = frozenset(stop[-1] for stop in params.stop)
        if last_chars not in self._stop_tokens:
            if len(self._stop_tokens) >= _MAX_STOP_SETS:
                self._stop_tokens.clear()
            self._stop_tokens[last_chars] = StopTokens(self._own_texts, last_chars, plain=self._is_plain)
        return StopChecker(self._own_texts, params.stop, self._stop_tokens[last_chars], params.min_tokens)

    def final_text(self, completion: Completion, params: SamplingParams) -> str:
        """The completion's text before its stop string, or without the token that stopped it; with
        `include_stop_str_in_output` the text up to that."""
        ids, include = completion.token_ids, params.include_stop_str_in_output
        if completion.finish_reason != FinishReason.STOP:
            return self.decode(ids)
        if params.stop:
            # As `StopChecker`: a character that the first tokens leave unfinished is not theirs.
            num_old = len(self.decode(ids[: params.min_tokens]).rstrip("\ufffd")) if params.min_tokens else 0
            if (cut := cut_at_stop(self.decode(ids), params.stop, num_old, include)) is not None:
                return cut
        return self.decode(ids if include else ids[:-1])

    def chat_text(self, messages: list[dict[str, Any]], chat: ChatFields = NO_CHAT_FIELDS) -> str:
        """The messages as the chat template writes them, with the beginning of the answer. Raises RowError."""
        if self._system is not None and not any(m["role"] in ("system", "developer") for m in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._chat.write(messages, chat.kwargs, chat.tools)

    def _is_chat(self, prompt: Prompt) -> bool:
        return prompt.kind == "messages" or (prompt.kind == "prompt" and self._as_chat and not prompt.raw)

    def _text(self, prompt: Prompt) -> tuple[str, bool]:
        """The text to tokenize, and whether the tokenizer adds special tokens to it. Raises RowError."""
        if prompt.kind == "prompt" and not prompt.content:
            raise RowError("empty_prompt", "the prompt is empty")
        if not self._is_chat(prompt):
            return prompt.content, True
        messages = prompt.content if prompt.kind == "messages" else [{"role": "user", "content": prompt.content}]
        # The template writes the special tokens: the tokenizer must not add them again (double BOS).
        return self.chat_text(messages, prompt.chat), False

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _check_text(text: str, limits: EngineLimits) -> None:
    max_chars = max(_MAX_CHARS_PER_TOKEN * limits.max_prompt_tokens, _MAX_CHARS)
    if len(text) > max_chars:
        raise RowError("prompt_too_long", f"the prompt has {len(text):,} characters, more than {max_chars:,}")
    try:
        check_unicode("the prompt", text)
    except FieldError as exc:
        raise RowError(exc.type, exc.message) from exc


def _within(limits: EngineLimits, prompt: Prompt, ids: list[int]) -> list[int] | RowError:
    """`ids`, or the first reason why they cannot run."""
    try:
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        # Text too: a tokenizer can have tokens that were added without a larger embedding.
        _check_vocabulary("the prompt", ids, limits)
        if len(ids) > limits.max_prompt_tokens:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, more than the {limits.max_prompt_tokens} that fit",
            )
        _check_vocabulary("stop_token_ids", prompt.params.stop_token_ids, limits)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(prompt.params, name)
            if (wanted or 0) > limits.max_logprobs:
                raise RowError("invalid_value", f"{name} must be <= {limits.max_logprobs}, not {wanted}")
    except RowError as exc:
        return exc
    return ids


def _check_vocabulary(what: str, ids: Sequence[int], limits: EngineLimits) -> None:
    if ids and max(ids) >= limits.vocab_size:
        token = next(token for token in ids if token >= limits.vocab_size)
        raise RowError("invalid_type", f"{what}: {token} is not a token id (0 .. {limits.vocab_size - 1})")


def _constraint(params: SamplingParams) -> Constraint | None:
    try:
        return constraint_of(params)
    except FieldError as exc:
        raise RowError(exc.type, exc.message) from exc
