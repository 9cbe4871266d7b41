"""A model's generation_config.json: what it decides, what overrides it, and what is named because it is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbatch import LLM, generate_file
from specbatch.config_load import dump_config, load_config
from specbatch.errors import InputError, SpecbatchError
from specbatch.setup.resolve import resolve
from specbatch.types import SamplingParams
from tests.tiny_checkpoint import write_checkpoint

ON_CPU = {"device": "cpu", "kv_cache_tokens": 512, "draft": None, "method": "none"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter


def model(folder: Path, **generation: Any) -> Path:
    write_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def resolved(folder: Path, *sets: str) -> tuple[dict[str, Any], list[str]]:
    """The options of `sampling` that are not the defaults, and the notes on them."""
    run = resolve(load_config(None, [f"model.target={folder}", "engine.device=cpu", *sets]))
    usual, found = SamplingParams(), run.config.sampling
    notes = [note for note in run.notes if "generation_config" in note]
    return {
        n: getattr(found, n) for n in SamplingParams.__dataclass_fields__ if getattr(found, n) != getattr(usual, n)
    }, notes


SAMPLES = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
TAKEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("file", "sets", "expected", "words"),
    [
        ({}, [], {}, []),
        ({"eos_token_id": 0, "pad_token_id": 0, "_from_model_config": True, "use_cache": False}, [], {}, []),
        (SAMPLES, [], TAKEN, ["sampling: temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"]),
        (SAMPLES, ["model.generation_config=none"], {}, []),
        # What is given counts, the default too.
        (SAMPLES, ["sampling.temperature=0"], {n: v for n, v in TAKEN.items() if n != "temperature"}, ["top_k 20"]),
        (SAMPLES, ["sampling.temperature=0.1", "sampling.top_k=0"], TAKEN | {"temperature": 0.1, "top_k": 0}, []),
        # do_sample decides, as in transformers.
        ({"do_sample": True}, [], {"temperature": 1.0}, ["sampling: temperature 1.0"]),
        ({"do_sample": True}, ["sampling.temperature=0.3"], {"temperature": 0.3}, []),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, [], {}, ["do_sample is not true: temperature 0.6"]),
        ({"temperature": 0.6}, [], {}, ["do_sample is not true: temperature 0.6"]),
        ({"temperature": 1.0, "top_k": 50, "top_p": 1.0}, [], {}, []),
        ({"do_sample": False, "repetition_penalty": 1.3}, [], {"repetition_penalty": 1.3}, ["repetition_penalty 1.3"]),
        ({"do_sample": True, "temperature": 0.0}, [], {}, []),
        ({"do_sample": True, "top_k": -1, "min_p": 0.05}, [], {"temperature": 1.0, "min_p": 0.05}, ["min_p 0.05"]),
        ({"max_new_tokens": 32, "min_new_tokens": 2}, [], {"max_tokens": 32, "min_tokens": 2}, ["max_tokens 32"]),
        ({"max_new_tokens": 32}, ["sampling.max_tokens=256"], {}, []),
        ({"stop_strings": "END"}, [], {"stop": ("END",)}, ["stop ('END',)"]),
        # Each of these changes what transformers writes.
        *(
            ({name: value}, [], {}, ["not supported, so not used", name])
            for name, value in {
                **{"no_repeat_ngram_size": 3, "suppress_tokens": [0], "begin_suppress_tokens": [1, 2], "min_length": 5},
                **{"forced_bos_token_id": 0, "forced_eos_token_id": 1, "bad_words_ids": [[3]], "num_beams": 4},
                **{"sequence_bias": [[[3], 1.0]], "typical_p": 0.5, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
                **{"exponential_decay_length_penalty": [5, 1.5], "guidance_scale": 2.0, "penalty_alpha": 0.6},
                **{"max_length": 64, "encoder_repetition_penalty": 1.2, "watermarking_config": {"bias": 2}},
                **{"max_time": 5.0, "token_healing": True, "top_h": 0.4, "own_key": "value", "dola_layers": "high"},
            }.items()
        ),
        (
            {
                **{"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "min_length": 0},
                **{"forced_eos_token_id": None, "length_penalty": 1.0, "max_length": 20, "diversity_penalty": 0.0},
            },
            [],
            {},
            [],
        ),
    ],
)  # fmt: skip
def test_what_a_file_decides(
    file: dict[str, Any], sets: list[str], expected: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    found, notes = resolved(model(tmp_path / "m", **file), *sets)
    assert {name: found.get(name, getattr(SamplingParams(), name)) for name in expected} == expected
    assert set(found) <= set(expected)
    assert all(any(word in note for note in notes) for word in words), notes
    assert words or sets or not notes


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"do_sample": "yes"}, "do_sample"),
        ({"do_sample": True, "temperature": "hot"}, "temperature must be a number"),
        ({"do_sample": True, "top_p": 2}, "top_p must be > 0 and <= 1"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be > 0"),
        ({"max_new_tokens": 2, "min_new_tokens": 4}, "min_tokens must be <= max_tokens"),
        ({"stop_strings": [1]}, "stop_strings"),
    ],
)
def test_wrong_values_are_named(file: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match="generation_config.json.*" + words) as caught:
        resolved(model(tmp_path / "m", **file))
    if "do_sample" not in words:
        assert "model.generation_config=none" in str(caught.value.hint)
    resolved(model(tmp_path / "m", **file), "model.generation_config=none")


def test_a_file_that_names_an_option_overrides_the_model(tmp_path: Path) -> None:
    """Also if it names the default. A configuration that is printed gives the same run again."""
    path = model(tmp_path / "m", **SAMPLES)
    config = tmp_path / "own.yaml"
    config.write_text(f"model: {{target: {path}}}\nengine: {{device: cpu}}\nsampling: {{temperature: 0.0}}\n")
    own = resolve(load_config(config)).config
    assert own.sampling == SamplingParams(top_p=0.8, top_k=20, repetition_penalty=1.05)
    config.write_text(dump_config(own))
    assert resolve(load_config(config)).config == own


def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """With the same files. Its end token is that of generation_config.json alone, which config.json's is not."""
    path = model(tmp_path / "m", repetition_penalty=1.7, eos_token_id=[9], min_new_tokens=3, max_new_tokens=12)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 5, 6], [20, 30, 40], [3, 3, 3, 3]]
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(str(path), **ON_CPU) as llm:
        assert any("repetition_penalty 1.7" in note for note in llm.notes)
        found = (
            [result["token_ids"] for result in llm.generate([{**row, "logprobs": 0} for row in rows])]
            if False
            else [result["text"] for result in llm.generate(rows)]
        )
    with LLM(str(path), **ON_CPU, generation_config="none") as llm:
        plain = [result["text"] for result in llm.generate([{**row, "max_tokens": 12} for row in rows])]
    from specbatch.models.formats.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    expected = []
    for prompt in prompts:
        output = theirs.generate(torch.tensor([prompt]), pad_token_id=0)[0, len(prompt) :]
        expected.append(tokenizer.decode(output, skip_special_tokens=True))
    assert found == expected
    assert found != plain


def test_a_job_records_what_was_decided(tmp_path: Path) -> None:
    path = model(tmp_path / "m", do_sample=True, temperature=0.9, max_new_tokens=4)
    rows = [{"prompt_token_ids": [3, i + 4]} for i in range(6)] + [{"prompt_token_ids": [3, 4], "temperature": 0}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"target": str(path), **ON_CPU}
    report = generate_file("in.jsonl", "out.jsonl", **options)
    assert report.stats["config"]["sampling"]["temperature"] == 0.9
    assert any("temperature 0.9" in note for note in report.stats["notes"])
    texts = [result["text"] for result in report.results()]
    # The same options, given: the same job.
    generate_file("in.jsonl", "out.jsonl", temperature=0.9, max_tokens=4, **options)
    with pytest.raises(InputError, match="temperature"):
        generate_file("in.jsonl", "out.jsonl", generation_config="none", max_tokens=4, **options)
    plain = generate_file("in.jsonl", "plain.jsonl", generation_config="none", max_tokens=4, **options)
    greedy = [result["text"] for result in plain.results()]
    assert texts[:6] != greedy[:6]
    assert texts[6] == greedy[6]
