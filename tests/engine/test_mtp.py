"""Multi-token prediction: the layer of a hybrid's checkpoint drafts as its published code does, and changes no text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.draft.network import EagleNet
from specbatch.errors import ConfigError, ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.mtp_files import has_mtp, open_mtp
from specbatch.setup.build import build_engine, read_models
from specbatch.setup.resolve import resolve
from tests.engine.test_hybrid import CONFIGS, PROMPTS, expected_texts, make_engine, run, tokens_of, write_model
from tests.oracle.spans import Span, batch_of

CPU = torch.device("cpu")


def mtp_tensors(path: Path, *, copies: bool) -> dict[str, Tensor]:
    """Make the tensors of a layer for the model of a folder. It is a layer of the model with other numbers. `copies`:
    its output is the target's hidden state, so that it is right where a text repeats its last token."""
    own = load_file(path / "model.safetensors")
    layer = next(name for name in own if name.endswith("self_attn.q_proj.weight")).split("self_attn")[0]
    generator = torch.Generator().manual_seed(5)
    size = own["model.norm.weight"].shape[0]
    tensors = {
        name.replace(layer, "mtp.layers.0."): value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in own.items()
        if name.startswith(layer)
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(size, generator=generator)
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(size, 2 * size, generator=generator)
    if copies:
        for name in ("mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.down_proj.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
        for name in ("pre_fc_norm_hidden", "norm"):
            tensors[f"mtp.{name}.weight"] = torch.zeros(size)
        tensors["mtp.fc.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    return tensors


def write_with_mtp(name: str, path: Path, *, copies: bool = False) -> Path:
    write_model(CONFIGS[name], path)
    file = path / "model.safetensors"
    save_file(load_file(file) | mtp_tensors(path, copies=copies), file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_mtp("qwen3.5", tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module", params=["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.wide)])
def copying(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_mtp(request.param, tmp_path_factory.mktemp("copying"), copies=request.param == "qwen3.5")


def test_drafts_are_those_of_the_published_code(model: Path) -> None:
    """The reference is made of the modules of transformers, which has no such layer: embedding and hidden state are
    normed and joined in this order, and the target's hidden state is the one after its final norm."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, config = load_file(model / "model.safetensors"), theirs.config
    layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norms[name] = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        norms[name].load_state_dict({"weight": tensors[f"mtp.{name}.weight"]})
    tokens = torch.tensor(PROMPTS[0])
    count = len(tokens) - 1
    with torch.inference_mode():
        hidden = theirs.model(tokens[None]).last_hidden_state
        embedded = theirs.model.embed_tokens(tokens[None, 1:])
        joined = torch.cat((norms["pre_fc_norm_embedding"](embedded), norms["pre_fc_norm_hidden"](hidden[:, :-1])), -1)
        x = joined @ tensors["mtp.fc.weight"].T
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = theirs.model.rotary_emb(x, torch.arange(count)[None])
        expected = norms["norm"](layer(x, position_embeddings=angles, attention_mask=mask))[0]
    section = SpeculationSection(method="mtp")
    run_ = resolve(
        Config(model=ModelSection(target=str(model)), speculation=section, engine=EngineSection(device="cpu"))
    )
    net = read_models(run_)[0].net
    assert isinstance(net, EagleNet)
    net.cache.resize(64)
    with torch.inference_mode():
        layout = batch_of([Span(range(4), 0, count)], 16, CPU)
        found = net.forward(tokens[1:], hidden[0, :-1].clone(), layout)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(net.raw_logits(found), theirs.lm_head(expected), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.wide), 3])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.wide),
        {"kv_cache_tokens": 128, "max_batch_size": 8, "prefill_chunk_tokens": 24},
    ],
)
def test_texts_are_those_of_transformers(copying: Path, num_steps: int, settings: dict[str, int]) -> None:
    engine = make_engine(copying, {"method": "mtp", "num_steps": num_steps}, **settings)
    count = len(PROMPTS) - bool(settings)
    completions = run(engine, PROMPTS[:count])
    assert tokens_of(completions) == expected_texts(copying)[:count]
    assert engine.stats.cached_prompt_tokens > 0
    assert bool(settings) == (engine.stats.preemptions > 0)
    if "qwen3_5" in (copying / "config.json").read_text():
        assert sum(c.speculation.accepted for c in completions) > 0


def test_fp8_changes_no_text_by_drafts(copying: Path) -> None:
    """The gates of the delta rule are not quantised, nor is the layer that drafts."""
    texts = []
    for method in ("none", "mtp"):
        config = Config(
            model=ModelSection(target=str(copying), dtype="float32", quantization="fp8"),
            speculation=SpeculationSection(method=method),
            engine=EngineSection(device="cpu", kv_cache_tokens=2048, max_batch_size=4 - (method == "mtp")),
        )
        run_ = resolve(config)
        assert run_.quantization is not None
        assert not run_.quantization.covers("model.layers.0.linear_attn.in_proj_a")
        texts.append(tokens_of(run(build_engine(run_), PROMPTS[:6])))
    assert texts[0] == texts[1] != expected_texts(copying)[:6]


def test_auto_drafts_with_it(model: Path, tmp_path: Path) -> None:
    run_ = resolve(Config(model=ModelSection(target=str(model)), engine=EngineSection(device="cpu")))
    assert run_.config.speculation.method == "mtp"
    assert run_.config.speculation.num_draft_tokens == 2
    other = write_model(CONFIGS["qwen3.5"], tmp_path)
    assert not has_mtp(open_checkpoint(other))
    run_ = resolve(Config(model=ModelSection(target=str(other)), engine=EngineSection(device="cpu")))
    assert run_.config.speculation.method == "ngram"
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        open_mtp(open_checkpoint(other))


def test_a_layer_that_speculators_has_saved(model: Path, tmp_path: Path) -> None:
    """Its folder has the same tensors under other names: the drafts are the same."""
    names = {
        "mtp.fc.": "mtp_layers.0.input_proj.",
        "mtp.norm.": "mtp_layers.0.final_layernorm.",
        "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
        "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
        "mtp.layers.0.": "mtp_layers.0.",
    }
    tensors = {}
    for name, value in load_file(model / "model.safetensors").items():
        usual = next((one for one in names if name.startswith(one)), None)
        if usual is not None:
            tensors[names[usual] + name.removeprefix(usual)] = value
    save_file(tensors, tmp_path / "model.safetensors")
    target = open_checkpoint(model)
    expected, found = open_mtp(target), open_mtp(target, tmp_path)
    assert found.config == expected.config
    assert found.tensors.shapes() == expected.tensors.shapes()
    assert all(torch.equal(found.tensors.load(name), expected.tensors.load(name)) for name in found.tensors.shapes())
    section = SpeculationSection(method="mtp", draft=str(tmp_path))
    run_ = resolve(
        Config(model=ModelSection(target=str(model)), speculation=section, engine=EngineSection(device="cpu"))
    )
    assert run_.description["draft"] == f"{tmp_path} (mtp)"


def test_what_mtp_is_not_for(model: Path) -> None:
    def resolved(target: str, **speculation: object) -> object:
        section = SpeculationSection(**{"method": "mtp", **speculation})  # type: ignore[arg-type]
        return resolve(
            Config(model=ModelSection(target=target), speculation=section, engine=EngineSection(device="cpu"))
        )

    with pytest.raises(ModelError, match="mtp is for hybrids"):
        resolved("random:tiny")
    with pytest.raises(ConfigError, match="drafts with a layer of the target"):
        resolved(str(model), draft="random:tiny")
    with pytest.raises(ConfigError, match="topk must be 1"):
        resolved(str(model), topk=2)
