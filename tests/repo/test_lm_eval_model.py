"""scripts/lm_eval_model.py: requests of lm-evaluation-harness become rows, over the stub engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import specbatch
from specbatch import startup
from specbatch.errors import ConfigError, InputError
from tests.stub_engine import stub_modules

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(startup, "model_paths", lambda config: {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(specbatch.__file__).resolve().parent.parent / "scripts"))
    module = importlib.import_module("lm_eval_model")
    return module.SpecbatchModel("stub", batch_size=8, device="cuda", temperature=0.0)


def requests(*pairs: tuple[str, dict[str, Any]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("generate_until", {}, pair, i) for i, pair in enumerate(pairs)]


def test_texts_come_in_order_and_end_before_a_stop_string(model: Any) -> None:
    settings = {"until": ["\n\n", ""], "do_sample": False, "max_gen_toks": 20}
    plain = model.generate_until(requests(*((f"p{i}", settings) for i in range(30))))
    again = model.generate_until(requests(*((f"p{i}", {"until": [" "]}) for i in range(30))))
    assert len(set(plain)) > 20
    assert any(" " in text for text in plain)
    assert again == [text.split(" ")[0] for text in model.generate_until(requests(*((f"p{i}", {}) for i in range(30))))]


def test_messages_go_through_the_chat_template(model: Any) -> None:
    chat = model.apply_chat_template([{"role": "user", "content": "p"}])
    as_chat, as_text = model.generate_until(requests((chat, {}), ("p", {})))
    (same,) = (r["text"] for r in model._llm.generate([{"messages": [{"role": "user", "content": "p"}]}]))
    assert as_chat == same != as_text


def test_what_cannot_run_is_an_error(model: Any) -> None:
    with pytest.raises(ConfigError, match="the task sets num_beams"):
        model.generate_until(requests(("p", {"num_beams": 4})))
    with pytest.raises(InputError, match="request 1 cannot run"):
        model.generate_until(requests(("p", {}), ("x" * 5000, {})))
    with pytest.raises(ConfigError, match="perplexity of whole texts"):
        model.loglikelihood_rolling([])


def test_choices_are_scored(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is that of the whole text's log-probabilities. A continuation that is the greedy text is named so."""
    monkeypatch.syspath_prepend(str(Path(specbatch.__file__).resolve().parent.parent / "scripts"))
    module = importlib.import_module("lm_eval_model")
    model = module.SpecbatchModel(str(tiny_model), method="none", kv_cache_tokens=1024, max_batch_size=4)
    [greedy] = model._llm.generate({"prompt": "a", "max_tokens": 3, "logprobs": 0})
    pairs = [("is it?", " yes"), ("a", greedy.text), ("is it?", " no"), ("a", greedy.text + "!")]
    found = model.loglikelihood(requests(*pairs))
    assert [is_greedy for _, is_greedy in found] == [False, True, False, False]
    assert found[1][0] == pytest.approx(sum(entry["logprob"] for entry in greedy["logprobs"]), abs=1e-4)
    [whole] = model._llm.generate({"prompt": "is it? yes", "prompt_logprobs": 0, "max_tokens": 1})
    expected = sum(entry["logprob"] for entry in whole["prompt_logprobs"][-4:])
    assert found[0][0] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(InputError, match="request 0 cannot run"):
        model.loglikelihood(requests(("x" * 5000, "y")))
