"""Models that transformers' code computes over the paged cache: logits and texts equal those of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.engine.engine import Engine
from specbatch.engine.executor import RoundExecutor
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.models.decoder import CausalModel
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.models.random_weights import open_random_model
from specbatch.setup.backend import without_graphs
from specbatch.setup.build import build_decoder, build_engine, read_models
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.setup.sizing import planned
from specbatch.types import SamplingParams
from tests.models.fallback.variants import EQUAL, VOCAB, own_model, write_model
from tests.oracle.spans import Span, batch_of, piecewise_logits
from tests.tiny_models import CPU, run

# One for each kind of trait: soft caps and windows, sinks and experts, learned positions, values of fewer dimensions.
_ALWAYS = ("gemma2-caps", "gpt_oss", "gpt2", "deepseek_v3")


def _wide(*values: object) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.wide) for value in values]


NAMES = [pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.wide]) for name in EQUAL]
LENGTH = 300
PIECES = {"whole": [300], "chunks": [1, 130, 7, 162], "decode": [260] + [1] * 40}
SEEDS = [0, *_wide(1, 2)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model_type, changes = EQUAL[name]
    folder = write_model(tmp_path, model_type, changes, seed)
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    checkpoint = open_checkpoint(folder, "transformers")
    with torch.inference_mode():
        expected = own_model(folder)(torch.tensor([tokens])).logits[0]
        decoder = build_decoder(checkpoint.config, checkpoint.tensors, LENGTH, torch.float32, CPU)
        assert expected.std() > 0.1, "logits too flat to compare"
        for pieces in PIECES.values():
            found = piecewise_logits(decoder, tokens, pieces, torch.float32)  # type: ignore[arg-type]
            assert float((found - expected).abs().max()) < 1e-4
        if any(window is not None for window in checkpoint.config.sliding_windows):
            assert min(filter(None, checkpoint.config.sliding_windows)) < LENGTH / 2, "no window binds"


PROMPTS = [[97, 98, 99] * 5, [5, 6, 7, 8, 9] * 4, [120], [40 + i % 17 for i in range(60)], [97, 98, 99] * 5 + [9]]
OPTIONS = ["model.backend=transformers", "engine.page_size=4", "engine.max_batch_size=3", "model.dtype=float64"]
OPTIONS += ["engine.prefill_chunk_tokens=16", "engine.device=cpu"]
TREE = ["speculation.method=draft_model", "speculation.topk=3", "speculation.num_steps=3"]
CASES: dict[str, list[str]] = {
    "plain": ["speculation.method=none"],
    "ngram": ["speculation.method=ngram"],
    "preempted": ["speculation.method=ngram", "engine.kv_cache_tokens=104"],
    "tree": [*TREE, "speculation.num_draft_tokens=8"],
    "chain": ["speculation.method=draft_model", "speculation.num_steps=3"],
}
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=3)
# One for each kind of trait.
_OTHER_TEXTS = ("gpt2", "gpt_oss", "deepseek_v3", "phi3", "granite", "olmo2")
TEXTS = ["gemma2-caps", *_wide(*_OTHER_TEXTS)]


@functools.cache
def _own_texts(folder: Path) -> list[list[int]]:
    """Return the most likely tokens of transformers' own model, in float64."""
    model, texts = own_model(folder, torch.float64), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(GREEDY.max_tokens):
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        folder = write_model(tmp_path_factory.mktemp(name) / "model", *EQUAL[name])
        byte_tokenizer(VOCAB, (0,)).save_pretrained(folder)
        return folder

    return make


def _resolved(folder: Path, case: str) -> ResolvedRun:
    options = [f"model.target={folder}", *OPTIONS, *CASES[case]]
    if "draft_model" in CASES[case][0]:
        options.append(f"speculation.draft={folder}")
    return resolve(load_config(None, options))


def _run(folder: Path, case: str, params: SamplingParams) -> tuple[list[list[int]], Engine]:
    engine = build_engine(_resolved(folder, case))
    assert isinstance(engine, Engine)
    completions = run(engine, PROMPTS, params)
    if case != "plain" and not params.temperature:
        assert sum(completion.speculation.accepted for completion in completions) > 0
    return [completion.token_ids for completion in completions], engine


@pytest.mark.parametrize("case", ["ngram", "preempted", "tree", *_wide("plain", "chain")])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_equal_those_of_transformers(name: str, case: str, folders: Callable[[str], Path]) -> None:
    folder = folders(name)
    found, engine = _run(folder, case, GREEDY)
    assert found == _own_texts(folder)
    if case == "preempted":
        assert engine.stats.preemptions > 0


@pytest.mark.wide
@pytest.mark.parametrize("case", ["ngram", "preempted", "tree"])
def test_sampled_texts_equal_those_of_plain_decoding(case: str, folders: Callable[[str], Path]) -> None:
    folder = folders("gemma2-caps")
    assert _run(folder, case, SAMPLED)[0] == _run(folder, "plain", SAMPLED)[0]


@pytest.mark.parametrize("kv_dtype", ["auto", *_wide("fp8_e4m3")])
def test_random_weights_are_the_same_for_both_backends(kv_dtype: str) -> None:
    texts = []
    for backend in ("native", "transformers"):
        options = ["model.target=random:tiny", f"model.backend={backend}", "speculation.method=none"]
        options += ["engine.kv_cache_tokens=1024", "engine.device=cpu", f"engine.kv_dtype={kv_dtype}"]
        engine = build_engine(resolve(load_config(None, options)))
        assert isinstance(engine, Engine)
        texts.append([completion.token_ids for completion in run(engine, PROMPTS, GREEDY)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", ["ngram", *_wide("tree", "chain")])
def test_with_the_shapes_of_a_gpu(case: str, folders: Callable[[str], Path]) -> None:
    """Batches and chunks are padded, and padding is not written to the cache."""
    folder = folders("gemma2-caps")
    run_ = _resolved(folder, case)
    parts = replace(read_models(run_)[1], fixed_shapes=True)
    sized = planned(parts, run_.cache, 3, 16)
    executor = RoundExecutor(sized.rounds.items, 3, CPU, "none")
    cost = ChunkCost(1.0, 4, 0)
    engine = Engine(executor, sized.engine_sizes(4), prefix_cache=True, chunk_cost=cost)
    assert [completion.token_ids for completion in run(engine, PROMPTS, GREEDY)] == _own_texts(folder)


class _Runner:
    """Captures nothing. `error`: what a capture raises after the function ran."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        output = function()
        if self._error is not None:
            raise self._error
        return output


def test_code_that_cannot_be_captured_runs_without_graphs() -> None:
    run_ = resolve(load_config(None, ["model.target=random:tiny", "model.backend=transformers", "engine.device=cpu"]))
    target = read_models(run_)[1].target
    wanted = replace(run_.engine, graphs="round", prompt_graphs="whole")
    notes: list[str] = []
    kept = without_graphs(wanted, [target], torch.float32, notes, lambda device: _Runner(None))  # type: ignore
    assert (kept, notes) == (wanted, [])
    error = RuntimeError("operation not permitted when stream is capturing\nmore")
    found = without_graphs(wanted, [target], torch.float32, notes, lambda device: _Runner(error))  # type: ignore
    assert (found.graphs, found.prompt_graphs) == ("none", "off")
    assert "RuntimeError: operation not permitted when stream is capturing)" in notes[0]
    assert without_graphs(wanted, [], torch.float32, []) == wanted


def _random_decoder(backend: Literal["native", "transformers"]) -> CausalModel:
    checkpoint = open_random_model("random:tiny", torch.float32, CPU, backend)
    return build_decoder(checkpoint.config, checkpoint.tensors, 64, torch.float32, CPU)


def test_draft_heads_get_what_native_code_gives_them() -> None:
    """The auxiliary hidden states are the inputs of layers, and the last layer's output."""
    outputs = []
    for backend in ("native", "transformers"):
        decoder = _random_decoder(backend)  # type: ignore[arg-type]
        batch = batch_of([Span([3, 1], 0, 7), Span([2, 0], 0, 5)], 4, CPU)
        tokens = torch.arange(12) + 5
        with torch.inference_mode():
            hidden, aux = decoder.forward(tokens, batch, decoder.new_cache(64, torch.float32), (0, 3, 8))
            assert len(aux) == 3
            outputs.append([hidden, *aux, decoder.embed(tokens), decoder.lm_head(hidden)])
    for native, other in zip(*outputs, strict=True):
        assert torch.allclose(native, other, atol=1e-5)


@pytest.mark.parametrize("method", _wide("eagle3", "eagle"))
def test_draft_heads_change_no_text(method: str) -> None:
    texts = []
    tree = ["speculation.topk=2", "speculation.num_steps=3", f"speculation.draft=random:{method}"]
    for options in (["speculation.method=none"], [f"speculation.method={method}", *tree]):
        options += ["model.target=random:tiny", "model.backend=transformers", "engine.device=cpu"]
        engine = build_engine(resolve(load_config(None, [*options, "engine.kv_cache_tokens=1024"])))
        assert isinstance(engine, Engine)
        texts.append([completion.token_ids for completion in run(engine, PROMPTS, GREEDY)])
    assert texts[0] == texts[1]
