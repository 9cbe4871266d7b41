"""`random:NAME`: the published geometries, reproducible random weights, and runs without any file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.models.catalog import random_name
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.eagle_config import target_ids_of
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.models.random_weights import (
    RandomSource,
    geometries,
    open_random_eagle_head,
    open_random_model,
    random_config,
)
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent.parent


def config(*sets: str) -> Config:
    return load_config(None, ["engine.kv_cache_tokens=2048", "engine.device=cpu", *sets])


def num_parameters(model: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in expected_tensors(model).values())


# (parameters as the model cards count them, theta, eps, positions, vocabulary, tied)
PUBLISHED = {
    "llama-3-8b": (8_030_261_248, 500000.0, 1e-5, 8192, 128256, False),
    "llama-3.2-1b": (1_235_814_400, 500000.0, 1e-5, 131072, 128256, True),
    "qwen3-8b": (8_190_735_360, 1e6, 1e-6, 40960, 151936, False),
    "qwen2.5-7b": (7_615_616_512, 1e6, 1e-6, 131072, 152064, False),
    "qwen2.5-1.5b": (1_543_714_304, 1e6, 1e-6, 131072, 151936, True),
    "smollm2-135m": (134_515_008, 100000.0, 1e-5, 8192, 49152, True),
    "smollm2-1.7b": (1_711_376_384, 130000.0, 1e-5, 8192, 49152, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_geometries_are_the_published_ones(name: str) -> None:
    c = random_config(f"random:{name}")
    values = (num_parameters(c), c.rope.theta, c.rms_norm_eps, c.max_position_embeddings, c.vocab_size)
    assert (*values, c.tie_word_embeddings) == PUBLISHED[name]
    assert c.rope.scaling == ("llama3" if name == "llama-3.2-1b" else "none")
    assert c.qk_norm == (name == "qwen3-8b")
    assert c.qkv_bias == name.startswith("qwen2.5")
    assert set(c.sliding_windows) == {None}


@pytest.mark.parametrize(
    ("name", "parameters", "turned"),
    [("phi-4-mini", 3_836_021_760, 96), ("granite-3-8b", 8_170_848_256, 128), ("olmo-2-7b", 7_298_617_344, 128)],
)
def test_other_families(name: str, parameters: int, turned: int) -> None:
    c = random_config(f"random:{name}")
    assert (num_parameters(c), c.rope.rotary_dim(c.head_dim)) == (parameters, turned)


@pytest.mark.parametrize(
    ("name", "parameters", "num_layers"), [("gpt-oss-20b", 20_914_757_184, 24), ("gpt-oss-120b", 116_829_156_672, 36)]
)
def test_gpt_oss(name: str, parameters: int, num_layers: int) -> None:
    c = random_config(f"random:{name}")
    assert num_parameters(c) == parameters
    assert c.sliding_windows == (128, None) * (num_layers // 2)
    rope = c.rope
    assert (rope.theta, rope.factor, rope.original_max_position, rope.truncate) == (150000.0, 32.0, 4096, False)
    assert c.max_position_embeddings == 131072


def test_shape_is_an_older_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`shape:NAME` does what `random:NAME` does. The results say that the weights are random."""
    assert random_config("shape:tiny") == random_config("random:tiny")
    names = ("random:tiny", "shape:tiny", "builtin:tiny", "tiny", None)
    assert [random_name(ref) for ref in names] == ["tiny", "tiny", None, None, None]
    run = resolve(config("model.target=shape:tiny", "speculation.method=eagle3", "speculation.draft=shape:eagle3"))
    assert "random weights" in run.description["target"]
    assert "random weights" in run.description["draft"]
    assert "shape:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("skew", "distinct", "busiest"),
    [("0", (8, 29, 83, 126), 1.2), ("0.5", (8, 26, 62, 108), 9.4), ("1", (8, 18, 34, 58), 15.2)],
)
def test_a_router_with_a_skew(skew: str, distinct: tuple[int, ...], busiest: float) -> None:
    """The figures of docs/models.md: distinct experts of 1, 4, 16 and 64 random tokens; `busiest`: the load of the
    busiest expert over the mean load."""
    checkpoint = open_random_model(f"random:qwen3-30b-a3b?skew={skew}", torch.float32, CPU)
    weight, bias = (checkpoint.tensors.load(f"model.layers.0.mlp.gate.{kind}") for kind in ("weight", "bias"))
    x_TE = torch.randn(6400, 2048, generator=torch.Generator().manual_seed(0))
    chosen_TK = (x_TE @ weight.T + bias).topk(8, dim=-1).indices
    means = []
    for size in (1, 4, 16, 64):
        groups = chosen_TK[: 100 * size].view(100, -1)
        means.append(sum(len(group.unique()) for group in groups) / 100)
    assert means == pytest.approx(distinct, abs=0.6)
    assert chosen_TK.flatten().bincount().max() / (6400 * 8 / 128) == pytest.approx(busiest, rel=0.1)
    other = checkpoint.tensors.load("model.layers.1.mlp.gate.bias")
    assert skew == "0" or not torch.equal(bias, other), "each layer has other ranks"


def test_without_a_skew_a_router_has_no_bias() -> None:
    plain, skewed = (random_config(f"random:tiny-experts{options}") for options in ("", "?skew=1.5"))
    assert expected_tensors(skewed).keys() - expected_tensors(plain).keys() == {
        f"model.layers.{layer}.mlp.gate.bias" for layer in range(8)
    }


@pytest.mark.parametrize("option", ["experts?skew=-1", "experts?skew=x", "experts?skip=1", "experts?skew", "?skew=1"])
def test_options_of_a_random_model_that_are_wrong(option: str) -> None:
    name = f"random:tiny-{option}" if option.startswith("experts") else f"random:tiny{option}"
    with pytest.raises(ModelError, match="skew"):
        random_config(name)


def test_the_70b_has_80_layers_and_its_subset_8() -> None:
    whole, subset = random_config("random:llama-3-70b"), random_config("random:llama-3-70b-8l")
    assert num_parameters(whole) == 70_553_706_496
    assert subset == dataclasses.replace(whole, num_layers=8, sliding_windows=(None,) * 8)


def test_llama_32_rope_scaling() -> None:
    rope = random_config("random:llama-3.2-1b").rope
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (32, 1, 4, 8192)


def test_weights_are_random_and_reproducible() -> None:
    checkpoint = open_random_model("random:tiny", torch.bfloat16, CPU)
    again = open_random_model("random:tiny", torch.bfloat16, CPU)
    assert checkpoint.path is None
    assert checkpoint.description == "random weights"
    assert set(checkpoint.tensors.shapes()) == set(expected_tensors(checkpoint.config))
    for name, shape in checkpoint.tensors.shapes().items():
        tensor = checkpoint.tensors.load(name)
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape == shape
        assert torch.equal(tensor, again.tensors.load(name)), name
    query = checkpoint.tensors.load("model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(query, checkpoint.tensors.load("model.layers.1.self_attn.q_proj.weight"))
    assert 0.019 < query.float().std() < 0.021
    norm = checkpoint.tensors.load("model.norm.weight").float()
    assert 0.98 < norm.mean() < 1.02
    assert norm.std() > 0
    with pytest.raises(KeyError):
        checkpoint.tensors.load("nothing")


def test_head_maps_are_one_to_one() -> None:
    target = random_config("random:llama-3-8b")
    opened = open_random_eagle_head("random:eagle3-32k", "eagle3", target, torch.float32, CPU)
    head, tensors = opened.config, opened.tensors
    assert (head.draft_vocab_size, head.has_vocab_map, head.feature_size) == (32000, True, 4096)
    assert tensors.shapes()["lm_head.weight"] == (32000, 4096)
    ids = target_ids_of(tensors.load("d2t"), tensors.load("t2d"), target.vocab_size)
    assert ids.shape == (32000,)
    whole = open_random_eagle_head("random:eagle3", "eagle3", target, torch.float32, CPU)
    assert (whole.config.draft_vocab_size, whole.config.has_vocab_map) == (128256, False)
    assert "d2t" not in whole.tensors.shapes()


@pytest.mark.parametrize("name", sorted(geometries()))
@pytest.mark.parametrize("head", ["random:eagle3-32k", "random:eagle3", "random:eagle"])
def test_every_geometry_has_heads(name: str, head: str) -> None:
    target = random_config(f"random:{name}")
    opened = open_random_eagle_head(head, "eagle" if head == "random:eagle" else "eagle3", target, torch.float32, CPU)
    assert opened.config.decoder.num_kv_heads == target.num_kv_heads
    assert isinstance(opened.tensors, RandomSource)


@pytest.mark.parametrize(
    ("sets", "message", "hint"),
    [
        (
            ["model.target=random:llama3-8b"],
            "there is no random:llama3-8b",
            "did you mean random:llama-3-8b? known: random:llama",
        ),
        (["model.target=random:zzz"], "there is no random:zzz", "known: random:llama-3-8b, random:llama-3.2-1b"),
        (["model.target=random:eagle3"], "is a draft head", "speculation.draft"),
        (["speculation.draft=random:eagle4"], "there is no random:eagle4", "did you mean random:eagle"),
        (["speculation.draft=random:llama-3-8b"], "is a model, not a draft head", "random:eagle3-32k"),
        (["speculation.draft=random:eagle"], "does not fit speculation.method eagle3", "random:eagle3"),
        (["speculation.method=draft_model", "speculation.draft=random:eagle3"], "is a draft head", ""),
        (["speculation.method=draft_model", "speculation.draft=random:smollm2-135m"], "vocabulary sizes differ", ""),
    ],
)
def test_mistakes_name_what_is_known(sets: list[str], message: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(
            config("model.target=random:tiny", "speculation.method=eagle3", "speculation.draft=random:eagle3", *sets)
        )
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("method", "draft"),
    [
        ("eagle3", "random:eagle3-32k"),
        ("eagle3", "random:eagle3"),
        ("eagle", "random:eagle"),
        ("draft_model", "random:tiny"),
    ],
)
def test_speculation_runs_and_says_that_weights_are_random(method: str, draft: str) -> None:
    base = ["model.target=random:tiny", "sampling.max_tokens=8"]
    run = resolve(config(*base, f"speculation.method={method}", f"speculation.draft={draft}"))
    assert run.description["target"] == "random:tiny (llama, random weights)"
    assert "random weights" in run.description["draft"]
    if draft == "random:eagle3-32k":
        assert isinstance(run.draft, EagleCheckpoint)
        assert run.draft.config.draft_vocab_size == 256
    engines = [build_engine(run), build_engine(resolve(config(*base, "speculation.method=none")))]
    texts = []
    for engine in engines:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        engine.submit(Request(0, run.tokenizer.encode("Hello"), params, RngKey(0, 0, 0)))
        done = []
        while not done:
            done = engine.step()
        texts.append(done[0].token_ids)
        assert len(done[0].token_ids) == 8
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("sets", "message", "hint"),
    [
        (["speculation.method=none"], "needs drafts to accept", "speculation.method"),
        (["speculation.num_steps=1"], "is 2.5, but a round of 1 steps commits at most 2 tokens", "num_steps"),
        (["speculation.num_draft_tokens=2"], "at most 2 tokens", "num_steps"),
        (["speculation.method=ngram", "speculation.num_draft_tokens=2"], "at most 2 tokens", "num_steps"),
        ([], "speculation.simulate_acceptance needs engine.device cuda", "null"),
    ],
)
def test_acceptance_that_cannot_be_simulated(sets: list[str], message: str, hint: str) -> None:
    base = ["model.target=random:tiny", "speculation.method=eagle3", "speculation.draft=random:eagle3"]
    with pytest.raises(ConfigError) as caught:
        resolve(config(*base, "speculation.simulate_acceptance=2.5", *sets))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_byte_tokenizer() -> None:
    tokenizer = byte_tokenizer(600, (0, 270))
    text = "Ä bit of\n text \x00 <5> 漢"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([300, 599]) == "<300><599>"
    assert tokenizer.decode([0, ids[-1], 270], skip_special_tokens=True) == tokenizer.decode([ids[-1]])
    assert tokenizer.eos_token_id == 0
    assert len(tokenizer.get_vocab()) == 600
    with pytest.raises(ModelError):
        byte_tokenizer(200)


def test_generate_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: results, and statistics that say what the weights are."""
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    arguments = ["generate", "d.jsonl", "--set", "model.target=random:tiny", "--set", "sampling.max_tokens=4"]
    arguments += ["--set", "engine.device=cpu", "--set", "engine.kv_cache_tokens=1024"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    stats = json.loads(Path("d.results.stats.json").read_text())
    assert stats["models"]["target"] == "random:tiny (llama, random weights)"
    assert stats["random_weights"] is True
    assert stats["simulated"] is False
    assert "random weights" in done.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert "finished already" in again.output


@pytest.mark.slow
def test_generate_with_the_geometry_of_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["generate", str(ROOT / "examples/questions.jsonl"), "-o", "out.jsonl", "--limit", "3"]
    arguments += ["--set", "model.target=random:smollm2-135m", "--set", "sampling.max_tokens=8"]
    arguments += ["--set", "engine.device=cpu", "--set", "engine.kv_cache_tokens=4096"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len(Path("out.jsonl").read_text().splitlines()) == 3


def test_the_documentation_names_all_geometries() -> None:
    section = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("## Random weights")[1].split("\n## ")[0]
    assert [name for name in geometries() if f"`{name}`" not in section] == []
