"""Calls of an event loop that share one model, over the stub engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specbatch import LLM, AsyncLLM
from specbatch.api.results import Result
from specbatch.errors import ConfigError, InputError
from tests.stub_engine import StubEngine

pytestmark = pytest.mark.usefixtures("stub")
HI = [{"role": "user", "content": "hi"}]


def rows(name: str, count: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{i}", "id": i} for i in range(count)]


async def collected(llm: AsyncLLM, rows: Any, **options: Any) -> list[Result]:
    return [result async for result in llm.generate(rows, **options)]


def test_calls_at_the_same_time_have_the_results_of_calls_alone() -> None:
    """Also samples, although the rows of all calls run in one batch."""
    calls: list[tuple[Any, dict[str, Any]]] = [
        (rows("a"), {"temperature": 1.0}),
        (rows("a"), {"temperature": 1.0, "seed": 3}),
        (rows("b", 1), {"max_tokens": 2, "logprobs": 1}),
        ([*rows("c", 3), {"prompt": 7}], {}),
        ([], {}),
        (rows("d", 5), {"first_index": 100, "temperature": 1.0}),
        ([{"prompt": "n", "n": 3, "temperature": 1.0, "logprobs": 1}], {}),
    ]

    async def run() -> list[list[Result]]:
        async with AsyncLLM(max_batch_size=4) as llm:
            return await asyncio.gather(*(collected(llm, rows, **options) for rows, options in calls))

    found = asyncio.run(run())
    with LLM(max_batch_size=4) as llm:
        assert found == [llm.generate(rows, **options) for rows, options in calls]
    assert found[0] != found[1]


def test_results_as_they_finish_are_the_same_ones() -> None:
    async def run() -> tuple[list[Result], list[Result], list[Result], list[Result]]:
        async with AsyncLLM(max_batch_size=8) as llm:
            chat = [result async for result in llm.chat(HI)]
            same = await collected(llm, [{"messages": HI}])
            return await collected(llm, rows("a")), await collected(llm, rows("a"), in_order=False), chat, same

    in_order, unordered, chat, same = asyncio.run(run())
    assert chat == same
    assert in_order != unordered
    assert in_order == sorted(unordered, key=lambda result: result["index"])


def test_a_call_that_is_cancelled_does_not_disturb_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "0.001")
    read = num_started = 0
    submit = StubEngine.submit

    def counted(self: StubEngine, request: Any) -> None:
        nonlocal num_started
        num_started += bytes(request.prompt_token_ids[1:]).startswith(b"x")
        submit(self, request)

    def endless() -> Iterator[str]:
        nonlocal read
        for read in range(1, 1_000_000):
            yield f"x{read}"

    async def run() -> tuple[list[Result], list[Result]]:
        async with AsyncLLM(max_batch_size=16, prompts_as_chat=False) as llm:
            endless_call = asyncio.create_task(collected(llm, endless()))
            other = asyncio.create_task(collected(llm, rows("a")))
            stopped = llm.generate(endless())
            assert (await anext(stopped))["index"] == 0
            await asyncio.sleep(0.05)
            endless_call.cancel()
            await stopped.aclose()
            with pytest.raises(asyncio.CancelledError):
                await endless_call
            num_read, before = read, num_started
            first, second = await other, await collected(llm, rows("a"))
            assert read == num_read, "the rows of calls that ended are read"
            assert num_started - before < 50, "those that wait are run"
            return first, second

    monkeypatch.setattr(StubEngine, "submit", counted)
    first, second = asyncio.run(run())
    assert num_started > 16
    with LLM(prompts_as_chat=False) as llm:
        assert first == second == llm.generate(rows("a"))
    assert read < 2_000


def test_a_short_call_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "0.001")

    async def run() -> int:
        async with AsyncLLM(max_batch_size=16) as llm:
            long: list[Result] = []

            async def run_long() -> None:
                async for result in llm.generate(rows("a", 600)):
                    long.append(result)

            task = asyncio.create_task(run_long())
            while not long:
                await asyncio.sleep(0.001)
            await collected(llm, rows("b", 1))
            num_finished = len(long)
            await task
            return num_finished

    assert asyncio.run(run()) < 150


def test_one_thread_owns_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    step = StubEngine.step

    def noted(self: StubEngine) -> Any:
        threads.add(threading.current_thread())
        return step(self)

    monkeypatch.setattr(StubEngine, "step", noted)

    async def run() -> None:
        async with AsyncLLM() as llm:
            await asyncio.gather(*(collected(llm, rows(str(i))) for i in range(3)))

    asyncio.run(run())
    [thread] = threads
    assert thread is not threading.main_thread()
    assert not thread.is_alive()


def test_errors_reach_their_call() -> None:
    with pytest.raises(ConfigError, match="no option max_batch"):
        AsyncLLM(max_batch=8)

    async def run() -> None:
        llm = AsyncLLM()
        other = asyncio.create_task(collected(llm, rows("a", 200)))
        with pytest.raises(ConfigError, match="no sampling option zzz"):
            llm.generate("x", zzz=1)
        with pytest.raises(InputError, match="row 1 is of type int"):
            await collected(llm, ["x", 3])
        assert len(await other) == 200
        begun = llm.generate(f"p{i}" for i in range(1_000_000))
        await anext(begun)
        llm.close()
        with pytest.raises(InputError, match="closed"):
            async for _ in begun:
                pass
        with pytest.raises(InputError, match="closed"):
            llm.generate("x")

    asyncio.run(run())


def test_an_engine_that_breaks_ends_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAIL_AT", "3")

    async def run() -> list[Any]:
        llm = AsyncLLM(max_batch_size=4)
        calls = [collected(llm, rows(str(i))) for i in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RuntimeError, match="broke"):
            llm.generate("x")
        llm.close()
        return found

    assert [str(error) for error in asyncio.run(run())] == ["the stub engine broke"] * 3
