"""specbatch as a model of lm-evaluation-harness: generation runs with speculative decoding, choices are scored.

    pip install lm-eval
    python scripts/lm_eval_model.py run --model specbatch --tasks gsm8k --apply_chat_template \\
        --model_args model=builtin:smollm2-135m-instruct,max_batch_size=64

The command line is that of `lm-eval`. `--model_args` takes `model`, `draft`, `config` and every option of
docs/options.md, as `specbatch.LLM` does. Without `--apply_chat_template`, prompts are texts to continue. Tasks with
the perplexity of whole texts are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from specbatch import LLM, Result
from specbatch.errors import ConfigError, InputError

_CHAT = "\0specbatch-messages:"  # the beginning of a prompt that is messages, as JSON
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_IGNORED = ("do_sample", "use_cache")  # temperature decides; there is always a cache


@register_model("specbatch")
class SpecbatchModel(LM):
    """`batch_size` and `device` are the harness's own options. The first is max_batch_size here. Of the second only
    `cpu` counts: the harness says `cuda` on every machine."""

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        *,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_batch_size is None and str(batch_size).isdecimal() and int(str(batch_size)) > 1:
            max_batch_size = int(str(batch_size))
        named = {
            "max_batch_size": max_batch_size,
            "device": "cpu" if device == "cpu" else None,
            "prompts_as_chat": False,
            "generation_config": "none",  # a task says how it samples
        }
        options = {name: value for name, value in named.items() if value is not None} | options
        self._llm = LLM(model, draft, **options)
        self._name = model or str(options.get("target", "specbatch"))
        self._max_gen_toks = max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """A part of the harness's cache keys."""
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the messages themselves, because the engine applies the model's template."""
        if not add_generation_prompt:
            raise ConfigError(
                "specbatch does not continue a message of the assistant", "leave out the task's gen_prefix"
            )
        return _CHAT + json.dumps(chat_history)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text for each request, before the first of its stop strings. Raises InputError where a row failed."""
        texts: list[str] = []
        for result in self._llm.stream(self._row(*request.args) for request in requests):
            texts.append(_checked(result, len(texts))["text"])
            self.cache_hook.add_partial("generate_until", requests[len(texts) - 1].args, texts[-1])
        return texts

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy text of as many tokens. Raises
        InputError where a row failed."""
        by_context: dict[str, dict[str, None]] = {}
        for request in requests:
            context, continuation = request.args
            by_context.setdefault(context, {})[continuation] = None
        scored = self._llm.generate({**_prompt(c), "score_choices": [*texts]} for c, texts in by_context.items())
        scores = [_checked(result, number)["choice_scores"] for number, result in enumerate(scored)]
        lengths = [max(score["num_tokens"] for score in each) for each in scores]
        greedy = self._llm.generate(
            {**_prompt(context.rstrip() or context), "max_tokens": length, "temperature": 0, "logprobs": 0}
            for context, length in zip(by_context, lengths, strict=True)
        )
        found: dict[tuple[str, str], tuple[float, bool]] = {}
        for number, (context, each) in enumerate(zip(by_context, scores, strict=True)):
            tokens = [_bytes(entry) for entry in _checked(greedy[number], number)["logprobs"]]
            space = context[len(context.rstrip()) :] if context.strip() else ""
            for score in each:
                is_greedy = b"".join(tokens[: score["num_tokens"]]) == (space + score["text"]).encode()
                found[context, score["text"]] = score["logprob"], is_greedy
        answers = [found[request.args] for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> NoReturn:
        raise ConfigError(
            "this task measures the perplexity of whole texts, which this model class does not compute",
            "choose a task that generates, such as gsm8k, or one of multiple choice, such as arc_easy",
        )

    def _row(self, context: str, settings: dict[str, Any]) -> dict[str, Any]:
        settings = {name: value for name, value in settings.items() if name not in _IGNORED and value is not None}
        until = settings.pop("until", [])
        row: dict[str, Any] = {
            "stop": [until] if isinstance(until, str) else [text for text in until if text],
            "max_tokens": settings.pop("max_gen_toks", settings.pop("max_tokens", self._max_gen_toks)),
            **{name: settings.pop(name) for name in _SAMPLING if name in settings},
        }
        if settings:
            raise ConfigError(f"the task sets {', '.join(settings)}, which specbatch does not have", "--gen_kwargs")
        return row | _prompt(context)


def _prompt(context: str) -> dict[str, Any]:
    if context.startswith(_CHAT):
        return {"messages": json.loads(context.removeprefix(_CHAT))}
    return {"prompt": context}


def _bytes(entry: dict[str, Any]) -> bytes:
    """The bytes of a token, which can be a part of a character."""
    return bytes(entry["bytes"]) if "bytes" in entry else entry["token"].encode()


def _checked(result: Result, number: int) -> Result:
    if result.error is not None:
        raise InputError(f"request {number} cannot run: {result['error']['message']}")
    return result


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
