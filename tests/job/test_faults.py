"""kill -9, a crash, and resume over the real engine and tiny random models. The script `scripts/check/check_faults.py`
does the same with a real model and more."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specbatch import cli
from specbatch.files.paths import partial_path
from tests.processes import Command

ROWS = 16
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and as its draft the same model without its last layer."""
    folder = tmp_path_factory.mktemp("models")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    torch.manual_seed(0)
    target = LlamaForCausalLM(tiny_config(len(vocab), num_layers=2))
    draft = LlamaForCausalLM(tiny_config(len(vocab), num_layers=1))
    draft.load_state_dict(target.state_dict(), strict=False)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def tiny_config(vocab_size: int, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,  # with small weights a token predicts itself: drafts are often right, not always
        bos_token_id=0,
        eos_token_id=1,
    )


def rows() -> list[Any]:
    shared = "Q: one? A: 1. Q: two? A: 2. Q: three? A: 3. "
    made: list[Any] = []
    for i in range(ROWS):
        row: dict[str, Any] = {"id": i, "prompt": (shared if i % 3 else "ab ab ab ") + f"Q: {i}?", "max_tokens": 30}
        if i % 2:
            row |= {"temperature": (0.5, 0.8, 1.2)[i % 3], "top_p": 0.95}
        if i % 5 == 0:
            row["logprobs"] = 2
        if i % 7 == 0:
            row["n"] = 2
        if i % 8 == 3:
            row["seed"] = i
        if i % 9 == 0:
            row["stop"] = ["e", "zz"]
        made.append({"id": i, "prompt": ""} if i % 16 == 5 else row)
    return made


@pytest.mark.parametrize(
    "method", ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "draft_model", "mtp"))]
)
def test_kill_9_crash_and_resume_give_the_same_bytes(
    method: str, tmp_path: Path, model_folders: tuple[Path, Path]
) -> None:
    target, draft = model_folders if method != "mtp" else ("random:tiny-hybrid", None)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    settings = [f"model.target={target}", f"speculation.method={method}", "engine.device=cpu"]
    # So small that rows are preempted, at other moments after a resume than in the run that nothing disturbs.
    settings += ["engine.max_batch_size=8", "engine.kv_cache_tokens=192", "engine.prefill_chunk_tokens=48"]
    settings += [f"speculation.draft={draft}"] if method == "draft_model" else []
    options = [word for setting in settings for word in ("--set", setting)]

    def start(output: str) -> Command:
        return Command(tmp_path, "generate", "d.jsonl", "-o", output, "--certificate", *options, main=cli.main)

    def finish(output: str) -> str:
        command = start(output)
        _, log = command.communicate()
        assert command.returncode == 1, log  # a row has an empty prompt
        return log

    finish("whole.jsonl")
    stats = json.loads((tmp_path / "whole.stats.json").read_text())
    assert stats["rows"]["failed"] == 1
    assert stats["session"]["preemptions"] > 0
    if method in ("ngram", "draft_model"):
        assert stats["speculation"]["accepted"] > 20, stats["speculation"]

    rng = random.Random(method)
    partial = partial_path(tmp_path / "d.out")
    for kill, number in enumerate((signal.SIGKILL, signal.SIGSEGV)):
        command = start("d.out")
        command.wait_for_rows(partial, ROWS // 3 * kill + rng.randrange(3))
        time.sleep(rng.random() * 0.03)
        command.send_signal(number)
        command.communicate()
        assert command.returncode == -number, "the run was over before it could be killed"
        assert not (tmp_path / "d.out").exists()
    log = finish("d.out")
    assert "resuming" in log
    assert log.count("the last run crashed (segmentation fault") == 1
    assert (tmp_path / "d.out").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "d.out").read_bytes().count(b'"certificate"') == stats["margins"]["rows"] == ROWS // 2
    assert json.loads((tmp_path / "d.out.stats.json").read_text())["margins"] == stats["margins"]
    assert not partial.exists()
