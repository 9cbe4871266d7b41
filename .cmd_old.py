def without_template(config: Config) -> ResolvedRun:
    run = resolve(replace(config, data=replace(config.data, prompts_as_chat=False)))
    run.tokenizer.chat_template = None
    return run


@pytest.mark.slow
def test_prompts_that_the_target_makes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template whose user speaks up to the first `e`: the target's own text up to there is the prompt."""

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


def tiny_model(folder: Path, layers: int = 7, longest: int = 512) -> Path:
    """A target with files: random weights, bytes as tokens, a chat template."""
    sizes = {"vocab_size": 260, "eos_token_id": 256}
    return write_checkpoint(folder, num_hidden_layers=layers, max_position_embeddings=longest, **sizes)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers, training, evaluation; then again, which does nothing; then with more data to evaluate."""

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
