"""kill -9 and resume over the real engine and tiny random models, as processes. The script
`scripts/check/check_faults.py` does the same with a real model and more."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specbatch.job.paths import partial_path

ROWS, KILLS = 32, 3
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def run_command(folder: str, arguments: list[str]) -> None:
    """The body of a process: the real command, its stderr in a file."""
    os.chdir(folder)
    with open("stderr.txt", "w") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    from specbatch.cli import app

    sys.argv = ["specbatch", *arguments]
    app(arguments, prog_name="specbatch")


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that are forked from one that has imported torch, but has computed nothing: a start costs little."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.job.test_faults", "specbatch.cli", "specbatch.engine.build"])
    return context


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
        row: dict[str, Any] = {"id": i, "prompt": (shared if i % 3 else "ab ab ab ") + f"Q: {i}?", "max_tokens": 24}
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


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_kill_9_and_resume_give_the_same_bytes(
    method: str, tmp_path: Path, model_folders: tuple[Path, Path], processes: ForkServerContext
) -> None:
    target, draft = model_folders
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    settings = [f"model.target={target}", f"speculation.method={method}", "engine.max_batch_size=4"]
    # So small that rows are preempted, at other moments after a resume than in the run that nothing disturbs.
    settings += ["engine.kv_cache_tokens=640", "engine.prefill_chunk_tokens=48"]
    settings += [f"speculation.draft={draft}"] if method == "draft_model" else []
    options = [word for setting in settings for word in ("--set", setting)]

    def start(output: str) -> BaseProcess:
        command = ["generate", "d.jsonl", "-o", output, *options]
        process = processes.Process(target=run_command, args=(str(tmp_path), command))
        process.start()
        return process

    def finish(output: str) -> bytes:
        process = start(output)
        process.join(60)
        assert process.exitcode == 1, (tmp_path / "stderr.txt").read_text()  # rows with empty prompts are there
        return (tmp_path / output).read_bytes()

    whole = finish("whole.jsonl")
    stats = json.loads((tmp_path / "whole.stats.json").read_text())
    assert stats["rows"]["failed"] == 2
    if method != "none":
        assert stats["speculation"]["accepted"] > 20, stats["speculation"]

    rng = random.Random(method)
    partial = partial_path(tmp_path / "d.out")
    for kill in range(KILLS):
        process = start("d.out")
        wait_for_rows(partial, ROWS * kill // KILLS + rng.randrange(ROWS // KILLS - 4), process)
        time.sleep(rng.random() * 0.03)
        process.kill()
        process.join()
        assert process.exitcode == -9, "the run was over before it could be killed"
        assert not (tmp_path / "d.out").exists()
    assert finish("d.out") == whole
    assert "resuming" in (tmp_path / "stderr.txt").read_text()
    assert not partial.exists()


def wait_for_rows(partial: Path, count: int, process: BaseProcess) -> None:
    """Until more than `count` results are there."""
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.read_bytes().count(b'","row":{') > count):
        assert process.is_alive(), (partial.parent / "stderr.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
