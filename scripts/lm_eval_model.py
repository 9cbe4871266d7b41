"""specbatch as a model of lm-evaluation-harness: its generation tasks run with speculative decoding.

    pip install lm-eval
    python scripts/lm_eval_model.py run --model specbatch --tasks gsm8k --apply_chat_template \\
        --model_args target=builtin:smollm2-135m-instruct,max_batch_size=64

The command line is that of `lm-eval`. `--model_args` takes `target`, `draft`, `config` and every option of
docs/options.md, as `specbatch.LLM` does. Without `--apply_chat_template`, prompts are texts to continue. Tasks that
compare log-probabilities of given answers (multiple choice) are refused. `specbatch eval` has some of these tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from specbatch import LLM
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
        target: str | None = None,
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
        self._llm = LLM(target, draft, **options)
        self._name = target or "specbatch"
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
        for result in self._llm.generate(self._row(*request.args) for request in requests):
            if error := result.get("error"):
                raise InputError(f"request {len(texts)} cannot run: {error['message']}")
            texts.append(result["text"])
            self.cache_hook.add_partial("generate_until", requests[len(texts) - 1].args, texts[-1])
        return texts

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> NoReturn:
        _refuse()

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> NoReturn:
        _refuse()

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
        if context.startswith(_CHAT):
            return row | {"messages": json.loads(context.removeprefix(_CHAT))}
        return row | {"prompt": context}


def _refuse() -> NoReturn:
    raise ConfigError(
        "this task compares log-probabilities of given answers, which this model class does not compute",
        "choose a task that generates, such as gsm8k or ifeval; `specbatch eval` has mmlu, hellaswag and arc",
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
