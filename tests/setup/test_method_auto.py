"""speculation.method: auto: the drafter that comes with specbatch, for its target only; else n-grams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, ModelError
from specbatch.models.catalog import cached_path, catalog, path_of
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.setup.resolve import resolve
from specbatch.setup.speculation import decide_method

TARGET = "builtin:smollm2-135m-instruct"
HEAD, DRAFTER = f"{TARGET}-eagle3", f"{TARGET}-block"


# Of the built-in target's geometry, because its file need not be there.
GEOMETRY = "model.target=random:smollm2-135m"
BLOCK = ["speculation.method=block", f"speculation.draft={DRAFTER}"]
SHAPES = DraftShape(7, 4, 10), DraftShape(8, 1, 9), DraftShape(5, 1, 6), DraftShape(3, 1, 4)
SCHEDULE = ByBatch((2, 32, 64, 2048), SHAPES)


@pytest.fixture
def with_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in heads come along with any target."""

    def head(target: str, method: str) -> str:
        return f"{TARGET}-{method}"

    monkeypatch.setattr("specbatch.setup.speculation.builtin_head", head)
    monkeypatch.setattr("specbatch.setup.resolve.builtin_head", head)


@pytest.fixture
def on_cuda(with_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device takes the place of an H200. Nothing that is decided before weights are read asks it for more."""

    def device(name: str, notes: list[str]) -> torch.device:
        notes.append("engine.device: cuda")
        return torch.device("cuda")

    monkeypatch.setattr("specbatch.setup.resolve.resolve_device", device)
    monkeypatch.setattr("specbatch.setup.resolve.bits_depend_on", lambda device: {})
    monkeypatch.setattr("specbatch.setup.engine.importlib.util.find_spec", lambda name: object())  # triton, flashinfer
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (139 << 30, 139 << 30))


@pytest.mark.parametrize(("takes_block", "method", "draft"), [(True, "block", DRAFTER), (False, "eagle3", HEAD)])
def test_the_default_drafts_with_a_head_of_the_default_target(takes_block: bool, method: str, draft: str) -> None:
    config, notes = load_config(None, []), list[str]()
    decided = decide_method(config.speculation, config.model.target, notes, takes_block=takes_block)
    assert (config.model.target, decided.method, decided.draft) == (TARGET, method, draft)
    assert f"{method} with {draft}" in notes[0]


@pytest.mark.usefixtures("with_heads")
def test_on_a_cpu_the_default_drafts_with_the_eagle3_head() -> None:
    run = resolve(load_config(None, [GEOMETRY, "engine.device=cpu"]))
    assert (run.config.speculation.draft, run.speculation.schedule) == (HEAD, ByBatch.always(DraftShape(3, 1, 4)))
    assert run.notes[0].startswith("speculation.method: eagle3")


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_the_default_is_a_schedule_of_the_block_drafter() -> None:
    run = resolve(load_config(None, [GEOMETRY]))
    section = run.config.speculation
    assert (section.method, section.draft, run.speculation.schedule) == ("block", DRAFTER, SCHEDULE)
    assert (section.num_steps, section.topk, section.num_draft_tokens) == (None, 1, None)
    assert run.engine.max_batch_size == 2048, "as with 4 nodes a request"
    assert [note.partition(":")[0] for note in run.notes[:2]] == ["speculation.method", "engine.device"]
    assert sum("depend on how many requests run" in note for note in run.notes) == 1
    # What `specbatch config` prints gives the same.
    assert resolve(run.config).speculation.schedule == SCHEDULE


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("options", [[], BLOCK], ids=["auto", "block"])
@pytest.mark.parametrize(
    "option",
    [
        "engine.max_batch_size=1",
        "engine.max_batch_size=8",
        "engine.deterministic=true",
        "engine.cuda_graphs=none",
        "engine.attention=torch",
        "engine.cascade_attention=on",
        "engine.two_batch_overlap=on",
        "speculation.verify_budget=none",
        "sampling.temperature=1",
        "sampling.logprobs=5",
        "sampling.regex=a+",
    ],
)
def test_options_that_leave_the_default_schedule(options: list[str], option: str) -> None:
    run = resolve(load_config(None, [GEOMETRY, *options, option]))
    assert run.speculation.schedule == SCHEDULE
    is_noted = any("depend on how many requests run" in note for note in run.notes)
    assert is_noted == ("deterministic" not in option)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("options", [[], BLOCK], ids=["auto", "block"])
@pytest.mark.parametrize("option", ["verify_budget=auto", "verify_budget=2", "simulate_acceptance=2.5"])
def test_options_that_exclude_trees_or_schedules_leave_a_chain(options: list[str], option: str) -> None:
    run = resolve(load_config(None, [GEOMETRY, *options, f"speculation.{option}"]))
    assert (run.config.speculation.method, run.speculation.schedule) == ("block", ByBatch.always(DraftShape(5, 1, 6)))


@pytest.mark.usefixtures("on_cuda")
def test_flashinfer_runs_no_block_drafters() -> None:
    run = resolve(load_config(None, [GEOMETRY, "engine.attention=flashinfer"]))
    assert (run.config.speculation.draft, run.speculation.schedule) == (HEAD, ByBatch.always(DraftShape(3, 1, 4)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["num_steps=8"], (8, 1, 9)),
        (["num_draft_tokens=4"], (3, 1, 4)),
        (["topk=4"], (5, 4, 8)),
        (["topk=4", "num_steps=7", "num_draft_tokens=16"], (7, 4, 16)),
        (["schedule=[{max_batch: 8}]"], (5, 1, 6)),
    ],
)
def test_given_shapes_of_the_built_in_block_drafter(
    device: str, options: list[str], shape: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    """Options that are not given are those of a chain of 5 drafts. Blocks have 8."""
    if device == "cuda":
        request.getfixturevalue("on_cuda")
    run = resolve(load_config(None, [GEOMETRY, *BLOCK, *(f"speculation.{option}" for option in options)]))
    assert run.speculation.shapes == [DraftShape(*shape)]


def test_on_a_cpu_the_built_in_block_drafter_drafts_5_tokens() -> None:
    run = resolve(load_config(None, [GEOMETRY, *BLOCK, "engine.device=cpu"]))
    assert run.speculation.schedule == ByBatch.always(DraftShape(5, 1, 6))


def test_the_card_of_the_block_drafter_gives_its_schedule() -> None:
    entry = catalog()[DRAFTER.removeprefix("builtin:")]
    card = " ".join((path_of(entry) / "README.md").read_text(encoding="utf-8").split())
    parts = [f"{'/'.join(map(str, shape))} for up to {bound}" for bound, *shape in entry.cuda_schedule[:-1]]
    last = "/".join(map(str, entry.cuda_schedule[-1][1:]))
    assert f"{parts[0]} running requests, {', '.join(parts[1:])}, {last} for more" in card


def test_a_block_has_at_most_its_drafts() -> None:
    sets = [GEOMETRY, *BLOCK]
    with pytest.raises(ConfigError, match="num_steps is 9, and a block of this drafter has 8 drafts"):
        resolve(load_config(None, [*sets, "speculation.num_steps=9"]))


def test_other_targets_draft_with_ngrams() -> None:
    run = resolve(load_config(None, ["model.target=random:tiny"]))
    assert (run.config.speculation.method, run.config.speculation.draft) == ("ngram", None)
    assert run.config.speculation.num_draft_tokens == 6
    assert any(note.startswith("speculation.method: ngram") for note in run.notes)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_what_is_named_is_left_alone(method: str) -> None:
    section, notes = load_config(None, [f"speculation.method={method}"]).speculation, list[str]()
    assert decide_method(section, TARGET, notes) is section
    assert not notes


def test_a_draft_wants_its_method_named() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft is set") as caught:
        resolve(load_config(None, ["model.target=random:tiny", "speculation.draft=somewhere"]))
    assert "eagle3 or block" in str(caught.value.hint)


def test_the_head_fits_the_geometry_of_its_target() -> None:
    sets = ["model.target=random:smollm2-135m", "speculation.method=eagle3", f"speculation.draft={HEAD}"]
    draft = resolve(load_config(None, sets)).draft
    assert isinstance(draft, EagleCheckpoint)
    assert draft.config.draft_vocab_size == 4864


def test_the_block_drafter_fits_the_geometry_of_its_target() -> None:
    sets = [GEOMETRY, *BLOCK]
    draft = resolve(load_config(None, sets)).draft
    assert isinstance(draft, BlockCheckpoint)
    assert (draft.config.draft_vocab_size, draft.config.max_drafts, draft.notes[1:]) == (8192, 8, ())


@pytest.mark.parametrize(("method", "draft"), [("eagle3", HEAD), ("block", DRAFTER), ("eagle", "builtin:NAME")])
def test_a_method_without_a_draft_names_the_one_that_comes_with_specbatch(method: str, draft: str) -> None:
    with pytest.raises(ConfigError, match="needs speculation") as caught:
        resolve(load_config(None, [f"speculation.method={method}"]))
    assert draft in (caught.value.hint or "")


def test_a_head_is_no_target() -> None:
    with pytest.raises(ModelError, match="not supported") as caught:
        resolve(load_config(None, [f"model.target={HEAD}"]))
    assert "draft head" in str(caught.value.hint)


@pytest.mark.slow
def test_the_default_writes_what_plain_decoding_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real models, where the target has been fetched: the same greedy text on a CPU, in fewer rounds."""
    if cached_path(TARGET.removeprefix("builtin:")) is None:
        pytest.skip("specbatch models pull smollm2-135m-instruct")
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter
    questions = ["What is 17 + 25?", "Name three fruits.", "Tom has 4 bags of 6 apples and eats 3. How many are left?"]
    Path("q.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    texts = []
    for name, method in (("auto", []), ("none", ["--set", "speculation.method=none"])):
        command = ["generate", "q.jsonl", "-o", f"{name}.jsonl", "--set", "engine.device=cpu", *method]
        done = CliRunner().invoke(app, [*command, "--set", "sampling.max_tokens=48"])
        assert done.exit_code == 0, done.output
        texts.append([json.loads(line)["text"] for line in Path(f"{name}.jsonl").read_text().splitlines()])
    assert texts[0] == texts[1]
    assert json.loads(Path("auto.stats.json").read_text())["speculation"]["acceptance_length"] > 1.5
