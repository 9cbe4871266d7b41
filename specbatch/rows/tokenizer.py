"""Prompts -> token ids, and token ids -> text up to a stop string."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specbatch.config import DataSection
from specbatch.errors import ConfigError, FieldError, RowError
from specbatch.grammar.compiler import GrammarCompiler, MatcherSpec
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.grammar.reasoning import Reasoning
from specbatch.grammar.tool_calls import arguments_schema, calls_of
from specbatch.matcher import GrammarMatcher
from specbatch.rows.chat_fields import NO_CHAT_FIELDS, ChatFields
from specbatch.rows.choice_scoring import FIELD as SCORE_CHOICES
from specbatch.rows.choice_scoring import ChoiceTokens, tokens_of_ids, tokens_of_text
from specbatch.rows.row import Doubt, Row
from specbatch.setup.sampling import runs_prompts_as_chat
from specbatch.text.chat_output import MARKS, REASONING_MARKS, AnswerReader, Thinking, thinking_after
from specbatch.text.chat_template import ChatTemplate
from specbatch.text.harmony import CHANNEL, END, FINAL, HARMONY_MARKS, MESSAGE, begins_final, is_harmony, open_header
from specbatch.text.stop_strings import StopChecker, StopTokens, TokenTexts, adds_its_own_text, cut_at_stop
from specbatch.text.token_pieces import TokenPieces
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams, StopCheck, check_unicode

# A prompt with more characters than both of these is too long without being tokenized: that could take minutes and
# gigabytes.
_MAX_CHARS_PER_TOKEN, _MAX_CHARS = 64, 1 << 20
_MAX_STOP_SETS = 256  # whose tokens are kept; rows can have their own
_MARK_TOKENS = 16  # at most, in which a prompt's last mark is
_HEADER_TOKENS = 64  # the same of the header of its last message, in Harmony


class StopSpec(NamedTuple):
    """The options from which another process, with the tokenizer, makes the same checks for stop strings."""

    data: DataSection

    def texts(self, tokenizer: Any) -> TextProcessor:
        """Return what makes the checks."""
        return TextProcessor(tokenizer, self.data)


class TextProcessor:
    """The tokenizer of a run with its `data` options. `tokenizer` is a transformers tokenizer.

    Raises ConfigError or ModelError if prompts run as chat and the chat template is missing or cannot work.
    """

    def __init__(self, tokenizer: Any, data: DataSection) -> None:
        self._tokenizer = tokenizer
        self.stop_spec = StopSpec(data)
        self._chat = ChatTemplate(tokenizer, data)
        self._separate_reasoning = data.separate_reasoning
        self._as_chat = runs_prompts_as_chat(data, tokenizer)
        self._chat.examine()
        is_asked_for = data.chat_template is not None or (data.system_prompt is not None and self._chat.exists)
        if self._as_chat or is_asked_for:
            self._chat.check()
        self._token_texts: dict[int, str] = {}
        self._own_texts = TokenTexts(self.decode, self.token_text)
        self._is_plain = adds_its_own_text(tokenizer)
        self._stop_tokens: dict[frozenset[str], StopTokens] = {}  # the key is the last characters of stop strings
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        marks = (*MARKS, *HARMONY_MARKS) if is_harmony(known) else MARKS
        self._mark_ids = {mark: known[mark] for mark in marks if mark in known}
        self._marks: dict[int, str] = {}
        self._marks = {token: mark for mark, token in self._mark_ids.items() if not self._decode([token])}
        self._grammars = GrammarCompiler(tokenizer)
        self._bos = getattr(tokenizer, "bos_token_id", None)
        self._template_marks = (*(mark for mark in special if mark), *self._chat.marks)

    @property
    def printed_day(self) -> str | None:
        """See ChatTemplate."""
        return self._chat.printed_day

    def encode(self, row: Row, limits: EngineLimits) -> list[int]:
        """Fill in and return the row's prompt as token ids within `limits`. Raises RowError."""
        self.encode_batch([row], limits)
        if row.error is not None:
            raise row.error
        return row.token_ids

    def encode_batch(self, rows: Sequence[Row], limits: EngineLimits) -> None:
        """Fill in the token ids of rows without an error, or the reason why they do not run within `limits`. The
        interpreter is free while text is tokenized."""
        texts: dict[bool, list[tuple[Row, str]]] = {False: [], True: []}  # the key: special tokens are added
        rows = [row for row in rows if row.error is None]
        for row in rows:
            try:
                if row.chat.given and not self._is_chat(row):
                    raise RowError("invalid_value", f"{row.chat.given[0]} is for chats, and this prompt is not one")
                if row.kind == "token_ids":
                    row.token_ids = list(row.content)
                    continue
                text, add_special_tokens = self._text(row)
                _check_text(text, limits)
                texts[add_special_tokens].append((row, text))
            except RowError as exc:
                row.error = exc
        for add_special_tokens, pairs in texts.items():
            encoded = self._tokenize([text for _, text in pairs], add_special_tokens)
            for (row, _), ids in zip(pairs, encoded, strict=True):
                row.token_ids = ids
        for row in rows:
            row.error = row.error or _misfit(limits, row, row.token_ids)

    def predicted_ids(self, row: Row, limits: EngineLimits) -> list[int]:
        """Return the tokens of a row's prediction. Left out are tokens that the model does not have, because it cannot
        write them, and what is certainly longer than any output."""
        if row.prediction is None:
            return []
        [ids] = self._tokenize([row.prediction[: _MAX_CHARS_PER_TOKEN * limits.max_prompt_tokens]], False)
        return [token for token in ids if token < limits.vocab_size]

    def doubts(self, row: Row) -> list[Doubt]:
        """List the reasons why the prompt of an encoded row may not be what was meant."""
        if row.kind == "messages":
            chat = row.chat
            left_out = self._chat.leaves_out_text(row.content, chat.kwargs, bool(chat.tools))
            return ["text_left_out"] if left_out else []
        if row.kind != "prompt":
            return []
        if self._is_chat(row):
            return ["two_templates"] if row.content.lstrip().startswith(self._template_marks) else []
        has_two = self._adds_bos and list(row.token_ids[:2]) == [self._bos, self._bos]
        return ["two_bos"] if has_two else []

    @functools.cached_property
    def _adds_bos(self) -> bool:
        return self._bos is not None and self._tokenize(["a"], True)[0][:1] == [self._bos]

    def stop_late(self) -> None:
        """End a chat template that does not end. A thread calls it that waits for another one in `encode_batch`."""
        self._chat.stop_late()

    def close(self) -> None:
        """Stop the preparation of rows in the background, because no row is needed any longer."""
        self._grammars.close()

    def answer_reader(self, row: Row) -> AnswerReader:
        """Return the reader of the answers to an encoded row."""
        if not self._is_chat(row):
            return AnswerReader()
        chat, facts = row.chat, self._chat.facts
        separate = self._separate_reasoning if chat.separate_reasoning is None else chat.separate_reasoning
        thinking: Thinking = "none"
        is_separate = facts.thinks if separate is None else separate
        header = open_header(self._end_of(row, _HEADER_TOKENS)) if facts.calls == "harmony" else ""
        if is_separate:
            thinking = "harmony" if facts.calls == "harmony" else thinking_after(self._end_of(row, _MARK_TOKENS))
            if thinking == "marked" and (chat.required or _constraint(row.params) is not None):
                thinking = "closed"  # see `matcher`: the text of a grammar can have the end mark in it
        calls = self._chat.tool_facts.calls if chat.tools else None
        max_calls = None if chat.parallel_tool_calls else 1
        return AnswerReader(thinking, calls, chat.tool_names, max_calls, header)

    def _end_of(self, row: Row, num_tokens: int) -> str:
        """Return the end of a prompt, with its special tokens."""
        text: str = self._tokenizer.decode(list(row.token_ids[-num_tokens:]), skip_special_tokens=False)
        return text

    def matcher(self, row: Row) -> tuple[GrammarMatcher, MatcherSpec] | None:
        """Make the matcher of an output that begins, and return it with its specification. Return None if the output
        may be any text. Reasoning (see `row.reader`) is any text, if its end is a token. It raises RowError for a
        grammar that cannot be used."""
        constraint, thinking = _constraint(row.params), row.reader.thinking
        if row.chat.required:
            if constraint is not None:
                raise RowError("invalid_value", f"tool_choice and {constraint.option} are given; give one of them")
            constraint = self._required_calls(row)
        if constraint is None:
            return None
        begin, end = (self._mark_ids.get(mark) for mark in REASONING_MARKS)
        ends: tuple[int, ...] = () if end is None else (end,)
        if row.reader.calls == "harmony" and row.chat.required:  # a message with reasoning comes first
            thinking, begin, ends = "harmony", None, (self._mark_ids[END],)
        elif thinking == "harmony" and begins_final(row.reader.header):
            thinking = "none"
        elif thinking == "harmony":
            begin, ends = None, self._begin_of_final(constraint.option)
        if thinking == "open" and not ends:
            message = f"{constraint.option}: the prompt begins the model's reasoning, and </think> is not a token"
            hint = "give chat_template_kwargs that switch the reasoning off, or separate_reasoning: false"
            raise RowError("unsupported_parameter", f"{message}; {hint}")
        spec = MatcherSpec(constraint)
        is_open = thinking in ("open", "harmony")
        if not (thinking == "none" or not ends or (not is_open and begin is None)):
            reasoning = Reasoning(None if is_open else begin, ends, len(self._tokenizer))
            spec = MatcherSpec(constraint, reasoning)
        try:
            return spec.make(self._grammars), spec
        except RowError:
            self._check_parameters(row.chat)
            raise

    def _begin_of_final(self, option: str) -> tuple[int, ...]:
        """Return the tokens that begin the final message of Harmony. It raises RowError if the tokenizer lacks them."""
        channel, message = (self._mark_ids.get(mark) for mark in (CHANNEL, MESSAGE))
        if channel is None or message is None:
            hint = "give separate_reasoning: false"
            raise RowError("unsupported_parameter", f"{option}: {CHANNEL} and {MESSAGE} are not tokens; {hint}")
        return channel, *self._tokenizer.encode(FINAL, add_special_tokens=False), message

    def _required_calls(self, row: Row) -> Constraint:
        calls = self._chat.tool_facts.calls
        if calls is None or (calls == "harmony" and not self._mark_ids.keys() >= set(HARMONY_MARKS)):
            why = "is not known" if calls is None else "has marks that are not tokens"
            message = f"tool_choice must be none or auto: the format of this model's calls {why}"
            raise RowError("unsupported_parameter", message)
        if row.params.ignore_eos:
            raise RowError("invalid_value", "ignore_eos and tool_choice are given, but a complete call has to end")
        chat = row.chat
        try:
            return calls_of(chat.required, calls, several=chat.parallel_tool_calls, tokens=self._mark_ids)
        except FieldError as exc:
            raise RowError(exc.type, exc.message) from exc

    def _check_parameters(self, chat: ChatFields) -> None:
        """Raises RowError for the first required tool whose parameters alone cannot be compiled: an error of the whole
        grammar has its own lines in it, and not the tool."""
        for i, tool in enumerate(chat.tools):
            if tool in chat.required:
                constraint = Constraint(f"tools[{i}].function.parameters", "json_schema", arguments_schema(tool))
                self._grammars.matcher(constraint)

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

    @functools.cached_property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        """Text without special tokens."""
        return _decoder_of(self._tokenizer)

    def token_text(self, token_id: int) -> str:
        """The text of one token, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._token_texts[token_id] = text  # bounded by the vocabulary
        return text

    @functools.cached_property
    def pieces(self) -> TokenPieces:
        """The bytes that each token adds to the text of `decode`."""
        return TokenPieces.of(self._tokenizer, self.decode, self.token_text, self._marks)

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

    def choice_tokens(self, row: Row, limits: EngineLimits) -> list[ChoiceTokens | RowError]:
        """The prompt with each of its choices, or why that one cannot be scored. Raises RowError if none can."""
        errors: dict[int, RowError] = {}
        for i, choice in enumerate(row.choices):
            what = f"{SCORE_CHOICES}[{i}]"
            try:
                _check_text(choice, limits, what)
                if not choice:  # white space at the end of the prompt would be scored as this choice
                    raise RowError("invalid_value", f"{what} must be a text that is not empty")
            except RowError as exc:
                errors[i] = exc
        numbers = [i for i in range(len(row.choices)) if i not in errors]
        choices = [row.choices[i] for i in numbers]
        if row.kind == "token_ids":
            tokens = tokens_of_ids(row.content, choices, lambda texts: self._tokenize(texts, False))
        else:
            text, add_special_tokens = self._text(row)
            tokens = tokens_of_text(text, choices, lambda texts: self._tokenize(texts, add_special_tokens))
        found = dict(zip(numbers, tokens, strict=True))
        for i, one in found.items():
            if (error := _misfit(limits, row, one.token_ids)) is not None:
                errors[i] = RowError(error.type, f"{SCORE_CHOICES}[{i}]: {error.message}")
            elif not one.is_scored:
                errors[i] = RowError("invalid_value", f"{SCORE_CHOICES}[{i}] adds no token to the prompt")
        if len(errors) == len(row.choices):
            raise errors[0]
        return [errors.get(i) or found[i] for i in range(len(row.choices))]

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
        return self._chat.write(messages, chat.kwargs, chat.tools)

    def _is_chat(self, row: Row) -> bool:
        return row.kind == "messages" or (row.kind == "prompt" and self._as_chat and not row.raw)

    def _text(self, row: Row) -> tuple[str, bool]:
        """The text to tokenize, and whether the tokenizer adds special tokens to it. Raises RowError."""
        if row.kind == "prompt" and not row.content:
            raise RowError("empty_prompt", "the prompt is empty")
        if not self._is_chat(row):
            return row.content, True
        messages = row.content if row.kind == "messages" else [{"role": "user", "content": row.content}]
        # The template writes the special tokens: the tokenizer must not add them again (double BOS).
        return self.chat_text(messages, row.chat), False

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return the function that decodes tokens, without special ones. Where transformers would only pass the tokens on
    to `tokenizers`, it is that of `tokenizers`: transformers looks at each token first, which takes as long as to
    decode it."""
    fast = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerFast", None)
    kind = type(tokenizer)
    if fast is not None and isinstance(tokenizer, fast) and (kind.decode, kind._decode) == (fast.decode, fast._decode):
        return functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _check_text(text: str, limits: EngineLimits, what: str = "the prompt") -> None:
    max_chars = max(_MAX_CHARS_PER_TOKEN * limits.max_prompt_tokens, _MAX_CHARS)
    if len(text) > max_chars:
        raise RowError("prompt_too_long", f"{what} has {len(text):,} characters, more than {max_chars:,}")
    try:
        check_unicode(what, text)
    except FieldError as exc:
        raise RowError(exc.type, exc.message) from exc


def _misfit(limits: EngineLimits, row: Row, ids: Sequence[int]) -> RowError | None:
    """The first reason why `ids` cannot run."""
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
        _check_vocabulary("stop_token_ids", row.params.stop_token_ids, limits)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(row.params, name)
            if (wanted or 0) > limits.max_logprobs:
                raise RowError("invalid_value", f"{name} must be <= {limits.max_logprobs}, not {wanted}")
    except RowError as exc:
        return exc
    return None


def _check_vocabulary(what: str, ids: Sequence[int], limits: EngineLimits) -> None:
    if ids and max(ids) >= limits.vocab_size:
        token = next(token for token in ids if token >= limits.vocab_size)
        raise RowError("invalid_type", f"{what}: {token} is not a token id (0 .. {limits.vocab_size - 1})")


def _constraint(params: SamplingParams) -> Constraint | None:
    try:
        return constraint_of(params)
    except FieldError as exc:
        raise RowError(exc.type, exc.message) from exc
