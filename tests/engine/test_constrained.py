"""Requests with a grammar: the engine against the oracle, which masks the logits of one token after the other."""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from specbatch.draft.none import NoDraft
from specbatch.draft.shape import DraftShape
from specbatch.engine.constrained.policy import AdaptiveToggle
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.engine import DEEP, Engine
from specbatch.engine.round import Launched
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import constraint_of
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams
from tests.coins import plain_logits, reference_distribution
from tests.engine.graphs import Replays
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer
from tests.oracle.rules import edited_logits
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
    trust_network,
)

TOKENIZER = tiny_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, max_levels=1)
HOST_COMPILER = GrammarCompiler(TOKENIZER, max_automata=0)  # the host follows its grammars
SHAPES: dict[str, tuple[str, DraftShape | None]] = {
    "none": ("none", None),
    "ngram": ("ngram", DraftShape(4, 1, 5)),
    "draft_model-chain": ("draft_model", DraftShape(3, 1, 4)),
    "draft_model-tree": ("draft_model", DraftShape(3, 3, 8)),
    "eagle-chain": ("eagle", DraftShape(3, 1, 4)),
    "eagle3-tree": ("eagle3", DraftShape(3, 2, 6)),
}
HYBRID = ("hybrid", DraftShape(4, 1, 5))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "10": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 40}, {"type": "boolean"}]},
        "trua": {"type": "array", "items": {"enum": ["ab", "true", "tru"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "trua"],
    "additionalProperties": False,
}
NESTED = {"type": "array", "items": {"$ref": "#"}}
PAIR = {"anyOf": [{"$ref": "#/$defs/pair"}, {"enum": ["ab"]}]}
FORCED: dict[str, Any] = {
    "$ref": "#/$defs/pair",
    "$defs": {
        "pair": {"type": "object", "properties": {"name": PAIR}, "required": ["name"], "additionalProperties": False}
    },
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": json.dumps({"type": "json_schema", "json_schema": {"schema": SCHEMA}})},
    "object": {"response_format": '{"type": "json_object"}'},
    "nested": {"response_format": json.dumps({"type": "json_schema", "json_schema": {"schema": NESTED}})},
    # With one level, a text that the grammar forces leads out of the automaton.
    "forced": {"response_format": json.dumps({"type": "json_schema", "json_schema": {"schema": FORCED}})},
    "regex": {"regex": "(name: [0-9]{2}_true_){1,3}"},
    "choice": {"choice": ("true", "truname", "10-10-10-10-10-10-10-10-10-10-10-10")},
    "none": {},
}
ROWS = [*GRAMMARS, "schema", "regex", "none"]


def requests(
    temperatures: tuple[float, ...],
    names: list[str] = ROWS,
    compiler: GrammarCompiler = COMPILER,
    **sampling: Any,
) -> list[Request]:
    """Make a request of each grammar. `temperatures`: those of the requests, repeated."""
    prompts, wanted = random_prompts(len(names), shared=9), []
    for i, name in enumerate(names):
        options = {"max_tokens": 22, "temperature": temperatures[i % len(temperatures)], **GRAMMARS[name], **sampling}
        params = SamplingParams(**options)
        constraint = constraint_of(params)
        matcher = None if constraint is None else compiler.matcher(constraint)
        wanted.append(Request(i, prompts[i], params, RngKey(7, i, 0), matcher=matcher))
    return wanted


def texts(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.no_token_left) for c in completions]


def decided(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.margin, c.no_token_left) for c in completions]


@pytest.fixture(scope="module")
def plain() -> Any:
    """Return a function that computes the oracle's completions for the target of a method."""
    made: dict[Any, list[Completion]] = {}

    def of(method: str, temperatures: tuple[float, ...]) -> list[Completion]:
        key = method == "eagle3", temperatures
        if key not in made:
            oracle = tiny_oracle(num_layers=num_target_layers(method), eos=(END,))
            made[key] = run_requests(oracle, requests(temperatures))
        return made[key]

    return of


FAST = [("none", (0.9, 0.0)), ("draft_model-tree", (0.9, 0.0)), ("eagle-chain", (0.0,))]
CASES_OF_METHODS = [(case, t) for case in SHAPES for t in ((0.0,), (0.9, 0.0)) if "chain" not in case or t == (0.0,)]
DETERMINISTIC = [one if one in FAST else pytest.param(*one, marks=pytest.mark.slow) for one in CASES_OF_METHODS]


@pytest.mark.parametrize(("case", "temperatures"), DETERMINISTIC)
def test_the_host_as_the_oracle(case: str, temperatures: tuple[float, ...], plain: Any) -> None:
    expected = plain(SHAPES[case][0], temperatures)
    for engine in (tiny_engine(*SHAPES[case], eos=(END,)), tiny_device_engine(*SHAPES[case], eos=(END,))):
        found = run_requests(engine, requests(temperatures, compiler=HOST_COMPILER))
        assert [one[:2] for one in decided(found)] == [one[:2] for one in decided(expected)]
        counts = engine.stats.grammar
        assert counts.masks > 0
        assert counts.forced > 0 or SHAPES[case][0] == "none"
        assert counts.forbidden > 0 or SHAPES[case][0] in ("none", "ngram")
        assert sum(c.speculation.rounds for c in found) < sum(len(c.token_ids) - 1 for c in found) or case == "none"


@pytest.mark.parametrize(("case", "temperatures"), DETERMINISTIC)
def test_the_device_as_the_oracle(case: str, temperatures: tuple[float, ...], plain: Any) -> None:
    """All grammars are automata. Outputs that are nested deeper are followed by the host, in the same rounds."""
    expected = plain(SHAPES[case][0], temperatures)
    graphed = tiny_device_engine(*SHAPES[case], eos=(END,))
    graphed.executor.mode, graphed.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    for engine in (tiny_engine(*SHAPES[case], eos=(END,)), tiny_device_engine(*SHAPES[case], eos=(END,)), graphed):
        found = run_requests(engine, requests(temperatures))
        assert [one[:2] for one in decided(found)] == [one[:2] for one in decided(expected)]
        counts = engine.stats.grammar
        assert counts.requests.total() == 8
        assert counts.requests[DEEP] > 0
        on_device = run_requests(engine, requests(temperatures, ["schema", "regex", "choice", "none"]))
        assert engine.stats.grammar.masks == counts.masks, "the host computes nothing for them"
        assert sum(c.speculation.accepted for c in on_device) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize(("case", "temperatures"), CASES_OF_METHODS)
def test_a_gpu_as_the_oracle(case: str, temperatures: tuple[float, ...], graphs: Any, plain: Any) -> None:
    settings: dict[str, Any] = {"eos": (END,), "num_pages": 256, "device": torch.device("cuda"), "graphs": graphs}
    found = run_requests(tiny_device_engine(*SHAPES[case], **settings), requests(temperatures))
    expected = plain(SHAPES[case][0], temperatures)
    assert [one[:2] for one in decided(found)] == [one[:2] for one in decided(expected)]


GRAPHS = [("draft_model-tree", (0.9, 0.0)), *((case, (t,)) for case in ("eagle-chain", "hybrid") for t in (0.0, 0.9))]


@pytest.mark.parametrize(("case", "temperatures"), GRAPHS)
def test_rounds_as_three_graphs(case: str, temperatures: tuple[float, ...]) -> None:
    """What stands in for graphs reads and writes fixed addresses. A sampled chain depends on nothing but its request,
    so eager rounds give the same; batches without a grammar run as whole rounds."""
    names = ["schema", "regex", "none"]  # the last one runs alone at the end
    method, shape = SHAPES.get(case, HYBRID)
    expected = run_requests(tiny_device_engine(method, shape, eos=(END,)), requests(temperatures, names, HOST_COMPILER))
    engine = tiny_device_engine(method, shape, eos=(END,))
    runner = Replays(lambda key: False)
    engine.executor.mode, engine.executor.runner = "round", runner  # type: ignore[assignment]
    found = run_requests(engine, requests(temperatures, names, HOST_COMPILER))
    assert decided(found) == decided(expected)
    assert {key[0] for key in runner._captured} == {"grammar draft", "grammar forward", "grammar accept", "round"}
    assert runner.num_replays > 30
    for key, output in runner.outputs.items():
        assert isinstance(output, Launched) or key[0] != "grammar accept", "the rest is memory of other sizes"
        assert isinstance(output, torch.Tensor) or key[0] != "grammar forward", "the choices alone"
        assert key[0] != "grammar draft" or output.mask_BNW is None


@pytest.mark.parametrize(
    ("case", "forces", "part"),
    [("none", False, "grammar forward"), ("none", True, "grammar draft"), ("eagle-chain", True, "grammar draft")],
)
def test_a_round_is_read_while_the_next_one_computes(case: str, forces: bool, part: str) -> None:
    """A round is read after `part` of the next one is launched, before the host does anything with that round.
    `forces`: grammars force many tokens; otherwise plain decoding leaves no room for them."""
    engine = tiny_device_engine(*SHAPES[case], eos=(END,))
    if not forces:
        engine._grammars._room.saw(-1e9, 1)
    seen: list[tuple[str, int]] = []

    class Recorded(Replays):
        def replay(self, key: Any) -> Any:
            seen.append((key[0], engine.stats.generated_tokens))
            return super().replay(key)

    engine.executor.mode, engine.executor.runner = "round", Recorded(lambda key: False)  # type: ignore[assignment]
    run_requests(engine, requests((0.0,), ["schema", "regex"], HOST_COMPILER))
    assert {one for (one, before), (_, after) in pairwise(seen) if after > before} == {part}


@pytest.mark.parametrize("case", ["none", "eagle-chain", "draft_model-tree"])
def test_a_round_is_open_between_two_steps(case: str) -> None:
    """While its target runs, what comes between them takes no time of the device."""
    engine, launched = tiny_device_engine(*SHAPES[case], eos=(END,)), []

    class Recorded(Replays):
        def replay(self, key: Any) -> Any:
            launched.append(key[0])
            return super().replay(key)

    engine.executor.mode, engine.executor.runner = "round", Recorded(lambda key: False)  # type: ignore[assignment]
    for request in requests((0.0,), ["schema", "regex"], HOST_COMPILER):
        engine.submit(request)
    num_open = 0
    while engine.num_running or engine.num_waiting:
        launched.clear()
        engine.step()
        if "grammar forward" in launched:
            num_open += 1
            assert launched[-1] == "grammar forward"
    assert num_open > 8


def test_a_round_whose_graphs_do_not_fit() -> None:
    """One of the three graphs does not fit. The round runs eagerly, and the graph is not tried again."""
    case, names = "draft_model-tree", ROWS[::-1]  # small batches at the end have grammars
    expected = run_requests(tiny_device_engine(*SHAPES[case], eos=(END,)), requests((0.0,), names, HOST_COMPILER))
    engine = tiny_device_engine(*SHAPES[case], eos=(END,))
    runner = Replays(lambda key: key[0] == "grammar accept" and key[1] == 4)
    engine.executor.mode, engine.executor.runner = "round", runner  # type: ignore[assignment]
    assert decided(run_requests(engine, requests((0.0,), names, HOST_COMPILER))) == decided(expected)
    tried = [key for key in runner.tried if key[0] == "grammar accept" and key[1] == 4]
    assert len(tried) == len(set(tried)) > 0
    assert not {key[0] for key in runner._captured if key[1] == 4} & {"grammar draft", "grammar forward"}
    assert any(key[0] == "grammar accept" for key in runner._captured)


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_every_text_that_ends_is_in_its_grammar(temperature: float) -> None:
    found = run_requests(tiny_engine(*SHAPES["eagle-chain"], eos=(END,)), requests((temperature,)))
    num_ended = 0
    for name, completion in zip(ROWS, found, strict=True):
        if completion.finish_reason is FinishReason.STOP and name != "none":
            num_ended += 1
            text = TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
            if name in ("schema", "object"):
                value = json.loads(text)
                assert isinstance(value, dict)
                assert name == "object" or value.keys() <= SCHEMA["properties"].keys() >= {"name", "trua"}
            elif name == "regex":
                assert re.fullmatch(GRAMMARS["regex"]["regex"], text)
            elif name == "forced":
                assert re.fullmatch(r'(\{"name": )+"ab"}+', text)
            elif name == "nested":
                assert not text.strip("[], ")
                assert isinstance(json.loads(text), list)
            else:
                assert text in GRAMMARS["choice"]["choice"]
    assert num_ended > 2


def test_plain_decoding_commits_a_forced_span_in_one_round() -> None:
    """A choice is forced from its first token that differs from the other choices. The engine is that of a CPU."""
    (found,) = run_requests(
        tiny_engine(eos=(END,)), requests((0.0,), ["choice"], logit_bias={TOKENIZER.vocab["1"]: 100.0}, max_tokens=30)
    )
    assert len(found.token_ids) > 20
    assert found.speculation.rounds <= 3
    assert found.finish_reason is FinishReason.STOP


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("ngram", "draft_model-chain", "eagle3-tree")]


@pytest.mark.parametrize("case", ["none", *SLOW])
def test_preemption_changes_nothing(case: str) -> None:
    engine, calm = (tiny_engine(*SHAPES[case], eos=(END,), num_pages=number) for number in (27, 256))
    found, expected = (run_requests(one, requests((0.9, 0.0), max_tokens=30)) for one in (engine, calm))
    assert decided(found) == decided(expected)
    assert engine.stats.preemptions > 0, "the cache was too large to preempt anything"


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_a_tree_is_no_longer_than_its_request_has_pages(family: str) -> None:
    """Where the host makes one request's tree longer, the device has room in the trees of all. A text of more forced
    tokens than a tree may get would be written to pages of other requests."""
    long = "-".join(["10"] * 40)

    def wanted() -> list[Request]:
        found = []
        for i, prompt in enumerate(random_prompts(8, shared=9)):
            params = SamplingParams(max_tokens=70, choice=None if i % 4 == 3 else (long, "true"))
            constraint, compiler = constraint_of(params), (COMPILER, HOST_COMPILER)[i % 2]
            matcher = None if constraint is None else compiler.matcher(constraint)
            found.append(Request(i, prompt, params, RngKey(7, i, 0), matcher=matcher))
        return found

    def engine() -> Engine:
        return tiny_engine(family=family, num_layers=2, eos=(END,), num_pages=240, page_size=1)

    alone = [run_requests(engine(), [one])[0] for one in wanted()]
    assert sum(len(one.token_ids) == 70 for one in alone) > 1
    assert texts(run_requests(engine(), wanted())) == texts(alone)


@pytest.mark.slow
def test_a_sampled_chain_does_not_depend_on_scheduling() -> None:
    case = SHAPES["draft_model-chain"]
    expected = decided(run_requests(tiny_engine(*case, eos=(END,), num_pages=256), requests((0.9,))))
    for change in ({"max_batch_size": 1, "prefix_cache": False}, {"num_pages": 30}, {"prefill_chunk_tokens": 5}):
        assert decided(run_requests(tiny_engine(*case, eos=(END,), **change), requests((0.9,)))) == expected
    # On a GPU no nodes are added to a chain: another draw from the same distribution.
    device = tiny_device_engine(*case, eos=(END,), num_pages=256)
    assert {c.finish_reason for c in run_requests(device, requests((0.9,)))} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_forced_token_that_ends_an_output() -> None:
    """The device does not take it for the end of a text that is not complete."""
    eos = (END, TOKENIZER.convert_tokens_to_ids('"'))
    expected = run_requests(tiny_oracle(eos=eos), requests((0.0,), ["schema"]))
    found = run_requests(tiny_engine(eos=eos), requests((0.0,), ["schema"]))
    assert texts(found) == texts(expected)
    assert found[0].no_token_left


def test_a_forced_token_that_the_model_does_not_have() -> None:
    """The tokenizer has more tokens than the model."""
    token = TOKENIZER.convert_tokens_to_ids("true")
    params = SamplingParams(max_tokens=8, regex="true")
    for make in (tiny_oracle, tiny_engine, tiny_device_engine):
        request = Request(0, [1, 2, 3], params, RngKey(0, 0, 0), matcher=COMPILER.matcher(constraint_of(params)))
        (found,) = run_requests(make(eos=(END,), vocab=token), [request])
        assert (found.finish_reason, found.no_token_left) == (FinishReason.ERROR, True)


def test_no_token_is_left() -> None:
    """The grammar wants tokens that another option forbids: an error, as in plain decoding."""
    wanted = {"names": ["choice", "regex", "none"], "temperatures": (0.0,), "allowed_token_ids": tuple(range(1, 40))}
    expected = decided(run_requests(tiny_oracle(eos=(END,)), requests(**wanted)))
    assert [one[1] for one in expected] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    for engine in (tiny_engine(*SHAPES["ngram"], eos=(END,)), tiny_device_engine(eos=(END,))):
        found = decided(run_requests(engine, requests(**wanted)))
        assert [(one[0], one[1], one[3]) for one in found[:2]] == [(one[0], one[1], True) for one in expected[:2]]
        assert found[2][:2] == expected[2][:2]


def test_texts_that_are_cut() -> None:
    """The device and the host agree on whether a text that `max_tokens` cuts may end there."""
    (prompt,) = random_prompts(1, shared=9)
    cut: dict[bool, list[tuple[list[int], bool]]] = {}
    for on_device, compiler in ((True, COMPILER), (False, HOST_COMPILER)):
        wanted = []
        for row in range(40):
            kind = ("schema", "regex", "nested")[row % 3]
            params = SamplingParams(max_tokens=1 + row // 3, temperature=3.0, seed=row, **GRAMMARS[kind])
            constraint = constraint_of(params)
            assert constraint is not None
            wanted.append(Request(row, prompt, params, RngKey(7, row, 0), matcher=compiler.matcher(constraint)))
        done = run_requests(tiny_engine(eos=(END,)), wanted)
        cut[on_device] = [(list(c.token_ids), c.incomplete) for c in done if c.finish_reason is FinishReason.LENGTH]
    assert cut[True] == cut[False]
    assert {is_incomplete for _, is_incomplete in cut[True]} == {False, True}


# A grammar with forced tokens, tokens that no draft may be, and free ones.
CHI_SQUARE = SamplingParams(max_tokens=5, temperature=4.0, seed=3, regex="([ab]:(1|10))?[abc][12]")
# Half of its outputs leave the automaton after their second token.
DEEPER = SamplingParams(max_tokens=5, temperature=4.0, seed=3, response_format=GRAMMARS["nested"]["response_format"])


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_drawn_chains_without_a_draft(make: Callable[..., Engine]) -> None:
    """Neither the network nor a text is trusted, and a grammar puts in no token: rounds with no draft at all."""
    for name in ("schema", "object"):
        engine = make(*HYBRID, eos=(END,))
        trust_network(engine, 0.0)
        (found,) = run_requests(engine, requests((0.9,), [name], HOST_COMPILER))
        assert found.speculation.depths[0] > 2
        assert len(found.token_ids) > 10


CASES = [
    ("eagle-chain", True),
    *(
        pytest.param(case, lazy, marks=pytest.mark.slow)
        for case in ("draft_model-chain", "eagle-chain", "hybrid")
        for lazy in (True, False)
    ),
]


@pytest.mark.parametrize("params", [CHI_SQUARE, DEEPER], ids=["forced", "deeper"])
@pytest.mark.parametrize("compiler", [COMPILER, HOST_COMPILER], ids=["device", "host"])
@pytest.mark.parametrize(("case", "lazy"), CASES)
def test_sampled_chains_fit_the_target(
    case: str, lazy: bool, compiler: GrammarCompiler, params: SamplingParams
) -> None:
    """Counts of whole outputs against exact probabilities, by chi-square at 1e-4. `lazy`: as on a CPU."""
    prompt, num_rows = [1, 2, 3, 4, 1, 2, 3, 4], 300
    constraint = constraint_of(params)
    assert constraint is not None
    make = tiny_engine if lazy else tiny_device_engine
    method, shape = SHAPES.get(case, HYBRID)
    engine = make(method, shape, eos=(END,), num_pages=600, max_batch_size=100, prefill_chunk_tokens=500)
    if case == "hybrid":
        trust_network(engine, 1000.0)
    for row in range(num_rows):
        engine.submit(Request(row, prompt, params, RngKey(3, row, 0), matcher=compiler.matcher(constraint)))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.num_running or engine.num_waiting:
        counts.update(tuple(c.token_ids) for c in engine.step())
    expected = exact_probabilities(prompt, params, num_target_layers(method))
    assert set(counts) <= set(expected)
    cells = [(counts[tokens], p * num_rows) for tokens, p in expected.items() if p * num_rows >= 5]
    cells.append((num_rows - sum(c for c, _ in cells), num_rows - sum(mean for _, mean in cells)))
    statistic = sum((observed - mean) ** 2 / mean for observed, mean in cells if mean > 0)
    assert len(cells) > 6, "hardly anything to compare"
    assert chi2.sf(statistic, len(cells) - 1) > 1e-4
    assert engine.stats.grammar.forbidden > 0 or compiler is COMPILER or params is DEEPER
    assert (engine.stats.grammar.requests[DEEP] > 50) == (compiler is COMPILER and params is DEEPER)
    assert engine.stats.speculation.accepted > 0


def exact_probabilities(prompt: list[int], params: SamplingParams, num_layers: int) -> dict[tuple[int, ...], float]:
    oracle: Any = tiny_oracle(eos=(END,), num_layers=num_layers)
    (request,) = requests((1.2,), ["none"])
    constraint = constraint_of(params)
    assert constraint is not None
    request = Request(0, prompt, params, request.rng, matcher=COMPILER.matcher(constraint))
    oracle.submit(request)
    seq = oracle._scheduler.waiting[0]
    result: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        prefix, mass = open_.popitem()
        logits = plain_logits(oracle._target, [*prompt, *prefix])[-1]
        edited = edited_logits(logits, seq, list(prefix), frozenset({END}))
        for token, p in enumerate(reference_distribution(edited.tolist(), params)):
            if p > 0.0:
                ended = token == END or len(prefix) + 1 == params.max_tokens
                (result if ended else open_)[*prefix, token] = mass * p
    return result


@pytest.mark.parametrize("engine", [tiny_engine, tiny_device_engine])
def test_rules_that_leave_no_token_where_the_model_has_more_than_its_tokenizer(engine: Any) -> None:
    """The masks of rules are wider than those of the grammar. The row fails alone."""
    other = tuple(TOKENIZER.vocab[text] for text in ("a", "b", "c"))
    prompts, wanted = random_prompts(2, shared=9), []
    for i, more in enumerate([{"allowed_token_ids": other}, {}]):
        params = SamplingParams(max_tokens=8, regex="[0-9]{5}", **more)  # type: ignore[arg-type]
        constraint = constraint_of(params)
        assert constraint is not None
        wanted.append(Request(i, prompts[i], params, RngKey(7, i, 0), matcher=COMPILER.matcher(constraint)))
    failed, good = run_requests(engine(eos=(0,), vocab=75), wanted)
    assert (failed.finish_reason, failed.no_token_left, failed.token_ids) == (FinishReason.ERROR, True, [])
    assert good.finish_reason is not FinishReason.ERROR
    assert len(good.token_ids) > 4


def test_plain_decoding_with_fixed_shapes_drafts_what_is_forced() -> None:
    """The texts are the same. Larger batches have fewer nodes."""
    expected = run_requests(tiny_oracle(eos=(END,)), requests((0.0, 0.8), ["schema", "regex", "none"]))
    for batch in (2, 64):
        engine = tiny_device_engine(eos=(END,), max_batch_size=batch)
        found = run_requests(engine, requests((0.0, 0.8), ["schema", "regex", "none"]))
        engine.check_integrity()
        assert texts(found) == texts(expected)
        assert engine.stats.speculation.accepted > 20
    assert [NoDraft(room=8).with_room(batch).num_nodes for batch in (1, 64, 128, 300)] == [8, 4, 2, 1]
    assert NoDraft().with_room(1).num_nodes == 1


def test_what_pays_at_times_is_done_where_it_does() -> None:
    choice = AdaptiveToggle(0.25)

    def rounds(count: int, gain: float) -> list[bool]:
        """Run that number of rounds of ten requests."""
        found = []
        for _ in range(count):
            found.append(choice.next())
            if found[-1]:
                choice.saw(gain, 10)
        return found

    assert all(rounds(100, 8))
    without = rounds(400, 0)
    assert all(without[:10])
    assert 8 <= sum(without[100:]) <= 10, "it tries again at times"
    assert all(rounds(400, 9)[-50:])


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_an_interrupt_while_a_round_is_closed(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, and the texts are the same."""
    expected = run_requests(tiny_oracle(eos=(END,)), requests((0.0,), ["object", "schema"], HOST_COMPILER))
    check, calls, interrupts = GrammarRound.check, 0, 0

    def interrupted(self: GrammarRound) -> None:
        nonlocal calls
        calls += 1
        if calls in (3, 5, 7):
            raise KeyboardInterrupt
        check(self)

    monkeypatch.setattr(GrammarRound, "check", interrupted)
    engine, done = make(eos=(END,)), list[Completion]()
    for request in requests((0.0,), ["object", "schema"], HOST_COMPILER):
        engine.submit(request)
    for _ in range(400):
        try:
            done += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert texts(sorted(done, key=lambda one: one.request_id)) == texts(expected)


@pytest.mark.parametrize("what", ["drain", "abort_all", "release_graphs", "end"])
def test_a_round_that_is_open_is_closed_or_forgotten(what: str) -> None:
    """Outside of torch's inference mode, too. With it, the graphs go."""
    engine = tiny_device_engine(*SHAPES["eagle-chain"], eos=(END,))
    engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    for request in requests((0.0,), ["schema", "regex"], HOST_COMPILER):
        engine.submit(request)
    while not engine._has_open:
        engine.step()
    runner = weakref.ref(engine.executor.runner)
    if what == "end":
        while engine.num_running or engine.num_waiting:
            engine.step()
    else:
        getattr(engine, what)()
    assert not engine._has_open
    engine.release_graphs()
    assert runner() is None
