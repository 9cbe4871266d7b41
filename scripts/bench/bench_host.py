"""What the host does for a token: synthetic reports of rounds are read, and rows become result lines. No device.

    python scripts/bench/bench_host.py                      # rounds of one token, as without drafts
    python scripts/bench/bench_host.py --path 4 --kinds none 1

Times are CPU time of the thread, in microseconds a token: the median of the repeats, of which the kinds take turns.
`more` is what a kind takes in addition to rows without log-probabilities. A checksum of the lines shows whether two
commits write the same bytes. Launches, waiting for a device and the text of rows are not in it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from statistics import median

import numpy as np
import torch

from specbatch.counts import EngineStats
from specbatch.engine.logprobs import LogprobLayout, Logprobs, num_top_of, read_records, with_logprobs
from specbatch.engine.reports import Report, read_report
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Download
from specbatch.results.finished import Finished
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import choice_of, result_line
from specbatch.rows.row import Row
from specbatch.text.chat_output import Answer
from specbatch.text.token_pieces import TokenPieces
from specbatch.types import Completion, EngineLimits, FinishReason, Request, RngKey, SamplingParams

KINDS = {"none": None, "0": 0, "1": 1, "5": 5, "20": 20}
VOCAB = 49152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--path", type=int, default=1, help="tokens that each round commits")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["none", "0", "1", "5"])
    args = parser.parse_args()
    logprob_json = LogprobJson(
        TokenPieces(lambda ids: "".join(f" w{token}" for token in ids), lambda token: f" w{token}")
    )
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in args.kinds}
    sums: dict[str, str] = {}
    gc.collect()
    gc.freeze()
    for _ in range(args.repeats + 1):
        for kind, times in found.items():
            sequences, reports = drawn(args.rows, args.tokens // args.path, args.path, KINDS[kind])
            began = time.thread_time()
            ended = read(sequences, reports, args.path)
            middle = time.thread_time()
            lines = written(ended, logprob_json)
            end, count = time.thread_time(), args.rows * args.tokens // args.path * args.path
            times.append(((middle - began) / count * 1e6, (end - middle) / count * 1e6))
            sums[kind] = hashlib.sha256(lines).hexdigest()[:12]
    base = sum(map(median, zip(*found["none"][1:], strict=True))) if "none" in found else None
    for kind, times in found.items():
        reading, writing = map(median, zip(*times[1:], strict=True))  # the first time fills caches
        line = {"kind": kind, "reports": round(reading, 2), "lines": round(writing, 2)}
        more = {} if base is None else {"more": round(reading + writing - base, 2)}
        print(json.dumps({**line, **more, "sha256": sums[kind]}), flush=True)


def drawn(rows: int, rounds: int, path: int, logprobs: int | None) -> tuple[list[Sequence], list[Report]]:
    """Requests, and reports of rounds that each commit `path` tokens of all of them. Often tokens are the same few."""
    params = SamplingParams(max_tokens=rounds * path, ignore_eos=True, logprobs=logprobs)
    limits = EngineLimits(1 << 20, VOCAB)
    sequences = [Sequence.of(Request(i, [1, 2, 3], params, RngKey(0, i, 0)), limits, 1 << 20) for i in range(rows)]
    rng, k, reports = np.random.default_rng(0), num_top_of([logprobs]), []
    for _ in range(rounds):
        tokens = (rng.zipf(1.3, (rows, path)) % 5000).astype(np.int32)
        margins = (1 + rng.random((rows, path))).astype(np.float32)
        counts = np.tile(np.array([path, path - 1, path - 1, 0], dtype=np.int32), (rows, 1))
        output = torch.from_numpy(np.concatenate((counts, tokens, margins.view(np.int32)), axis=1))
        layout = None
        if k is not None:
            own = -(10 ** rng.uniform(-4.5, 0.6, (rows, path, 1))).astype(np.float32)
            values = np.concatenate((own, *(own - i for i in range(k))), axis=2)
            ids = (tokens[:, :, None] + np.arange(k)).astype(np.int64)
            found = Logprobs(torch.from_numpy(values), torch.from_numpy(ids))
            output, layout = with_logprobs(output, found), LogprobLayout.of(found)
        reports.append(Report(sequences, path, Download(output, None), layout))
    return sequences, reports


def read(sequences: list[Sequence], reports: list[Report], path: int) -> list[tuple[Sequence, FinishReason]]:
    stats, ended = EngineStats(), []
    for report in reports:
        for seq in sequences:
            seq.num_in_flight += path
            seq.rounds_in_flight += 1
        ended += read_report(report, report.wait(), frozenset((0,)), stats)
    return ended


def word(token: int) -> str:
    return f" w{token}"


def written(ended: list[tuple[Sequence, FinishReason]], logprob_json: LogprobJson) -> bytes:
    """The result lines."""
    finished = Finished()
    for seq, reason in ended:
        tokens, number = list(seq.generated), seq.request.request_id
        logprobs = None if seq.request.params.logprobs is None else read_records(tokens, seq.logprobs)
        completion = Completion(number, tokens, reason, logprobs, seq.counts, seq.margin)
        choice = choice_of(completion, Answer("x" * 700))
        finished.add(number, 0, result_line(Row(number, token_ids=[1, 2, 3]), [choice], logprob_json, model="m"))
    return b"".join(row.line for row in finished.rows)


if __name__ == "__main__":
    main()
