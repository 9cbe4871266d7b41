"""A deterministic engine and tokenizer; `python -m tests.stub_engine generate ...` runs the command line over them.

Tokens are a pure function of the prompt and the `RngKey`. A few requests finish in each step, in an order that does not
depend on their order of submission.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbatch.config import Config
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import ModelError
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.types import NO_MARGIN, Completion, EngineLimits, FinishReason, Margin, Request, RngKey

VOCAB = 300
BOS, EOS = 256, 257


PRINTS_TODAY = "{{ strftime_now('%d %b %Y') }}"  # a chat template


class StubTokenizer:
    """A tokenizer whose tokens 0..255 are bytes of UTF-8; BOS is 256, EOS 257. It decodes like a byte-level
    tokenizer."""

    chat_template: str | None = "stub"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode("utf-8"))

    def __call__(self, texts: list[str], add_special_tokens: bool, **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert clean_up_tokenization_spaces is False
        names = {BOS: b"" if skip_special_tokens else b"<s>", EOS: b"" if skip_special_tokens else b"</s>"}
        return b"".join(names.get(i, bytes([i % 256])) for i in ids).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        chat_template: str | None,
        tokenize: bool,
        add_generation_prompt: bool,
        date_string: str,
        tools: list[dict[str, Any]] | None = None,
        strftime_texts: dict[str, str] | None = None,
    ) -> str:
        assert tokenize is False
        assert add_generation_prompt is True
        if any(m["role"] == "refused" for m in messages):
            raise ValueError("no such role")
        if chat_template == "date":
            return "".join([date_string, *(m["content"] for m in messages)])
        if strftime_texts:
            return f"{strftime_texts['%d %b %Y']}: {messages[-1]['content']}"
        return "".join(f"<{m['role']}>{m.get('content', '')}" for m in messages) + "<assistant>"


def stub_tokens(prompt: Sequence[int], key: RngKey, max_tokens: int, ignore_eos: bool) -> list[int]:
    """Generate lower-case letters and spaces, sometimes with EOS before max_tokens."""
    state = hashlib.blake2b(repr((list(prompt), key.seed, key.stream, key.sample)).encode(), digest_size=8)
    rng = random.Random(int.from_bytes(state.digest(), "big"))
    length = rng.randint(1, 24)
    tokens = [rng.choice(b"abcdefghij klmnop") for _ in range(min(length, max_tokens))]
    if length < max_tokens and not ignore_eos:
        tokens.append(EOS)
    return tokens


def stub_margin(tokens: Sequence[int]) -> Margin:
    """Return a margin of any order of magnitude, and sometimes a tie."""
    number = zlib.crc32(repr(tokens).encode())
    value = 0.0 if number % 19 == 0 else 10.0 ** -(number % 7) * (1 + number % 11)
    return Margin(struct.unpack("f", struct.pack("f", value))[0], number % len(tokens))


class StubEngine:
    """The stub engine, see the module. `sleep`: the duration of a step. `fail_at`: the first step that raises.
    `capacity`: the most tokens that a row can be allowed."""

    def __init__(
        self,
        batch: int = 8,
        max_prompt_tokens: int = 400,
        sleep: float = 0.0,
        fail_at: int = 0,
        capacity: int | None = None,
    ) -> None:
        self.limits = EngineLimits(max_prompt_tokens, VOCAB)
        self._longest_row = max_prompt_tokens + 1
        self._capacity = capacity or self._longest_row
        self.stats = EngineStats()
        self.most_waiting = 0
        self.is_closed = False
        self._batch = batch
        self._sleep = sleep
        self._fail_at = fail_at
        self._steps = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def tokens_so_far(self) -> dict[int, int]:
        return {request.request_id: 0 for request in self._running}

    def limit_length(self, tokens: int | None) -> int:
        tokens = self._longest_row if tokens is None else tokens
        if tokens > self._capacity:
            raise ModelError(f"a row of {tokens} tokens does not fit")
        self.limits = EngineLimits(tokens - 1, VOCAB)
        return tokens

    def submit(self, request: Request) -> None:
        assert 1 <= len(request.prompt_token_ids) <= self.limits.max_prompt_tokens
        assert all(0 <= t < VOCAB for t in request.prompt_token_ids)
        self._waiting.append(request)
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def close(self) -> None:
        self.is_closed = True

    def step(self) -> list[Completion]:
        assert not self.is_closed
        self._steps += 1
        if self._fail_at and self._steps >= self._fail_at:
            raise RuntimeError("the stub engine broke")
        if self._sleep:
            time.sleep(self._sleep)
        while self._waiting and len(self._running) < self._batch:
            self._running.append(self._waiting.popleft())
        # The half whose prompts have the highest hashes finishes. This order is shuffled, but the same for each batch.
        self._running.sort(key=lambda r: zlib.crc32(repr((r.request_id, self._steps)).encode()))
        half = max(1, len(self._running) // 2) if self._running else 0
        done, self._running = self._running[:half], self._running[half:]
        self.stats.rounds += 1
        self.stats.decode_seconds += 1e-4
        return [self._complete(request) for request in done]

    def _complete(self, request: Request) -> Completion:
        params = request.params
        tokens = stub_tokens(request.prompt_token_ids, request.rng, params.max_tokens, params.ignore_eos)
        reason = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
        for i, token in enumerate(tokens):
            if token in params.stop_token_ids:
                tokens, reason = tokens[: i + 1], FinishReason.STOP
                break
        if request.check_stop is not None and (keep := request.check_stop(tokens, 0, len(tokens))) is not None:
            tokens, reason = tokens[:keep], FinishReason.STOP
        counts = SpeculationCounts()
        for _ in range(len(tokens) // 3):
            counts.record(drafted=3, depth=3, accepted=2, committed=3)
        logprobs = None
        if params.logprobs is not None:
            top = tuple((97 + k, -float(k)) for k in range(params.logprobs))
            logprobs = TokenLogprobs.of(TokenLogprob(t, -0.5, top) for t in tokens)
        self.stats.generated_tokens += len(tokens)
        self.stats.prompt_tokens += len(request.prompt_token_ids)
        self.stats.speculation.add(counts)
        margin = NO_MARGIN if params.temperature else stub_margin(tokens)
        return Completion(request.request_id, tokens, reason, logprobs, counts, margin)


@dataclass
class StubRun:
    config: Config
    tokenizer: StubTokenizer = field(default_factory=StubTokenizer)
    row_tokens: int | None = None
    description: dict[str, str] = field(default_factory=lambda: {"target": "stub"})
    low_acceptance: str | None = None
    bits_depend_on: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def resolve(config: Config, progress: object = None) -> StubRun:
    model = replace(config.model, dtype="float32")
    batch = config.engine.max_batch_size or 16
    resolved = replace(config, model=model, engine=replace(config.engine, device="cpu", max_batch_size=batch))
    given = config.engine.kv_cache_tokens
    return StubRun(resolved, row_tokens=given if given is not None and given < 512 else None)


def build_engine(run: StubRun, show: Callable[[str], None] = lambda progress: None) -> StubEngine:
    if log := os.environ.get("STUB_BUILT"):
        Path(log).touch()
    return StubEngine(
        run.config.engine.max_batch_size or 16,
        sleep=float(os.environ.get("STUB_SLEEP", "0")),
        fail_at=int(os.environ.get("STUB_FAIL_AT", "0")),
    )


def stub_modules() -> dict[str, types.ModuleType]:
    """Return the replacements in sys.modules for modules that need models."""
    names = ("specbatch.setup.resolve", "specbatch.setup.build", "specbatch.job.check")
    modules = {name: types.ModuleType(name) for name in names}
    modules["specbatch.job.check"].ConfigCheck = types.SimpleNamespace(of_run=lambda run: None)  # type: ignore[attr-defined]
    modules["specbatch.setup.resolve"].resolve = resolve  # type: ignore[attr-defined]
    modules["specbatch.setup.build"].build_engine = build_engine  # type: ignore[attr-defined]
    return modules


def main() -> None:
    """Run the command line over the stub engine."""
    sys.modules.update(stub_modules())
    from specbatch import cli, startup

    startup.model_paths = lambda config: {}
    cli.main()


if __name__ == "__main__":
    main()
