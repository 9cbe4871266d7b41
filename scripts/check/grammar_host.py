"""Measurement of the host's work in rounds with grammars, without a model: see `check_grammar.py --host`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from specbatch.cache.rule_table import RuleTable
from specbatch.draft.method import DraftTrees
from specbatch.draft.none import MAX_ROOM, NoDraft
from specbatch.engine.constrained.mask_table import NodeMasks
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.transfers import Download, Transfers
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer

SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")
# The parents of the nodes. In the trees, the first child of a node has children. `none` has room for forced tokens.
TREES = {
    "none": [-1],
    "chain": [-1, 0, 1, 2],
    "tree of 8": [-1, *[0] * 4, *[1] * 3],
    "tree of 16": [-1, *[0] * 4, *[1] * 4, *[5] * 4, *[9] * 3],
}


def read_schemas() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]


class _OfABusyDevice(Download):
    """A download from a device whose target runs for as long as the host has other work."""

    is_there = False


class _Transfers(Transfers):
    def download(self, tensor: torch.Tensor) -> Download:
        found = super().download(tensor)
        return _OfABusyDevice(found._host, found._event)


class Host:
    """Rounds without a model. `batch`: the number of requests, which share `num_schemas` schemas. `texts`: `random`:
    they are drawn from the masks; `words`: they are like those of a model, with words and strings that end early."""

    vocab_size = 151936
    refused = 0.02  # the share of choices that grammars refuse

    def __init__(
        self,
        target: str,
        batch: int,
        texts: Literal["random", "words"],
        num_schemas: int,
        num_threads: int | None,
    ) -> None:
        self.batch = batch
        self.random = random.Random(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = load_tokenizer(resolve_model(target))
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        vocab = data["model"]["vocab"]
        known = [token for token in vocab if len(token) < 4]
        while len(vocab) < self.vocab_size - 64:
            vocab.setdefault("".join(self.random.choices(known, k=2)), len(vocab))
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(data))
        self.eos = int(tokenizer.eos_token_id)
        self.compiler = GrammarCompiler(tokenizer, num_threads)
        schemas = read_schemas()
        self.schemas = [Constraint("response_format", "json_schema", json.dumps(one["schema"])) for one in schemas]
        words = tokenizer.encode(" ".join(one["prompt"] for one in schemas), add_special_tokens=False)
        self.words = np.unique(words) if texts == "words" else None
        self.quotes = [i for token, i in tokenizer.get_vocab().items() if token.startswith('"')]
        self.texts = [self.write(self.state(schema)) for schema in self.schemas for _ in range(4)]
        self.num_schemas = num_schemas

    def state(self, schema: Constraint) -> GrammarState:
        return GrammarState(self.compiler.matcher(schema), (self.eos,), (), self.vocab_size)

    def write(self, state: GrammarState) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < 300:
            tokens.append(self.choose(np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))))
            if tokens[-1] == self.eos:
                return tokens[:-1]
            state.enter(tokens[-1])
        return tokens

    def choose(self, legal: np.ndarray) -> int:
        if self.words is not None:
            for some, share in ((self.quotes, 0.3), (self.words, 0.98)):
                likely = np.intersect1d(legal, some)
                if len(likely) and self.random.random() < share:
                    return int(likely[self.random.randrange(len(likely))])
        return int(legal[min(int(self.random.expovariate(0.02)), len(legal) - 1)])

    def request(self, i: int, temperature: float) -> Any:
        """Make a request at a random position of its text."""
        schema = i % self.num_schemas
        text = self.texts[4 * schema + self.random.randrange(4)]
        began = time.perf_counter()
        state = self.state(self.schemas[schema])
        begin = time.perf_counter() - began
        tokens = text[: self.random.randrange(1, max(2, len(text) - 30))]
        return SimpleNamespace(
            req_idx=i, grammar=state, text=text, tokens=tokens, begin=begin, num_prompt=0, is_finished=False,
            max_length=10**6, num_forced_room=0,
            request=SimpleNamespace(params=SimpleNamespace(temperature=temperature)),
        )  # fmt: skip

    def drafts(self, request: Any, parents: Sequence[int], depths: Sequence[int]) -> list[int]:
        tokens = [request.tokens[-1]]
        for node in range(1, len(parents)):
            next_one = request.text[len(request.tokens) + depths[node] - 1 :][:1]
            is_next = parents[node] != parents[node - 1] and next_one and self.random.random() < 2 / 3
            other = self.random.randrange(97)
            other += [1000 + 97 * node + other] == next_one  # siblings hold different tokens
            tokens.append(next_one[0] if is_next else 1000 + 97 * node + other % 97)
        return tokens

    def choices(self, request: Any, depths: Sequence[int]) -> list[int]:
        """Return the target's choices: the next tokens of the text, and sometimes another token."""
        ahead = [*request.text[len(request.tokens) :], *[self.eos] * len(depths)]
        return [999 if self.random.random() < self.refused else ahead[depth] for depth in depths]

    def run(self, parents: Sequence[int], num_rounds: int, temperature: float) -> dict[str, Any]:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        is_tree = parents != list(range(-1, len(parents) - 1))
        method: Any = SimpleNamespace(num_nodes=len(parents), max_path=max(depths) + 1, has_drafts=True)
        if len(parents) == 1:
            method = NoDraft(room=MAX_ROOM).with_room(self.batch)
        parents_BN = torch.tensor([parents] * self.batch, device=self.device) if is_tree else None
        rules = RuleTable(self.batch, self.vocab_size, torch.float32, self.device)
        rules.add_node_masks(method.num_nodes)
        requests, transfers = [self.request(i, temperature) for i in range(self.batch)], _Transfers(self.device)
        masks = NodeMasks(rules, transfers)
        names = ("advance", "trees", "masks", "check", "cpu", "begin")
        times: dict[str, list[float]] = {name: [] for name in names}
        num_masks = num_refused = num_tokens = 0
        for _ in range(num_rounds):
            empty = [0] * (method.num_nodes - len(parents))
            drafts = [self.drafts(one, parents, depths) + empty for one in requests]
            tokens_BN = torch.tensor(drafts, device=self.device)
            nodes = depths if method.has_drafts else range(method.num_nodes)
            choice_BN = torch.tensor([self.choices(one, nodes) for one in requests], device=self.device)
            masks.clear()
            grammar = GrammarRound(requests, method, masks, transfers, lambda: None, fixed_shapes=True)
            began = time.perf_counter()
            grammar.reshape(DraftTrees(tokens_BN, parents_BN=parents_BN))
            reshaped = time.perf_counter()
            early = grammar.counts.advance_seconds
            cpu_began = time.process_time()
            grammar.look_ahead(choice_BN)
            grammar.check()
            cpu = time.process_time() - cpu_began
            late = grammar.counts.advance_seconds - early
            times["advance"].append(early + late)
            times["trees"].append(reshaped - began - early)
            times["masks"].append(grammar.counts.mask_seconds)
            times["cpu"].append(cpu - late)
            times["check"].append(grammar.counts.check_seconds)
            num_masks += grammar.counts.masks
            num_refused += grammar.counts.refused
            for i, one in enumerate(requests):
                # A greedy request has accepted tokens. For a sampled one nothing was drawn.
                count = self.random.randrange(1, max(depths) + 2) if temperature else max(1, one.grammar.num_ahead)
                num_tokens += count
                one.tokens = one.text[: len(one.tokens) + count]
                if len(one.tokens) == len(one.text):
                    requests[i] = self.request(i, temperature)
                    times["begin"].append(requests[i].begin)
        found: dict[str, Any] = {
            f"ms_{name}": round(1e3 * float(np.median(seconds)), 3) for name, seconds in times.items() if seconds
        }
        return found | {
            "batch": self.batch,
            "masks_of_a_round": round(num_masks / num_rounds, 1),
            "masks_of_a_token": round(num_masks / num_tokens, 3),
            "refused_of_a_round": round(num_refused / num_rounds, 1),
        }
