"""Exchanges of ranks that have not counted alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from specbatch.parallel.exchanges import ExchangeStore


class TorchExchange:
    """As torch's `StoreExchange`. `count`: exchanges of this process so far."""

    def __init__(self, count: int) -> None:
        self.count = count

    def all_gather(self, store: dist.Store, rank: int, size: int, value: bytes) -> list[bytes]:
        keys = [f"CUDASymmetricMemory/{self.count}/{r}" for r in range(size)]
        self.count += 1
        store.set(keys[rank], value)  # type: ignore[arg-type]  # its stubs want text
        return [bytes(value) for value in store.multi_get(keys)]

    def barrier(self, store: dist.Store, size: int) -> None:
        key = f"CUDASymmetricMemory/{self.count}"
        self.count += 1
        if hasattr(store, "barrier"):  # since torch 2.12
            store.barrier(key, size)
        else:
            self.all_gather(store, 0, 1, b"")


@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (10, 9)], ids=str)
def test_ranks_meet_whatever_they_have_counted(tmp_path: Path, counts: tuple[int, int]) -> None:
    def rank(number: int) -> list[list[bytes]]:
        exchange = TorchExchange(counts[number])
        file_store = dist.FileStore(str(tmp_path / "meeting"), 2)
        own = ExchangeStore(file_store)
        store = dist.PrefixStore("symmetric", own)
        found = []
        for turn in range(3):
            found.append(exchange.all_gather(store, number, 2, bytes([number, 255, turn])))
            exchange.barrier(store, 2)
        return found

    expected = [[bytes([0, 255, turn]), bytes([1, 255, turn])] for turn in range(3)]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(rank, number) for number in range(2)]
        assert [future.result(timeout=30) for future in futures] == [expected] * 2


def test_other_keys_stay() -> None:
    inner = dist.HashStore()
    store = ExchangeStore(inner)
    store.set("name", "value")
    assert inner.get("name") == b"value"
    assert store.check(["name"])
    assert store.add("many/12/members", 2) == 2
    assert inner.add("many/0/members", 1) == 3
    assert store.delete_key("name")
    assert not store.check(["name"])


def test_kinds_of_exchanges_are_numbered_by_themselves() -> None:
    """One process has counted both to 5, the other one of them only."""
    inner = dist.HashStore()
    one, other = ExchangeStore(inner), ExchangeStore(inner)
    one.set("a/5/0", "x")
    one.set("b/5/0", "y")
    assert other.get("a/5/0") == b"x"
    assert other.check(["b/0/0"])
