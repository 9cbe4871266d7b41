"""scripts/train_draft/train_draft.py: the unrolled training against our own drafting, the checkpoint, data, resuming,
a whole run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import LlamaConfig

from specbatch.cache.pages import PagePool
from specbatch.config import Config, DataSection
from specbatch.config_load import load_config
from specbatch.draft.network import EagleNet
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.errors import InputError
from specbatch.models.config import expected_tensors
from specbatch.models.eagle_config import default_aux_layers
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import open_eagle_head
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.models.weight_loader import WeightLoader
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.build import build_decoder
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.setup.speculation import resolve_speculation
from specbatch.types import SamplingParams
from tests.oracle.engine import OracleEngine
from tests.oracle.neural import NeuralProposer
from tests.oracle.ngram import NoProposer
from tests.oracle.proposer import Proposer
from tests.oracle.spans import Span, batch_of
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import (
    CPU,
    VOCAB,
    RandomTensors,
    attention_of,
    random_prompts,
    run,
    target_config,
    tiny_config,
)

LAYERS, WIDTH = 8, 41  # of the target, and of the draft vocabulary
DRAFT_IDS = torch.arange(VOCAB)[torch.arange(VOCAB) % 3 != 1][:WIDTH]


pytestmark = pytest.mark.usefixtures("scripts")


class Source(RandomTensors):
    """Random weights as a checkpoint has them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(shapes, seed=0)
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def close(self) -> None:
        """Nothing is open."""


class Trained:
    """The weights of a trained head, and what its files hold in addition."""

    def __init__(self, weights: dict[str, Tensor], files: TensorSource) -> None:
        self._weights, self._files = weights, files

    def load(self, name: str) -> Tensor:
        return self._weights[name] if name in self._weights else self._files.load(name)


def target_checkpoint() -> Checkpoint:
    config = tiny_config(LAYERS)
    return Checkpoint(None, config, Source(expected_tensors(config)), "random")


def random_head(seed: int = 1) -> Any:
    """A head in float64 whose every weight is random, so that nothing is hidden by a zero or a one."""
    from specbatch.train.eagle.head import DraftHead, head_config

    head = DraftHead(head_config(tiny_config(LAYERS), WIDTH).decoder, WIDTH).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name))
    return head


def inference_head(head: Any, target: Checkpoint, folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """The same head as the engine has it, through the checkpoint, and the target's decoder."""
    from specbatch.train.eagle.export import export
    from specbatch.train.eagle.head import head_config

    config = head_config(target.config, WIDTH)
    export(folder, config, head.state_dict(), DRAFT_IDS, target.config, torch.float32)
    checked = open_eagle_head(folder, "eagle3", target)
    opened, source = checked.config, checked.tensors
    decoder = build_decoder(target.config, target.tensors, 300, dtype, CPU)
    weights = WeightLoader(source, dtype, CPU)
    if dtype == torch.float64:  # the trained weights, not the float32 ones of the file
        weights = WeightLoader(Trained(head.state_dict(), source), dtype, CPU)
    model = EagleHead(opened, weights, decoder, attention_of(opened.decoder), 300)
    return model, decoder


@pytest.mark.parametrize("num_steps", [1, 5])
def test_unrolled_training_is_what_drafting_does(num_steps: int, tmp_path: Path) -> None:
    """Every chain of two sequences of a padded batch, every step: the training's logits are those that the engine's
    head gives, drafting step by step behind the same prefix with the same tokens."""
    from specbatch.train.eagle.head import rotary_tables
    from specbatch.train.target import FrozenTarget
    from specbatch.train.eagle.unroll import unroll

    target, head = target_checkpoint(), random_head()
    sequences = [p[:19] for p in random_prompts(2, shared=4, longest=40, seed=3)]
    sequences[1] = sequences[1][:12]
    length = 24
    tokens_BL = torch.zeros(2, length, dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BL[b, : len(tokens)] = torch.tensor(tokens)
    frozen = FrozenTarget(target, DRAFT_IDS, 2 * length, length, torch.float64, CPU)
    features, hidden = frozen.features(tokens_BL)
    tables = tuple(t.double() for t in rotary_tables(head.config, length + num_steps, CPU))
    with torch.no_grad():
        unrolled = [head.logits(h) for h in unroll(head, frozen.embedding_VE, tokens_BL, features, tables, num_steps)]

    model, decoder = inference_head(head, target, tmp_path)
    checked = 0
    for b, tokens in enumerate(sequences):
        layout = batch_of([Span([0], 0, len(tokens))], 64, CPU)
        cache = decoder.new_cache(64, torch.float64)
        last, captured = decoder.forward(torch.tensor(tokens), layout, cache, default_aux_layers(LAYERS))
        rows = frozen.rows(hidden, b * length + torch.arange(len(tokens)))
        logits = decoder.logits(last)
        assert torch.allclose(rows.logits_QW, logits[:, DRAFT_IDS], atol=1e-9)
        best = logits.argmax(-1)
        inside = torch.isin(best, DRAFT_IDS)
        assert torch.equal(rows.best_Q >= 0, inside)
        assert torch.equal(DRAFT_IDS[rows.best_Q[inside]], best[inside])
        for t in range(len(tokens) - 1):
            draft = model.new_cache(64, torch.float64)
            layout = batch_of([Span([0], 0, t + 1)], 64, CPU)
            fed = model.features(last[: t + 1], [c[: t + 1] for c in captured])
            out = model.forward(torch.tensor(tokens[1 : t + 2]), fed, layout, draft)[-1:]
            for j in range(min(num_steps, len(tokens) - 1 - t)):
                if j > 0:
                    layout = batch_of([Span([0], t + j, 1)], 64, CPU)
                    out = model.forward(torch.tensor(tokens[t + 1 + j : t + 2 + j]), out.clone(), layout, draft)
                assert torch.allclose(model.logits(out)[0], unrolled[j][b, t], atol=1e-9, rtol=1e-9), (b, t, j)
                checked += 1
    assert checked == sum(min(num_steps, n - 1 - t) for n in map(len, sequences) for t in range(n - 1))


def test_attention_of_later_steps_has_gradients_for_all_keys() -> None:
    """Against the equation written out: a softmax over the causal part and the diagonals."""
    from specbatch.train.eagle.unroll import attend

    generator = torch.Generator().manual_seed(0)

    def rand(heads: int) -> Tensor:
        return torch.randn(2, heads, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    q, keys, values = rand(4), [rand(2) for _ in range(3)], [rand(2) for _ in range(3)]
    inputs = [q, *keys, *values]
    found = attend(q, keys, values)
    k, v = ([x.repeat_interleave(2, 1) for x in xs] for xs in (keys, values))
    scores = (q @ k[0].transpose(2, 3)).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    diagonals = [(q * x).sum(-1, keepdim=True) for x in k[1:]]
    p = (torch.cat([scores, *diagonals], -1) / 8**0.5).softmax(-1)
    expected = p[..., :6] @ v[0] + sum(p[..., 6 + i : 7 + i] * v[1 + i] for i in range(2))
    assert torch.allclose(found, expected, atol=1e-12)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs, retain_graph=True),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)
        assert a.abs().max() > 0


def test_loss_is_masked_soft_cross_entropy_with_and_without_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafttrain import unroll
    from specbatch.train.target import TargetRows

    head = random_head()
    hidden = [torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows = [
        unroll.StepRows(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])),
        unroll.StepRows(torch.tensor([1, 2]), torch.tensor([1, 2])),
    ]
    logits = torch.randn(3, WIDTH, dtype=torch.float64) * 3
    target = TargetRows(logits, torch.tensor([5, -1, int(logits[2].argmax())]))
    gradients = []
    for kept in (2**30, 0):
        monkeypatch.setattr(unroll, "_KEPT_LOGITS", kept)
        found = unroll.losses(head, hidden, rows, target)
        gradients.append(torch.autograd.grad(found.total, [*hidden, head.lm_head.weight]))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert gradients[0][0][0, 2].abs().max() == 0, "its best token is not in the draft vocabulary"
    log_q = [torch.log_softmax(head.logits(h[0]), -1) for h in hidden]
    p = torch.softmax(logits, -1)
    first = -((p[0] * log_q[0][1]).sum() + (p[2] * log_q[0][3]).sum()) / 2
    second = -(p[2] * log_q[1][2]).sum()
    assert torch.allclose(found.steps[0], first)
    assert torch.allclose(found.steps[1], second)
    assert torch.allclose(found.total, (first + 0.8 * second) / 1.8)
    assert found.hits[0].tolist() == [int(log_q[0][1].argmax()) == 5, False, log_q[0][3].argmax() == logits[2].argmax()]


def test_collated_rows_teach_the_right_tokens() -> None:
    """Chain t at step j learns what the target says at position t + 1 + j; root and prediction are in the answer."""
    from specbatch.train.examples import Example, collate

    examples = [Example(list(range(100, 110)), 4, 0, True), Example(list(range(200, 207)), 5, 1, True)]
    batch = collate(examples, 4)
    assert batch.tokens_BL.shape == (2, 64)
    wanted = batch.target_rows_Q.tolist()
    assert wanted == [4, 5, 6, 7, 8, 64 + 5]
    flat = batch.tokens_BL.view(-1)
    for j, step in enumerate(batch.steps):
        pairs = list(zip(step.rows_R.tolist(), step.target_R.tolist(), strict=True))
        for row, q in pairs:
            assert wanted[q] == row + 1 + j
            assert flat[row + 1] >= (104 if row < 64 else 205), "the root is in the answer"
            assert flat[row + 2 + j] > 0, "and so is what it drafts"
        assert [row for row, _ in pairs] == [*range(3, 8 - j), *([68] if j == 0 else [])]


def test_batches_cover_every_example_once_within_their_size() -> None:
    from specbatch.train.examples import batches, padded_length

    lengths = [(37 * i) % 500 + 1 for i in range(300)] + [2000]
    plan = batches(lengths, 1024, seed=0, epoch=1)
    assert sorted(i for b in plan for i in b) == list(range(301))
    assert all(len(b) * padded_length(max(lengths[i] for i in b)) <= 1024 or len(b) == 1 for b in plan)
    assert plan == batches(lengths, 1024, seed=0, epoch=1)
    assert plan != batches(lengths, 1024, seed=0, epoch=2)
    padded = sum(len(b) * padded_length(max(lengths[i] for i in b)) for b in plan)
    assert sum(map(padded_length, lengths)) > 0.9 * padded


def test_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    from specbatch.train.examples import Example, draft_vocabulary
    from specbatch.train.eagle.export import vocabulary_maps

    examples = [
        Example([7, 7, 7, 7, 3, 9, 9, 5], 4, 0, True),  # the prompt's 7s do not count
        Example([1, 9, 3, 3, 12], 1, 1, True),
    ]
    ids, covered = draft_vocabulary(examples, 3, 20)
    assert ids.tolist() == [3, 5, 9]  # 3 and 9 three times each, 5 before 12
    assert covered == pytest.approx(7 / 8)
    assert draft_vocabulary(examples, 3, 20, always=[2])[0].tolist() == [2, 3, 9]
    assert draft_vocabulary(examples, 6, 20)[0].tolist() == [0, 1, 3, 5, 9, 12]
    assert draft_vocabulary(examples, 99, 20)[0].tolist() == list(range(20))
    maps = vocabulary_maps(ids, 20)
    assert (maps["d2t"] + torch.arange(3)).tolist() == [3, 5, 9]
    assert maps["t2d"].nonzero().view(-1).tolist() == [3, 5, 9]


def test_rounds_are_counted_as_the_engine_does() -> None:
    from specbatch.train.acceptance import count_rounds
    from specbatch.train.examples import Example

    example = Example(list(range(10)), 4, 0, True)  # first answer token 4, then 5 .. 9 from rounds
    hits = torch.zeros(10, 2, dtype=torch.bool)
    assert count_rounds(hits, example) == 5
    hits[3] = torch.tensor([True, True])  # 5, 6 and 7 in one round; then chain 6
    hits[6] = torch.tensor([False, True])  # the first is wrong: 8 alone
    assert count_rounds(hits, example) == 3
    assert count_rounds(torch.ones(10, 2, dtype=torch.bool), example) == 2


ROWS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "gsm8k": ({"question": "How many?", "answer": "4"}, [{"role": "user", "content": "How many?"}]),
    "mt_bench": ({"turns": ["first", "second"], "category": "x"}, [{"role": "user", "content": "first"}]),
    "arena-hard": ({"turns": [{"content": "first"}]}, [{"role": "user", "content": "first"}]),
    "self-instruct": (
        {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
        [{"role": "user", "content": "Sort.\n\nb a"}],
    ),
    "self-instruct without input": (
        {"instruction": "Sing.", "instances": [{"input": "", "output": "la"}]},
        [{"role": "user", "content": "Sing."}],
    ),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": ""}, [{"role": "user", "content": "Sort.\n\nb a"}]),
    "prompt": ({"prompt": "def f():", "test": "..."}, [{"role": "user", "content": "def f():"}]),
    "messages": (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ),
    "messages with an answer": (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
        [{"role": "user", "content": "u"}],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_prompts_of_every_kind(kind: str) -> None:
    from specbatch.train.prompts import messages_of

    row, messages = ROWS[kind]
    assert messages_of(row) == messages


def test_prompt_files(tmp_path: Path) -> None:
    from specbatch.train.prompts import PromptFile, read_lines, read_prompts, rows_of, write_lines

    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a", "b\u2028", "a", "c")]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]))
    assert PromptFile.parse(f"{path}:3") == PromptFile(path, 3)
    assert PromptFile.parse(str(path)) == PromptFile(path, None)
    assert [m[0]["content"] for m in read_prompts([PromptFile(path)])] == ["a", "b\u2028", "c"]
    prompts = read_prompts([PromptFile(path, 3)])
    assert [m[0]["content"] for m in prompts] == ["a", "b\u2028"]
    out = tmp_path / "rows.jsonl"
    write_lines(out, rows_of(prompts, [0.0, 0.8], as_text=False))
    rows = read_lines(out)
    assert rows[2]["messages"] == prompts[1]
    assert [(r["id"], r["temperature"], r["metadata"]) for r in rows] == [
        ("0-0@0", 0.0, {"prompt": 0}),
        ("0-1@0.8", 0.8, {"prompt": 0}),
        ("1-0@0", 0.0, {"prompt": 1}),
        ("1-1@0.8", 0.8, {"prompt": 1}),
    ]
    for bad in ("[1]", '{"text": "x"}', "{", '{"prompt": 5}', '{"messages": [3]}'):
        path.write_text(lines[0] + "\n" + bad)
        with pytest.raises(InputError, match="line 2"):
            read_prompts([PromptFile(path)])
    with pytest.raises(InputError, match="cannot read"):
        read_prompts([PromptFile(tmp_path / "none")])
    write_lines(out, [{"prompt": "half a pair: \ud83d"}])
    assert read_lines(out) == [{"prompt": "half a pair: \ud83d"}]
    out.write_text('{"text": "as results\u2028are written"}\n')
    assert read_lines(out) == [{"text": "as results\u2028are written"}]


def test_files_to_evaluate_on_have_names_of_their_own(tmp_path: Path) -> None:
    from specbatch.train.evaluate import held_out_rows
    from specbatch.train.prompts import PromptFile

    files = []
    for name in ("a/test.jsonl", "b/test.jsonl", "other.jsonl", "empty.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else json.dumps({"prompt": name}) + "\n")
        files.append(PromptFile(path))
    rows = held_out_rows(files[:3], as_text=False)
    assert [r["metadata"]["file"] for r in rows] == [str(files[0].path), str(files[1].path), "other"]
    assert len({r["id"] for r in rows}) == 3
    assert {r["temperature"] for r in rows} == {0.0}
    for wrong, words in (([files[0], files[0]], "given twice"), ([files[3]], "no prompts")):
        with pytest.raises(InputError, match=words):
            held_out_rows(wrong, as_text=False)


def test_ways_to_draft_do_not_mix_with_the_configuration(tmp_path: Path) -> None:
    """A configuration that tune wrote has a schedule; another may have a tree, which lookups cannot draft."""
    from specbatch.train.evaluate import parse_ways

    shape = DraftShape(2, 2, 5)
    wanted = [("none", None, None), ("ngram", None, DraftShape(5, 1, 6)), ("eagle3", str(tmp_path), shape)]
    wanted += [("draft_model", "dir:x", shape)]
    ways = parse_ways("none,ngram,2/2/5,dir:x:2/2/5")
    for before in (["schedule=[{max_batch: 4, num_steps: 2, topk: 2}]"], ["num_steps=3", "topk=4", "draft=head"]):
        for way, (method, draft, decided) in zip(ways, wanted, strict=True):
            sets = [f"speculation.{option}" for option in before] + way.sets(tmp_path)
            found = resolve_speculation(load_config(None, sets).speculation, "random:tiny", [])
            assert (found.method, found.section.draft) == (method, draft)
            assert found.schedule == ByBatch.always(decided)


def without_template(config: Config) -> ResolvedRun:
    run = resolve(replace(config, data=replace(config.data, prompts_as_chat=False)))
    run.tokenizer.chat_template = None
    return run


CONTENT = "{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("template", "before", "stop", "stop_ids"),
    [
        (f"<|end-257|>user\n{CONTENT}<|end-256|>\n<|end-257|>me: ", "<|end-257|>user\n", "<|end-256|>", [256, 257]),
        (f"User: {CONTENT}\n\nMe: ", "User: ", "Me:", []),
        (f"[INST] {CONTENT} [/INST]<|end-257|>", "[INST] ", "[/INST]<|end-257|>", [257]),
        (f"User: {CONTENT}\n \n", "User: ", None, []),
        (CONTENT, "", None, []),
    ],
)
def test_where_made_up_words_begin_and_end(template: str, before: str, stop: str | None, stop_ids: list[int]) -> None:
    """Decoded text does not show special tokens: they have to end it as tokens."""
    from specbatch.train.invent import ends, opening

    tokenizer = byte_tokenizer(260, [256, 257])
    texts = TextProcessor(tokenizer, DataSection(chat_template=template))
    found, after = opening(tokenizer, texts)
    assert found == before
    assert ends(after, tokenizer, texts) == {"stop": [] if stop is None else [stop], "stop_token_ids": stop_ids}


def test_scraps_and_repetitions_are_no_prompts() -> None:
    from specbatch.train.invent import sensible

    found = [" Say it in full.\n", "Say it.", "Say it in full.", "And what is <|end-256|> for?", "And what is that?"]
    kept = sensible(found, byte_tokenizer(260, [256, 257]))
    assert kept == [[{"role": "user", "content": text}] for text in ("Say it in full.", "And what is that?")]


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_once(adds: bool) -> None:
    """The template writes the token that begins a text, and the tokenizer may write it in front of text prompts too."""
    from specbatch.train.invent import opening

    tokenizer = byte_tokenizer(260, [256, 257])
    tokenizer.bos_token = "<|end-257|>"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|end-257|> $A", special_tokens=[("<|end-257|>", 257)]
        )
    before, _ = opening(tokenizer, TextProcessor(tokenizer, DataSection(chat_template="{{ bos_token }}u: " + CONTENT)))
    assert tokenizer.encode(before) == [257, *tokenizer.encode("u: ", add_special_tokens=False)]


@pytest.mark.slow
def test_prompts_that_the_target_makes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template whose user speaks up to the first `e`: the target's own text up to there is the prompt."""
    import train_draft

    target = tiny_model(tmp_path / "target", longest=128)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\ne\n{% endfor %}[assistant] "
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "p.jsonl").write_text('{"prompt": "Say it."}\n')
    command = [str(target), "--invent", "24", "-o", "out", "--max-tokens", "4", "--stage", "answers"]
    command += ["--set", "engine.kv_cache_tokens=8192", "--set", "data.chat_template=t.jinja", "--temperatures", "0"]
    assert train_draft.main([*command, "--data", "p.jsonl"]) == 0
    training = tmp_path / "out" / "training"
    tries = [json.loads(line) for line in (training / "invented.jsonl").read_text().splitlines()]
    assert len(tries) == 24
    assert len({t["text"] for t in tries}) > 20, "every try draws for itself"
    wanted = [t["text"].strip() for t in tries if t["finish_reason"] == "stop"]
    wanted = list(dict.fromkeys(w for w in wanted if len(w) >= 12))
    assert len(wanted) > 5
    rows = [json.loads(line) for line in (training / "prompts.jsonl").read_text().splitlines()]
    assert [r["messages"] for r in rows] == [[{"role": "user", "content": text}] for text in ("Say it.", *wanted)]
    assert "e" not in "".join(wanted)
    answers = (training / "answers.jsonl").read_bytes()
    capsys.readouterr()
    assert train_draft.main([*command, "--data", "p.jsonl"]) == 0
    assert capsys.readouterr().err.count("finished already") == 2
    assert (training / "answers.jsonl").read_bytes() == answers

    before = {name: (training / name).read_bytes() for name in ("invent.jsonl", "prompts.jsonl")}
    assert train_draft.main([*command, "--invent", "8"]) == 2
    assert "invented.jsonl answers other prompts" in capsys.readouterr().err
    assert {name: (training / name).read_bytes() for name in before} == before, "written over before it was refused"
    assert train_draft.main([*command, "--invent", "8", "--overwrite"]) == 0
    assert len((training / "invented.jsonl").read_text().splitlines()) == 8
    assert (training / "answers.jsonl").read_bytes() != answers

    changed = template.replace("m.content", "m.content|upper")
    refused = "{{ raise_exception('a system message is wanted') }}"
    for option, words in (
        (f"data.chat_template={changed}", "does not repeat"),
        (f"data.chat_template={refused}", "a system message is wanted"),
    ):
        assert train_draft.main([str(target), "--invent", "9", "-o", "out2", "--set", option]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(train_draft, "resolve", without_template)
    assert train_draft.main([str(target), "--invent", "9", "-o", "out2"]) == 2
    assert "needs a chat template" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_draft.main([str(target), "-o", "out3"])


def test_examples_are_split_by_prompt_and_end_with_the_end_token() -> None:
    from specbatch.train.examples import make_examples, split

    from specbatch.config import DataSection

    tokenizer = byte_tokenizer(300, [256])
    rows = [
        {
            "id": f"{n}@{t}",
            "messages": [{"role": "user", "content": "q" * n}],
            "temperature": t,
            "metadata": {"prompt": n},
        }
        for n in range(1, 11)
        for t in (0, 1)
    ]
    results = [{"id": r["id"], "text": "answer", "finish_reason": "stop"} for r in rows]
    results[0] |= {"text": None, "finish_reason": "error"}
    results[2] |= {"finish_reason": "length"}
    examples = make_examples(rows, results, tokenizer, DataSection(prompts_as_chat=True), 300, 64)
    assert len(examples) == 19
    assert bytes(examples[0].tokens[: examples[0].prompt_length]) == b"user: q\nassistant: "
    assert (bytes(examples[0].answer[:-1]), examples[0].answer[-1], examples[0].greedy) == (b"answer", 256, False)
    assert (bytes(examples[1].answer), examples[1].greedy) == (b"answer", True)
    short = make_examples(rows, results, tokenizer, DataSection(prompts_as_chat=True), 300, 24)
    assert max(len(e.tokens) for e in short) == 24
    train, held_out = split(examples, 0.2, 0)
    assert len({e.prompt for e in held_out}) == 2
    assert not {e.prompt for e in held_out} & {e.prompt for e in train}
    with pytest.raises(InputError, match="two prompts"):
        split(examples[:1], 0.2, 0)


def test_the_norms_of_a_head_begin_as_those_of_a_gemma() -> None:
    """They multiply by 1 + weight there, and the norm before the MLP has another name."""
    from specbatch.train.eagle.head import DraftHead, head_config, initialise

    config = target_config("gemma2", LAYERS, 32, VOCAB)
    target = Checkpoint(None, config, Source(expected_tensors(config)), "tiny")
    head = DraftHead(head_config(config, WIDTH).decoder, WIDTH)
    initialise(head, target, DRAFT_IDS, 0)
    prefix = f"model.layers.{LAYERS - 1}."
    for found, name in (
        (head.midlayer.hidden_norm, f"{prefix}input_layernorm.weight"),
        (head.midlayer.post_attention_layernorm, f"{prefix}pre_feedforward_layernorm.weight"),
        (head.norm, "model.norm.weight"),
    ):
        assert torch.equal(found.weight, (1 + target.tensors.load(name)).float())


def trainer(folder: Path, examples: list[Any], say: Callable[[str], None], max_steps: int) -> Any:
    """A training of the tiny target in float64, which saves after every step."""
    from specbatch.train.eagle.head import DraftHead, head_config, initialise
    from specbatch.train.target import FrozenTarget
    from specbatch.train.trainer import Trainer, TrainSettings

    target = target_checkpoint()
    head = DraftHead(head_config(target.config, WIDTH).decoder, WIDTH).double()
    initialise(head, target, DRAFT_IDS, 0)
    folder.mkdir(exist_ok=True)
    settings = TrainSettings(3, 1000, max_steps, 1e-2, 0.1, 0.01, 256, 0)
    frozen = FrozenTarget(target, DRAFT_IDS, 256, 64, torch.float64, CPU)
    return Trainer(settings, head, lambda: frozen, examples, examples[:4], folder, CPU, say, save_seconds=0.0)


def tiny_run(
    proposer: Callable[[Any], Proposer], decoder: Any, prompts: list[list[int]]
) -> tuple[list[Any], OracleEngine]:
    pool = PagePool(64, 4)
    engine = OracleEngine(
        decoder,
        proposer(pool),
        decoder.new_cache(256, torch.float64),
        pool,
        max_length=200,
        max_batch_size=4,
        prefill_chunk_tokens=32,
        prefix_cache=True,
        eos_token_ids=(),
    )
    return run(engine, prompts, SamplingParams(max_tokens=24)), engine


@pytest.mark.wide
def test_training_pays_in_the_engine_as_validation_says(tmp_path: Path) -> None:
    """Overfitted to the target's own answers: the loss falls, the engine takes exactly as many rounds as validation
    simulates, and the text is plain decoding's."""
    from specbatch.train.examples import Example

    target = target_checkpoint()
    decoder = build_decoder(target.config, target.tensors, 300, torch.float64, CPU)
    prompts = random_prompts(8, longest=12)
    plain, _ = tiny_run(lambda pool: NoProposer(), decoder, prompts)
    pairs = enumerate(zip(prompts, plain, strict=True))
    examples = [Example([*p, *c.token_ids], len(p), i, True) for i, (p, c) in pairs]
    training = trainer(tmp_path / "work", examples, lambda line: None, 60)
    records = training.run()
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), "the rest is the entropy of the target"
    summary = records[-1]["validation"]
    assert summary["accuracy"][0] > 0.35, "a third of the tokens is not in the draft vocabulary"

    model, decoder = inference_head(training._head, target, tmp_path / "head")

    def proposer(pool: PagePool) -> Proposer:
        net = EagleNet(model, model.new_cache(256, torch.float64))
        return NeuralProposer(net, DraftShape(3, 1, 4), VOCAB, 4, CPU)

    drafted, engine = tiny_run(proposer, decoder, prompts[:4])
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain[:4]]
    rounds = engine.stats.speculation.rounds
    assert summary["tokens_per_round"] == {"3": round(sum(e.num_chains for e in examples[:4]) / rounds, 4)}
    assert summary["tokens_per_round"]["3"] > 1.2


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    from specbatch.train.examples import Example

    examples = [Example(p[:40], 2, i, True) for i, p in enumerate(random_prompts(12, shared=8, longest=30))]
    whole = trainer(tmp_path / "a", examples, lambda line: None, 20)
    expected = whole.run()

    def interrupt(at: int, line: str) -> None:
        if line.startswith(f"step {at}:"):
            raise KeyboardInterrupt

    for stop in (8, 12, 16):
        part = trainer(tmp_path / "b", examples, partial(interrupt, stop), 20)
        with pytest.raises(KeyboardInterrupt):
            part.run()
    lines: list[str] = []
    part = trainer(tmp_path / "b", examples, lines.append, 20)
    records = part.run()
    assert lines[0].startswith("resuming training at step 15")
    for (name, a), b in zip(whole._head.state_dict().items(), part._head.state_dict().values(), strict=True):
        assert torch.equal(a, b), name

    def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "seconds"} for r in found]

    assert timeless(records) == timeless(expected)
    assert timeless([json.loads(line) for line in part.metrics.read_text().splitlines()]) == timeless(expected)
    again = trainer(tmp_path / "b", examples, lines.append, 20)
    assert timeless(again.run()) == timeless(expected)
    assert "all 20 steps are done" in lines[-1]
    with pytest.raises(InputError, match="max_steps: 20, now 21"):
        trainer(tmp_path / "b", examples, lines.append, 21).run()


def test_checkpoints_have_the_public_names(tmp_path: Path) -> None:
    from specbatch.train.eagle.export import export
    from specbatch.train.eagle.head import head_config

    target = target_checkpoint().config
    export(tmp_path, head_config(target, WIDTH), random_head().state_dict(), DRAFT_IDS, target)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        "self_attn.q_proj": (32, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "hidden_norm": (32,),
        "post_attention_layernorm": (32,),
    }
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (WIDTH, 32)}
    assert {n: tuple(t.shape) for n, t in tensors.items() if n not in ("d2t", "t2d")} == expected
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["d2t"] + torch.arange(WIDTH), DRAFT_IDS)
    assert torch.equal(tensors["t2d"].nonzero().view(-1), DRAFT_IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (WIDTH, VOCAB, 1)
    assert config["tie_word_embeddings"] is False
    assert LlamaConfig(**config).rope_parameters["rope_theta"] == 10000.0
    opened = open_eagle_head(tmp_path, "eagle3", replace(target_checkpoint(), config=target)).config
    assert (opened.draft_vocab_size, opened.has_vocab_map, opened.has_embedding) == (WIDTH, True, False)
    # Of the layers that training reads, under every reading of a file that names none.
    assert (opened.aux_layers, opened.norm_before_residual) == (default_aux_layers(LAYERS), False)
    assert opened.decoder.rope == target.rope


def tiny_model(folder: Path, layers: int = 7, longest: int = 512) -> Path:
    """A target with files: random weights, bytes as tokens, a chat template."""
    sizes = {"vocab_size": 260, "eos_token_id": 256}
    return write_checkpoint(folder, num_hidden_layers=layers, max_position_embeddings=longest, **sizes)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers, training, evaluation; then again, which does nothing; then with more data to evaluate."""
    import train_draft

    target = tiny_model(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(12)))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"And {i}?"}) + "\n" for i in range(3)))
    command = [str(target), "--data", "p.jsonl", "-o", "out", "--max-tokens", "16", "--draft-vocab", "200"]
    command += ["--unroll", "3", "--epochs", "4", "--batch-tokens", "256", "--set", "engine.kv_cache_tokens=4096"]
    command += [
        "--lr",
        "0.01",
        "--validation",
        "0.2",
        "--shapes",
        "none,2/2/5,ngram",
        "--eval",
        "q.jsonl:2",
        "p.jsonl:1",
    ]
    assert train_draft.main(command) == 0
    shown = capsys.readouterr()
    assert "answers: 24 with" in shown.err
    lines = shown.out.splitlines()
    ways = ["none", "2/2/5", "ngram"]
    assert lines[0].split() == ["tokens", "per", "round", "q", "p", "tok/s"]
    assert [line.split()[0] for line in lines[1:]] == ways
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "training" / "metrics.jsonl").read_text().splitlines()]
    validations = [r["validation"]["loss"] for r in records if "validation" in r]
    assert validations[-1] < validations[0]
    texts = []
    for number in range(len(ways)):
        results = (out / "training" / f"eval.{number}.results.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["text"] for line in results])
    assert len(texts[0]) == 3
    assert texts[0] == texts[1] == texts[2]
    report = json.loads((out / "acceptance.json").read_text())
    assert [r["way"] for r in report["runs"]] == ways
    assert [r["files"]["q"]["rows"] for r in report["runs"]] == [2] * len(ways)
    for entry in report["runs"]:
        total = sum(f["acceptance_length"] * f["rounds"] for f in entry["files"].values())
        tokens = sum(f["completion_tokens"] for f in entry["files"].values())
        assert total == pytest.approx(tokens - 3, abs=0.01)  # the first token of each row comes with its prompt
    before = (out / "model.safetensors").read_bytes()

    assert train_draft.main(command) == 0
    shown = capsys.readouterr()
    assert "is finished already" in shown.err
    assert "steps are done" in shown.err
    assert "evaluation:" not in shown.err
    assert shown.out.splitlines() == lines
    assert (out / "model.safetensors").read_bytes() == before

    assert train_draft.main([*command, "--stage", "training", "--epochs", "5"]) == 2
    assert "epochs: 4, now 5" in capsys.readouterr().err
    more = ["--stage", "evaluation", "--eval", "q.jsonl", "--shapes", "none"]
    assert train_draft.main([*command, *more]) == 0
    runs = json.loads((out / "acceptance.json").read_text())["runs"]
    assert [(r["way"], r["files"].keys(), r["files"]["q"]["rows"]) for r in runs] == [("none", {"q"}, 3)]
    if "matplotlib" in sys.modules:
        assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_found_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import train_draft

    target = tiny_model(tmp_path / "target", layers=6)
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    command = [str(target), "--data", "p.jsonl", "-o", "out"]
    for more, words in (
        ([], "only 6"),
        (["--shapes", "3/1"], "no draft shape"),
        (["--shapes", "3/1/9"], "num_draft_tokens"),
        (["--data", "p.jsonl:0"], "at least 1"),
        (["--temperatures", "0,warm"], "no number"),
        (["--set", "engine.devise=cpu"], "did you mean"),
    ):
        assert train_draft.main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "training" / "answers.jsonl").exists()
    command[0] = str(tiny_model(tmp_path / "deep"))
    (tmp_path / "empty.jsonl").write_text("\n")
    for more, words in (
        (["--invent", "-1"], "--invent"),
        (["--data", "empty.jsonl"], "no prompts to answer"),
        (["-o", "p.jsonl"], "cannot write p.jsonl"),
        (["--eval", "none.jsonl"], "cannot read none.jsonl"),
        (["--eval", "empty.jsonl"], "no prompts"),
        (["--eval", "p.jsonl", "--shapes", "3/1/4,nowhere:3/1/4"], "nowhere does not exist"),
        (["--stage", "training"], "run the stage answers first"),
        (["--stage", "evaluation", "--eval", "p.jsonl"], "run the stage training first"),
    ):
        assert train_draft.main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    without_data = [command[0], "-o", "out", "--stage", "evaluation", "--eval", "p.jsonl"]
    assert train_draft.main(without_data) == 2
    assert "run the stage training first" in capsys.readouterr().err
    assert not (tmp_path / "out" / "training" / "prompts.jsonl").exists()


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbatch.train.plot import plot

    said: list[str] = []
    records = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "validation": {"loss": 3.1, "accuracy": [0.1, 0.2]}},
        {"step": 2, "loss": 2.0},
    ]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot(records, tmp_path / "a.png", "title", said.append)
    assert "pip install" in said[0]
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert plot(records, tmp_path / "a.png", "title", said.append)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_products_give_nearly_the_same_loss_and_gradients() -> None:
    """As on CUDA: the target in bfloat16, the head's parameters in float32 under autocast."""
    from specbatch.train.examples import Example, collate
    from specbatch.train.eagle.head import rotary_tables
    from specbatch.train.target import FrozenTarget
    from specbatch.train.eagle.unroll import losses, unroll

    batch = collate([Example(p[:40], 2, i, True) for i, p in enumerate(random_prompts(6, shared=8, longest=30))], 3)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head = random_head().float()
        frozen = FrozenTarget(target_checkpoint(), DRAFT_IDS, 6 * 64, 64, dtype, CPU)
        features, hidden = frozen.features(batch.tokens_BL)
        assert features.dtype == dtype
        tables = rotary_tables(head.config, 64 + 3, CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            unrolled = unroll(head, frozen.embedding_VE, batch.tokens_BL, features, tables, 3)
            total = losses(head, unrolled, batch.steps, frozen.rows(hidden, batch.target_rows_Q)).total
        total.backward()
        assert {h.dtype for h in unrolled} == {torch.float32}, "the residual stream is as wide as the parameters"
        found.append((total.detach(), head.fc.weight.grad, head.midlayer.self_attn.k_proj.weight.grad))
    assert abs(float(found[0][0] - found[1][0])) < 0.02 * float(found[0][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.95


@pytest.mark.gpu
def test_training_on_cuda_goes_as_on_cpu(tmp_path: Path) -> None:
    """The target over Triton's kernels in bfloat16, autocast, the fused optimiser: losses near float32's on CPU."""
    from specbatch.train.examples import Example
    from specbatch.train.eagle.head import DraftHead, head_config, initialise
    from specbatch.train.target import FrozenTarget
    from specbatch.train.trainer import Trainer, TrainSettings

    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    examples = [Example(p[:60], 2, i, True) for i, p in enumerate(random_prompts(24, shared=8, longest=50))]
    target, settings = target_checkpoint(), TrainSettings(3, 100, 30, 1e-2, 0.1, 0.01, 512, 0)
    losses = []
    for device, dtype in ((CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
        folder = tmp_path / device.type
        folder.mkdir()
        for _ in range(2):  # the second reads the checkpoint on the device, and has nothing to do
            head = DraftHead(head_config(target.config, WIDTH).decoder, WIDTH)
            initialise(head, target, DRAFT_IDS, 0)
            frozen = partial(FrozenTarget, target, DRAFT_IDS, 512, 64, dtype, device)
            arguments = (examples[4:], examples[:4], folder, device, lambda line: None)
            records = Trainer(settings, head.to(device), frozen, *arguments, save_seconds=0.0).run()
            assert sum("loss" in r for r in records) == 30
        losses.append(torch.tensor([r["loss"] for r in records if "loss" in r]))
    assert (losses[0] - losses[1]).abs().max() < 0.05 * losses[0].max()
