"""The start of an engine compiles its kernels in several threads: see `kernels/triton/compile_ahead.py`.

Rounds and prompt chunks of all sizes run over fake tensors. So the trial run and the graphs after it find their kernels
compiled. Without this, Triton compiles one after the other, each where it is launched first.

A warm start finds all kernels on disk, and the rounds over fake tensors would cost it seconds. So a start leaves an
empty file in the folder of Triton's kernels, named by what it compiled for. A start that finds its file has nothing to
do here. If a kernel was deleted since then, it is compiled at its first launch.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from specbatch.engine.cpu_threads import usable_cores
from specbatch.engine.executor import padded_sizes
from specbatch.engine.logprobs import MAX_TOP_LOGPROBS
from specbatch.engine.round import Wanted
from specbatch.models.decoder import Decoder
from specbatch.models.truncated_model import outlined
from specbatch.setup.resolve import ResolvedRun
from specbatch.setup.round_parts import RoundParts
from specbatch.setup.trial import trial_prompt, trial_round, trial_short_prompts

_MAX_THREADS = 16  # there are about 70 kernels


def compile_kernels(
    parts: RoundParts, max_batch_size: int, prefill_chunk_tokens: int, max_length: int, identity: str
) -> str:
    """Compile all kernels of rounds and prompt chunks; return a note on it. `max_length`: the length of the longest
    row. `identity`: a name of the run; two runs with the same name need the same kernels. A failure here is only
    reported: the kernels are then compiled at their first launch. Ranks share the cores and the kernels."""
    # Triton need not exist where CUDA does not.
    from specbatch.kernels.triton.compile_ahead import ALONE, Share, compile_ahead

    group = parts.group
    num_ranks = 1 if group is None else group.size
    began, num_threads = time.perf_counter(), max(1, min(_MAX_THREADS, int(usable_cores()) // num_ranks))
    done = _sign_of(f"{identity} {max_batch_size} {prefill_chunk_tokens} {max_length}")
    is_left = done is not None and _is_left(done)
    # Ranks meet while they compile, so that all of them compile, or none.
    if is_left if group is None else group.least(int(is_left)):
        return "engine: kernels were compiled by an earlier start"
    assert isinstance(parts.target, Decoder), "other models compile no kernels ahead"
    short = replace(parts, target=outlined(parts.target))
    share = ALONE if group is None else Share(group.rank, group.size, lambda: group.least(0))
    try:
        count, failed = compile_ahead(
            lambda: _run(short, max_batch_size, prefill_chunk_tokens, max_length), num_threads, share
        )
    except Exception as error:
        return f"engine: kernels were not compiled ahead ({type(error).__name__}: {_first_line(error)})"
    finally:
        net = parts.methods.items[0].net
        if net is not None:
            net.cache.resize(parts.page_size)  # it became fake
    seconds = time.perf_counter() - began
    if done is not None and not failed:
        _leave(done)
    failures = f", {failed} more failed" if failed else ""
    return f"engine: {count} kernels compiled ahead in {seconds:.1f} s by {num_threads} threads{failures}"


def identity_of(run: ResolvedRun, rank: int) -> str:
    """Return a name of the kernels of one rank: everything that they depend on, and more."""
    card = torch.cuda.get_device_name(run.device), torch.cuda.get_device_capability(run.device)
    engine = replace(run.engine, left_open=frozenset())  # a set has another order in each process
    # What differs from file to file changes no kernel.
    section = replace(run.config.engine, seed=0, shared_tokens=None)
    return repr((run.config.model, run.config.speculation, section, engine, run.target.config, card, rank))


def _sign_of(identity: str) -> Path | None:
    """The file that says that kernels are compiled. Its name has what else they depend on: their own code. None: the
    code cannot be looked at, or changes meanwhile. An error here would end the start of this rank, and so of all."""
    import triton

    import specbatch

    code = Path(specbatch.__file__).parent
    try:
        changed = max((os.lstat(path).st_mtime_ns for path in code.rglob("*.py")), default=0)
    except OSError:
        return None
    name = f"{identity} {triton.__version__} {torch.__version__} {specbatch.__version__} {code} {changed}"
    return Path(triton.knobs.cache.dir) / f"specbatch-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _is_left(sign: Path) -> bool:
    try:
        return sign.exists()
    except OSError:  # a cache that cannot be looked at
        return False


def _leave(sign: Path) -> None:
    try:
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()
    except OSError:  # a cache that cannot be written: then the next start compiles, too
        pass


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _run(parts: RoundParts, max_batch_size: int, prefill_chunk_tokens: int, max_length: int) -> None:
    """Run the checks of a deterministic run, the trial, and the rounds of all sizes that are captured after it."""
    parts.checks.launch()
    size = parts.page_size
    rounds = parts.make(max_batch_size, max_length, (-(-prefill_chunk_tokens // size) + 2) * size).items
    table, sizes = rounds.items[0].state, padded_sizes(rounds, max_batch_size)
    padding = torch.full((max_batch_size,), table.padding, dtype=torch.int64, device=parts.device)
    table.add_rules(parts.target.config.vocab_size).add_node_masks(parts.num_lookahead)
    table.add_grammars(parts.target.config.vocab_size, rounds.items[0].eos_token_ids)
    for i, (rows, _) in {i: size for size, i in reversed(sizes)}.items():  # the largest size of each item
        trial_round(rounds.items[i], padding[:rows], MAX_TOP_LOGPROBS)
    table.remove_rules()
    for (rows, _), i in sizes:
        for sampled in (False, True):
            rounds.items[i](padding[:rows], Wanted(sampled))
            if parts.budget is not None and rounds.items[i].method.scored:
                num_nodes = rounds.items[i].method.num_nodes
                nodes = parts.budget.num_verified(rows, num_nodes)
                if parts.budget.changes and num_nodes > 1:
                    nodes = rows * (1 + num_nodes) // 2  # one of those that may come up
                if nodes is not None:
                    rounds.items[i](padding[:rows], Wanted(sampled), num_verified=nodes)
        for num_nodes in rounds.items[i].method.sizes[:-1]:
            rounds.items[i].drafting(rounds.items[i].method.narrowed(num_nodes))(padding[:rows])
    trial_prompt(rounds.items[0], prefill_chunk_tokens)
    trial_short_prompts(rounds.items[0], max_batch_size, prefill_chunk_tokens)
