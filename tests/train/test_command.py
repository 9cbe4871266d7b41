"""`specbatch train-draft` as a command: whole runs, resuming, mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from safetensors import SafetensorError
from typer.testing import CliRunner

import specbatch.setup.resolve
from specbatch.cli import app
from specbatch.config import Config
from specbatch.setup.resolve import ResolvedRun
from tests.tiny_checkpoint import write_checkpoint

Train = Callable[..., Result]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["train-draft", *map(str, arguments)])


def tiny_model(folder: Path, layers: int = 7, longest: int = 512) -> Path:
    """Write a target: random weights, bytes as tokens, a chat template."""
    sizes = {"vocab_size": 260, "eos_token_id": 256}
    return write_checkpoint(folder, num_hidden_layers=layers, max_position_embeddings=longest, **sizes)


def write_rows(path: Path, field: str, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


EAGLE = ["--draft-vocab", "200", "--unroll", "3"]
BLOCK = ["--kind", "block", "--block-size", "4", "--layers", "1", "--inner-size", "8", "--draft-vocab", "200"]
WAYS = {"eagle3": ["none", "2/2/5", "ngram"], "block": ["none", "2/2/5", "4/1/5"]}


@pytest.mark.parametrize(
    "kind", [pytest.param("eagle3", marks=pytest.mark.slow), pytest.param("block", marks=pytest.mark.wide)]
)
def test_a_whole_run(kind: str, tmp_path: Path, train: Train) -> None:
    """Answers, training, evaluation; then again, which does nothing; then with more data to evaluate."""
    target, ways = tiny_model(tmp_path / "target"), WAYS[kind]
    write_rows(tmp_path / "p.jsonl", "prompt", [f"Say {i}." for i in range(12)])
    write_rows(tmp_path / "q.jsonl", "question", [f"And {i}?" for i in range(3)])
    command = ["p.jsonl", "--model", target, "-o", "out", "--max-tokens", "16", "--batch-tokens", "256"]
    command += ["--epochs", "4", "--lr", "0.01", "--validation", "0.2", *(EAGLE if kind == "eagle3" else BLOCK)]
    command += ["--set", "engine.kv_cache_tokens=4096"]
    measured = ["--eval", "q.jsonl:2", "--eval", "p.jsonl:1", "--shapes", ",".join(ways)]
    shown = train(*command, *measured)
    assert shown.exit_code == 0, shown.output
    assert "answers: 24 with" in shown.stderr
    lines = shown.stdout.splitlines()
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
        total = sum(f["acceptance_length"] * f["rounds"] for f in entry["files"].values() if f["rounds"])
        tokens = sum(f["completion_tokens"] for f in entry["files"].values())
        if entry["way"] != "none":
            assert total == pytest.approx(tokens - 3, abs=0.01)  # the first token of each row comes with its prompt
    before = (out / "model.safetensors").read_bytes()

    shown = train(*command, *measured)
    assert shown.exit_code == 0
    assert "is finished already" in shown.stderr
    assert "steps are done" in shown.stderr
    assert "evaluation:" not in shown.stderr
    assert shown.stdout.splitlines() == lines
    assert (out / "model.safetensors").read_bytes() == before

    shown = train(*command, "--stage", "training", "--epochs", "5")
    assert shown.exit_code == 2
    assert "epochs: 4, now 5" in shown.stderr
    more = ["--stage", "evaluation", "--eval", "q.jsonl", "--shapes", "none"]
    assert train(*command, *more).exit_code == 0
    runs = json.loads((out / "acceptance.json").read_text())["runs"]
    assert [(r["way"], r["files"].keys(), r["files"]["q"]["rows"]) for r in runs] == [("none", {"q"}, 3)]
    if "matplotlib" in sys.modules:
        assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_found_before_any_work(tmp_path: Path, train: Train) -> None:
    shallow, target = tiny_model(tmp_path / "shallow", layers=6), tiny_model(tmp_path / "target")
    write_rows(tmp_path / "p.jsonl", "prompt", ["x"])
    (tmp_path / "empty.jsonl").write_text("\n")
    base = ["p.jsonl", "--model", target, "-o", "out"]
    for arguments, words in (
        (["p.jsonl", "--model", shallow, "-o", "out"], "only 6"),
        (["p.jsonl", "--model", shallow, "-o", "out", "--kind", "block"], "cannot read 3 layers"),
        ([*base, "--kind", "medusa"], "kinds: eagle3, block"),
        ([*base, "--stage", "cooking"], "stages: answers"),
        ([*base, "--block-size", "4"], "--block-size is for --kind block"),
        ([*base, "--kind", "block", "--unroll", "4"], "--unroll is for --kind eagle3"),
        ([*base, "--kind", "block", "--block-size", "1"], "--block-size must be at least 2"),
        ([*base, "--kind", "block", "--variation", "2"], "from 0 to 1"),
        ([*base, "--kind", "block", "--head", "gru"], "heads: domino, markov, none"),
        ([*base, "--kind", "block", "--markov-rank", "4"], "--markov-rank is for --head markov"),
        ([*base, "--kind", "block", "--head", "none", "--inner-size", "4"], "--inner-size is for --head domino"),
        ([*base, "--head", "none"], "--head is for --kind block"),
        ([*base, "--kind", "block", "--blocks", "0"], "--blocks must be at least 1"),
        ([*base, "--validation", "1"], "--validation is a share"),
        ([*base, "--lr", "0"], "--lr must be a number above 0"),
        ([*base, "--lr", "inf"], "--lr must be a number above 0"),
        ([*base, "--temperatures", "0,-1"], "-1 is no temperature"),
        ([*base, "--temperatures", "nan"], "nan is no temperature"),
        ([*base, "--shapes", "3/1/4"], "add --eval"),
        ([*base[1:], "--stage", "evaluation"], "give them by --eval"),
        ([*base, "--eval", "p.jsonl", "--shapes", "3/1"], "no draft shape"),
        ([*base, "--eval", "p.jsonl", "--shapes", "3/1/9"], "num_draft_tokens"),
        ([*base, "--kind", "block", "--eval", "p.jsonl", "--shapes", "9/1/10"], "does not fit these blocks"),
        (["p.jsonl:0", *base[1:]], "at least 1"),
        ([*base, "--temperatures", "0,warm"], "no number"),
        ([*base, "--set", "engine.devise=cpu"], "did you mean"),
        ([*base, "--method", "ngram"], "decides itself how to draft"),
        ([*base, "--temperature", "1"], "--temperatures"),
        ([*base, "--invent", "-1"], "--invent must be at least 0"),
        ([*base[1:]], "there are no prompts"),
        (["empty.jsonl", *base[1:]], "no prompts to answer"),
        (["p.jsonl", "--model", target, "-o", "p.jsonl"], "cannot write p.jsonl"),
        ([*base, "--eval", "none.jsonl"], "cannot read none.jsonl"),
        ([*base, "--eval", "empty.jsonl"], "no prompts"),
        ([*base, "--eval", "p.jsonl", "--shapes", "3/1/4,nowhere:3/1/4"], "nowhere does not exist"),
        ([*base, "--stage", "training"], "run the stage answers first"),
        ([*base[1:], "--stage", "evaluation", "--eval", "p.jsonl"], "run the stage training first"),
    ):
        shown = train(*arguments)
        assert shown.exit_code == 2, (arguments, shown.output)
        assert words in shown.stderr, (arguments, shown.stderr)
    assert not (tmp_path / "out" / "training" / "prompts.jsonl").exists()


def without_template(config: Config) -> ResolvedRun:
    run = specbatch.setup.resolve.resolve(replace(config, data=replace(config.data, prompts_as_chat=False)))
    run.tokenizer.chat_template = None
    return run


@pytest.mark.slow
def test_prompts_that_the_target_makes_up(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose user speaks up to the first `e`: the target's own text up to there is the prompt."""
    target = tiny_model(tmp_path / "target", longest=128)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\ne\n{% endfor %}[assistant] "
    (tmp_path / "t.jinja").write_text(template)
    write_rows(tmp_path / "p.jsonl", "prompt", ["Say it."])
    command = ["p.jsonl", "--model", target, "-o", "out", "--max-tokens", "4", "--stage", "answers"]
    command += ["--set", "engine.kv_cache_tokens=8192", "--set", "data.chat_template=t.jinja", "--temperatures", "0"]
    assert train(*command, "--invent", "24").exit_code == 0
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
    shown = train(*command, "--invent", "24")
    assert shown.exit_code == 0
    assert shown.stderr.count("finished already") == 2
    assert (training / "answers.jsonl").read_bytes() == answers

    before = {name: (training / name).read_bytes() for name in ("invent.jsonl", "prompts.jsonl")}
    shown = train(*command, "--invent", "8")
    assert shown.exit_code == 2
    assert "invented.jsonl answers other prompts" in shown.stderr
    assert {name: (training / name).read_bytes() for name in before} == before, "written over before it was refused"
    assert train(*command, "--invent", "8", "--overwrite").exit_code == 0
    assert len((training / "invented.jsonl").read_text().splitlines()) == 8
    assert (training / "answers.jsonl").read_bytes() != answers

    changed = template.replace("m.content", "m.content|upper")
    refused = "{{ raise_exception('a system message is wanted') }}"
    for option, words in (
        (f"data.chat_template={changed}", "does not repeat"),
        (f"data.chat_template={refused}", "a system message is wanted"),
    ):
        shown = train("--model", target, "--invent", "9", "-o", "out2", "--set", option)
        assert shown.exit_code == 2
        assert words in shown.stderr
    monkeypatch.setattr("specbatch.startup.resolving", lambda console: without_template)
    shown = train("--model", target, "--invent", "9", "-o", "out2")
    assert shown.exit_code == 2
    assert "needs a chat template" in shown.stderr


@pytest.mark.wide
def test_damaged_files_are_named(tmp_path: Path, train: Train) -> None:
    """A file that a killed process or a full disk has left is an error with a hint, or is made again."""
    write_rows(tmp_path / "p.jsonl", "prompt", ["Say 1.", "Say 2.", "Say 3."])
    command = ["p.jsonl", "--model", tiny_model(tmp_path / "target"), "-o", "out", "--max-tokens", "8", *BLOCK]
    command += ["--batch-tokens", "256", "--max-steps", "2", "--set", "engine.kv_cache_tokens=4096"]
    assert train(*command).exit_code == 0
    training = tmp_path / "out" / "training"
    checkpoint, metrics = training / "checkpoint.pt", training / "metrics.jsonl"
    whole, records = checkpoint.read_bytes(), metrics.read_text()

    for damaged in (b"", b"words", whole[: len(whole) // 2]):
        checkpoint.write_bytes(damaged)
        shown = train(*command)
        assert (shown.exit_code, "is damaged" in shown.stderr) == (2, True), shown.output
        assert "--overwrite starts again" in shown.stderr
    checkpoint.write_bytes(whole)
    metrics.write_text("{half\n")
    assert f"{Path('out/training/metrics.jsonl')} is damaged" in train(*command).stderr
    for kept in ("", records[: len(records) // 2]):
        metrics.write_text(kept)
        assert train(*command).exit_code == 0
        assert "validation" in json.loads(metrics.read_text().splitlines()[-1])
    report = tmp_path / "out" / "acceptance.json"
    for text in ("{half", "[]"):
        report.write_text(text)
        shown = train(*command, "--eval", "p.jsonl", "--shapes", "none")
        assert (shown.exit_code, "acceptance.json is damaged" in shown.stderr) == (2, True), shown.output


def test_a_full_disk_is_named(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "p.jsonl", "prompt", ["Say 1.", "Say 2.", "Say 3."])
    command = ["p.jsonl", "--model", tiny_model(tmp_path / "target"), "-o", "out", "--max-tokens", "8", *BLOCK]
    command += ["--batch-tokens", "256", "--max-steps", "2", "--set", "engine.kv_cache_tokens=4096"]
    (tmp_path / "out" / "training").mkdir(parents=True)
    temporary = tmp_path / "out" / "training" / "checkpoint.tmp"
    temporary.symlink_to("/dev/full")  # a device that is always full
    shown = train(*command)
    assert (shown.exit_code, "cannot write out/training/checkpoint.tmp" in shown.stderr) == (2, True), shown.output
    temporary.unlink()

    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: IoError(StorageFull)")

    with monkeypatch.context() as patch:
        patch.setattr("specbatch.train.checkpoint.save_file", fail)
        shown = train(*command)
    assert (shown.exit_code, "cannot write out/model.safetensors.tmp" in shown.stderr) == (2, True), shown.output
    assert train(*command).exit_code == 0


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path, train: Train) -> None:
    write_rows(tmp_path / "p.jsonl", "prompt", ["Say 1.", "Say 2.", "Say 3."])
    command = ["p.jsonl", "--model", tiny_model(tmp_path / "target"), "-o", "out", "--max-tokens", "8", *BLOCK]
    shown = train(*command, "--lr", "1e30", "--batch-tokens", "64", "--set", "engine.kv_cache_tokens=4096")
    assert (shown.exit_code, "lower --lr" in shown.stderr) == (2, True), shown.output
    assert not (tmp_path / "out" / "model.safetensors").exists()
