"""The store in which ranks exchange the handles of memory that they share.

Torch counts these exchanges in each process, and the number is a part of the keys that it writes and reads
(`StoreExchange` of torch/csrc/distributed/c10d/symm_mem). A process whose earlier engine had such memory has a higher
count than a process that has just started: each would wait for a key that the other never writes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class ExchangeStore(dist.Store):
    """The store `inner`, with exchanges numbered from 0: only those of this store count. Every rank makes the same
    exchanges in the same order. Keep a reference while torch uses it: torch calls its methods, but holds none.

    A key is `KIND/NUMBER` or `KIND/NUMBER/...`. Torch counts each kind separately.
    """

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner
        self._numbers: dict[str, dict[str, int]] = {}  # kind -> torch's number -> ours

    def _key(self, key: str) -> str:
        parts = key.split("/")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            numbers = self._numbers.setdefault("/".join(parts[:at]), {})
            parts[at] = str(numbers.setdefault(parts[at], len(numbers)))
        return "/".join(parts)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        # Other Python threads run during the wait, such as the one that ends a rank whose job is killed.
        return self._inner.get(self._key(key))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(self._key(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        keys = [self._key(key) for key in keys]
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(self._key(key))
