"""The library's matrix products by chosen algorithms: what is chosen and remembered, and on CUDA that it is right."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbatch.config_load import load_config
from specbatch.engine.resolve import resolve
from specbatch.errors import ConfigError
from specbatch.kernels import products
from specbatch.kernels.products import Product, choose_products
from specbatch.models.layers import GatedLinear, Linear, RMSNorm

SHAPES = [(256, 128), (512, 64)]
ROWS = [32, 128, 512]


class FakeLibrary:
    """Knows three algorithms for each size; the second is best for shape (256, 128) and 512 rows, torch elsewhere."""

    dtype = torch.bfloat16
    version = 1
    is_hopper = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.measured: list[tuple[tuple[int, int], list[int]]] = []

    def layouts(self, num_rows: int, num_out: int, num_in: int) -> tuple[int, int, int]:
        return num_rows, num_out, num_in

    def algorithms(self, num_rows: int, num_out: int, num_in: int) -> list[str]:
        return ["first", "second", "third"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()

    def measure(library: Any, shape: tuple[int, int], rows: Iterable[int]) -> dict[int, int]:
        fake.measured.append((shape, list(rows)))
        return {m: 1 if (m, shape) == (512, (256, 128)) else -1 for m in rows}

    monkeypatch.setattr(products, "_measure", measure)
    return fake


def choose(library: Any, path: Path) -> dict[tuple[int, int], dict[int, Product]]:
    return choose_products(dict.fromkeys(SHAPES, ROWS), library, path, lambda doing: None)


def test_measured_once(library: FakeLibrary, tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    for _ in range(2):
        chosen = choose(library, path)
        assert {shape: list(by_rows) for shape, by_rows in chosen.items()} == {(256, 128): [512], (512, 64): []}
        assert chosen[256, 128][512]._algorithm == "second"
        # 32 rows have kernels of their own; each size is measured at the first start only.
        assert library.measured == [((256, 128), [512, 128]), ((512, 64), [512, 128])]


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": "b"}', '{"torch.bfloat16 512 256 128": 7}'])
def test_a_broken_file_is_measured_again_or_ignored(library: FakeLibrary, tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    chosen = choose(library, path)
    if "512" in text:  # an algorithm that this library does not have
        assert chosen[256, 128] == {}
    else:
        assert list(chosen[256, 128]) == [512]
        assert json.loads(path.read_text())["torch.bfloat16 512 256 128"] == 1


def test_a_folder_that_cannot_be_written_to(library: FakeLibrary, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert list(choose(library, tmp_path / "file" / "gpu.json")[256, 128]) == [512]


def test_no_memory_for_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured and remembered; the next start tries that one again."""
    tried: list[int] = []

    def best(library: Any, shape: tuple[int, int], num_rows: int) -> int:
        tried.append(num_rows)
        if num_rows == 512:
            raise torch.cuda.OutOfMemoryError("full")
        return 1

    monkeypatch.setattr(products, "_best", best)
    path = tmp_path / "gpu.json"
    for _ in range(2):
        chosen = choose(FakeLibrary(), path)
        assert {shape: list(by_rows) for shape, by_rows in chosen.items()} == {(256, 128): [128], (512, 64): [128]}
    assert tried == [512, 128] * 2 + [512, 512]


def test_the_fastest_wins_by_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"torch": 1.0, "a": 0.99, "b": 0.9, "c": 1.2, "d": 2.0}
    monkeypatch.setattr(products, "_captured", lambda x, weights, name, stream, pool: name)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(products, "_seconds", lambda name, count: times[name])
    x = torch.zeros(1)

    def fastest(*names: str) -> int:
        return products._fastest(x, [], {-1: "torch", **dict(enumerate(names))})  # type: ignore[dict-item]

    assert fastest("a", "c", "b", "d") == 2
    assert fastest("a", "c") == -1
    assert fastest() == -1


def test_layers_multiply_as_chosen() -> None:
    """With norm, residual and gate around the product; other numbers of rows, and biases, stay as they are."""
    seen: list[int] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(x.shape[0])
        y = F.linear(x, weight)
        return y if residual is None else residual + y

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, gate, up = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    norm = RMSNorm(torch.randn(8, generator=generator, dtype=torch.float64), 1e-5)
    plain, gated = Linear(weight), GatedLinear(gate, up, None, None)
    expected = plain(x), plain(x, norm=norm), plain(x, residual_TO=y.clone()), gated(x), gated(x, norm=norm)
    assert (plain.shape, gated.shape) == ((8, 8), (16, 8))
    for layer in (plain, gated):
        layer.choose({3: multiply})
    actual = plain(x), plain(x, norm=norm), plain(x, residual_TO=y.clone()), gated(x), gated(x, norm=norm)
    assert seen == [3] * 5
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    plain(x[:2])
    assert seen == [3] * 5
    with pytest.raises(AssertionError, match="no bias"):
        Linear(weight, torch.zeros(8, dtype=torch.float64)).choose({3: multiply})


def test_refused_without_cuda() -> None:
    with pytest.raises(ConfigError, match="tuned_products needs a CUDA device"):
        resolve(load_config(None, ["model.target=shape:tiny", "engine.device=cpu", "engine.tuned_products=true"]))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [128, 200])
def test_every_algorithm_multiplies(rows: int, dtype: torch.dtype) -> None:
    from specbatch.kernels.cublaslt import CublasLt

    device = torch.device("cuda")
    library = CublasLt(device, dtype)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).to(device, dtype)
    weight = torch.randn(512, 256, generator=generator).to(device, dtype) / 16
    residual = torch.randn(rows, 512, generator=generator).to(device, dtype)
    algorithms = library.algorithms(rows, 512, 256)
    assert algorithms
    exact = x.double() @ weight.double().T
    for algorithm in algorithms:
        product = Product(library, rows, (512, 256), algorithm)
        torch.testing.assert_close(product(x, weight).double(), exact, rtol=2e-2, atol=2e-2)
        total = residual.clone()
        assert product(x, weight, total) is total
        torch.testing.assert_close(total.double(), exact + residual.double(), rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            aux_hidden_states = product(x, weight)
        aux_hidden_states.zero_()
        graph.replay()
        assert torch.equal(aux_hidden_states, product(x, weight))


@needs_gpu
@pytest.mark.gpu
def test_measuring_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbatch.kernels.cublaslt import CublasLt

    library = CublasLt(torch.device("cuda"), torch.bfloat16)
    path = tmp_path / "gpu.json"
    first = choose_products({(6144, 4096): [256, 1024]}, library, path, lambda doing: None)
    assert len(json.loads(path.read_text())) == 2
    monkeypatch.setattr(products, "_measure", lambda *args: pytest.fail("measured again"))
    second = choose_products({(6144, 4096): [256, 1024]}, library, path, lambda doing: None)
    assert [list(p) for p in first.values()] == [list(p) for p in second.values()]
