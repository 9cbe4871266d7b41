"""Cost of a round, from measurements of its parts at some batch sizes and widths.

Each part is a surface over (batch, width) that does not fall along either axis: more work takes no less time, and a
fall within a measurement's noise is noise. A larger fall is kept: a library has other kernels for other sizes, and can
multiply 32 rows in less time than 16. A batch costs what the next captured size does, to which it is padded.

Between the measurements, a surface is piecewise straight. With a mixture of experts it is not: the first tokens of a
round each read other experts, and the last ones read no further ones. So the time to read experts is computed by itself
(`ExpertReads`), and the rest of the time is straight.

Shape suffixes: B batch sizes, W widths.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.models.pass_weights import ExpertCurve

Floats = NDArray[np.float64]
# What is measured, and over which width.
KINDS = {
    "verify": "nodes of a request's chain, num_draft_tokens",
    "verify_tree": "the same of trees with branches, which need masks; as chains where not measured",
    "draft_start": "topk; the first draft step, which has its hidden states already, or is one pass for all steps",
    "draft_step": "branches of a request, topk; every later draft step",
    "draft_pass": "num_steps; all drafts of a chain, where one pass of the draft network makes them",
    "extend": "tokens of a request, the longest path",
    "prefill": "tokens of a prompt chunk; its batch is 1",
    "prefill_plain": "the same without a draft network, where that was timed apart",
    "plain": "1; a whole round of plain decoding, without a draft network",
    "overhead": "1; what a whole drafting round takes beyond its parts, if anything",
    "copies": "1; on a GPU, what any round takes beyond its graph",
    "host": "1; what a round takes the host, while a GPU works on the one before: no round takes less",
}
OPTIONAL = ("overhead", "copies", "host")  # 0 where not measured
_READS_EXPERTS = ("verify", "verify_tree", "plain")  # the target runs in these
# The part of plain rounds by which a part is filled in at batch sizes where only plain rounds were timed.
_PLAIN = {"verify": "plain", "verify_tree": "plain", "extend": "extend"}


@dataclass(frozen=True, slots=True)
class Measurement:
    kind: str  # one of KINDS
    batch: int  # requests
    width: int
    milliseconds: float
    noise: float = math.inf  # relative; inf: of unknown size. Of repetitions the largest counts


@dataclass(frozen=True, slots=True)
class Residual:
    """A measurement (the mean of its repetitions) and its fit."""

    kind: str
    batch: int
    width: int
    measured_ms: float
    fitted_ms: float

    @property
    def percent(self) -> float:
        """Fitted against measured."""
        return 100.0 * (self.fitted_ms / self.measured_ms - 1.0) if self.measured_ms else 0.0


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """The milliseconds in which a round reads the experts that its tokens choose. `curve`: distinct experts of a layer
    by the number of tokens."""

    curve: ExpertCurve
    ms_per_expert: float

    @staticmethod
    def fit(values: Mapping[tuple[int, int], float], curve: ExpertCurve) -> ExpertReads:
        """Find the time of an expert: a constant, a time for each token and one for each distinct expert have the least
        squares of relative errors. `values`: milliseconds by batch size and width."""
        tokens = np.array([batch * width for batch, width in values], dtype=np.float64)
        experts = np.array([curve(number) for number in tokens])
        scale = np.maximum(list(values.values()), 1e-9)
        columns = np.stack((np.ones_like(tokens), experts, tokens), axis=1) / scale[:, None]
        columns = columns[:, : min(3, len(np.unique(tokens)))]  # no more than there are different sizes
        if columns.shape[1] < 2:
            return ExpertReads(curve, 0.0)
        found = np.linalg.lstsq(columns, np.ones_like(tokens))[0]
        if found[-1] < 0:  # more tokens take no less time
            found = np.linalg.lstsq(columns[:, :2], np.ones_like(tokens))[0]
        return ExpertReads(curve, max(0.0, float(found[1])))

    def ms(self, batch: int, width: float) -> float:
        return self.ms_per_expert * self.curve(batch * width)


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Milliseconds over (batch, width); piecewise bilinear, straight on with the last slope above what was measured
    (level, where that falls), constant below. `reads` None: no experts are read; otherwise, all of this holds for the
    rest of the time."""

    batches: tuple[int, ...]  # ascending
    widths: tuple[int, ...]  # ascending
    ms_BW: Floats
    reads: ExpertReads | None = None

    def at(self, batch: int, width: float) -> float:
        # Above what was measured, slopes that fall against each other must not make more cost less.
        batches = [batch, *(b for b in self.batches if b < batch)] if width > self.widths[-1] else [batch]
        widths = [width, *(w for w in self.widths if w < width)] if batch > self.batches[-1] else [width]
        return max(self._bilinear(b, w) for b in batches for w in widths)

    def _bilinear(self, batch: int, width: float) -> float:
        b, t = _segment(self.batches, batch)
        w, u = _segment(self.widths, width)
        next_b, next_w = min(b + 1, len(self.batches) - 1), min(w + 1, len(self.widths) - 1)
        low = _between(self._rest(b, w), self._rest(b, next_w), u)
        high = _between(self._rest(next_b, w), self._rest(next_b, next_w), u)
        value = _between(low, high, t)
        if self.reads is None:
            return value
        value += self.reads.ms(max(batch, self.batches[0]), max(width, self.widths[0]))
        # Where the rest falls, it may fall by more than the reading of experts rises.
        least, most = float(self.ms_BW[b, w]), float(self.ms_BW[next_b, next_w])
        return max(value, least) if max(t, u) > 1 else min(max(value, least), most)

    def _rest(self, b: int, w: int) -> float:
        """Return the milliseconds of a cell without reading experts."""
        reads = 0.0 if self.reads is None else self.reads.ms(self.batches[b], self.widths[w])
        return float(self.ms_BW[b, w]) - reads


def _between(low: float, high: float, share: float) -> float:
    """Beyond both (`share` > 1), a fall that was measured does not go on: it would end below nothing."""
    return high if share > 1 and high < low else low + share * (high - low)


def _segment(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """Index of the segment that holds `value`, the last one for what is above, and where in it: 0 .. 1, or more."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    index = min(bisect_left(axis, value), len(axis) - 1) - 1
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """Milliseconds of rounds and of prompt chunks."""

    surfaces: dict[str, Surface]
    residuals: tuple[Residual, ...]
    graph_sizes: tuple[int, ...]  # batch sizes that batches are padded to, ascending; (): none
    # Nodes of a request that n-gram rounds verify on average, where that is not always num_draft_tokens.
    nodes: Mapping[DraftShape, float] = field(default_factory=dict)

    @staticmethod
    def fit(
        measurements: Sequence[Measurement], graph_sizes: Sequence[int] = (), experts: ExpertCurve | None = None
    ) -> CostModel:
        """Repeated measurements of one batch size and width are averaged. `experts`: the distinct experts of a layer by
        the number of tokens of a round; None: the target has no experts. Raises TuningError for a kind that is not in
        KINDS, and for values that are no times."""
        repeated: dict[str, dict[tuple[int, int], list[Measurement]]] = defaultdict(lambda: defaultdict(list))
        for m in measurements:
            if m.kind not in KINDS:
                raise TuningError(f"{m.kind!r} is no kind of measurement", hint=f"the kinds are {', '.join(KINDS)}")
            if m.batch < 1 or m.width < 1 or not 0 <= m.milliseconds < math.inf:
                raise TuningError(f"not a measurement: {m}")
            repeated[m.kind][m.batch, m.width].append(m)
        measured = {kind: {place: _Cell.of(found) for place, found in of.items()} for kind, of in repeated.items()}
        surfaces: dict[str, Surface] = {}
        residuals: list[Residual] = []
        for kind, values in measured.items():
            alone = measured.get(_PLAIN.get(kind, ""), {})
            plain = {batch: cell.ms for (batch, width), cell in alone.items() if width == 1}
            reads = None
            if experts is not None and kind in _READS_EXPERTS:
                reads = ExpertReads.fit({place: cell.ms for place, cell in values.items()}, experts)
            surface = surfaces[kind] = _fit(values, _beyond_plain(values, plain, reads), reads)
            residuals += [Residual(kind, *place, cell.ms, surface.at(*place)) for place, cell in sorted(values.items())]
        return CostModel(surfaces, tuple(residuals), tuple(sorted(graph_sizes)))

    def round_ms(self, batch: int, shape: DraftShape | None) -> float:
        """A round of `batch` requests. Raises TuningError naming what was not measured."""
        if shape is None:
            return self.plain_ms(batch)
        nodes = self.nodes.get(shape, shape.num_draft_tokens)
        has_branches = not shape.is_chain and "verify_tree" in self.surfaces
        verify = self.part_ms("verify_tree" if has_branches else "verify", batch, nodes)
        verify += self.part_ms("overhead", batch, 1)
        if shape.ngram_match is not None:
            return self._live(batch, verify)
        return self._live(batch, self._draft_ms(batch, shape) + verify + self.part_ms("extend", batch, shape.max_path))

    def _draft_ms(self, batch: int, shape: DraftShape) -> float:
        if shape.is_chain and "draft_pass" in self.surfaces:
            return self.part_ms("draft_pass", batch, shape.num_steps)
        draft = self.part_ms("draft_start", batch, shape.topk)
        if shape.num_steps > 1:
            draft += (shape.num_steps - 1) * self.part_ms("draft_step", batch, shape.topk)
        return draft

    def plain_ms(self, batch: int, *, followed: bool = False) -> float:
        """A round of plain decoding; `followed`: with the draft network brought along, for later rounds to draft."""
        extend = self.part_ms("extend", batch, 1) if followed else 0.0
        return self._live(batch, self.part_ms("plain", batch, 1) + extend)

    def _live(self, batch: int, ms: float) -> float:
        """Return the milliseconds of rounds that the host launches and reads while the round before is running."""
        host = self._surface("host").at(batch, 1) if "host" in self.surfaces else 0.0
        return max(host, ms + self.part_ms("copies", batch, 1))

    def prefill_ms(self, tokens: int, *, followed: bool = True) -> float:
        """A prompt chunk; `followed`: by the draft network, too, where there is one."""
        kind = "prefill" if followed or "prefill_plain" not in self.surfaces else "prefill_plain"
        return self._surface(kind).at(1, tokens)

    def part_ms(self, kind: str, batch: int, width: float) -> float:
        """One part of a round. Raises TuningError for one that was not measured, unless it is optional."""
        if kind in OPTIONAL and kind not in self.surfaces:
            return 0.0
        return self._surface(kind).at(self._padded(batch), width)

    def _surface(self, kind: str) -> Surface:
        if kind not in self.surfaces:
            raise TuningError(
                f"there is no measurement of {kind} (over {KINDS[kind]})",
                hint=f"measured are: {', '.join(sorted(self.surfaces)) or 'none'}",
            )
        return self.surfaces[kind]

    def _padded(self, batch: int) -> int:
        return next((size for size in self.graph_sizes if size >= batch), batch)


class _Cell(NamedTuple):
    """The measurements of one batch size and width."""

    ms: float  # mean
    noise: float  # relative

    @staticmethod
    def of(found: Sequence[Measurement]) -> _Cell:
        return _Cell(float(np.mean([m.milliseconds for m in found])), max(m.noise for m in found))


def _beyond_plain(
    values: Mapping[tuple[int, int], _Cell], plain: Mapping[int, float], reads: ExpertReads | None = None
) -> dict[tuple[int, int], float]:
    """A part at batch sizes at which only plain rounds were measured: what it takes longer than those, which show where
    rounds rise by leaps. Between two measured sizes that stays what it is while the weights are read anyway, then rises
    with the rows (a roofline, Williams et al. 2009), and is on no account more than on the line between them. `reads`:
    see `Surface`; the time of experts that plain rounds do not read is known by itself."""

    def expected(batch: int, width: int) -> float:
        return plain[batch] + (0.0 if reads is None else reads.ms(batch, width) - reads.ms(batch, 1))

    found: dict[tuple[int, int], float] = {}
    for width in {width for _, width in values}:
        known = sorted(batch for batch, w in values if w == width and batch in plain)
        more = {batch: values[batch, width].ms - expected(batch, width) for batch in known}
        for low, high in itertools.pairwise(known):
            for batch in plain:
                if low < batch < high:
                    line = more[low] + (batch - low) / (high - low) * (more[high] - more[low])
                    longer = min(line, max(more[low], more[high] * batch / high))
                    found[batch, width] = expected(batch, width) + longer
    return found


def _fit(
    values: Mapping[tuple[int, int], _Cell],
    between: Mapping[tuple[int, int], float],
    reads: ExpertReads | None = None,
) -> Surface:
    """`between`: cells that were not measured, but are known better than by filling them in. `reads`: see `Surface`."""
    batches = sorted({batch for batch, _ in (*values, *between)})
    widths = sorted({width for _, width in values})
    cells = {place: (batches.index(place[0]), widths.index(place[1])) for place in (*values, *between)}
    measured_BW = np.full((len(batches), len(widths)), np.nan)
    for place, cell in values.items():
        measured_BW[cells[place]] = cell.ms
    below_BW, above_BW = _bounds(measured_BW)
    means_BW = np.where(np.isnan(measured_BW), np.nan, (below_BW + above_BW) / 2)
    # Cells that were not measured yield to those that were.
    below_BW, above_BW = _bounds(means_BW)
    for place, guess in between.items():
        means_BW[cells[place]] = guess
    reads_BW = np.array([[0.0 if reads is None else reads.ms(b, w) for w in widths] for b in batches])
    whole_BW = filled(means_BW - reads_BW, batches, widths) + reads_BW
    fitted_BW = _rising(np.clip(whole_BW, below_BW, above_BW))
    for place, cell in values.items():
        if math.isfinite(cell.noise) and abs(fitted_BW[cells[place]] - cell.ms) > cell.noise * cell.ms:
            fitted_BW[cells[place]] = cell.ms
    return Surface(tuple(batches), tuple(widths), fitted_BW, reads)


def _rising(values_BW: Floats) -> Floats:
    """Return the largest value at or below each cell along both axes."""
    rising: Floats = np.maximum.accumulate(np.maximum.accumulate(values_BW, axis=0), axis=1)
    return rising


def _bounds(values_BW: Floats) -> tuple[Floats, Floats]:
    """Return the largest value at or below each cell along both axes, and the smallest at or above. NaN cells do not
    count. Neither falls, so their mean is a fit: each cell is between the values that contradict it."""
    below_BW = _rising(np.nan_to_num(values_BW, nan=-np.inf))
    above_BW = -_rising(-np.nan_to_num(values_BW, nan=np.inf)[::-1, ::-1])[::-1, ::-1]
    return below_BW, above_BW


def filled(values_BW: Floats, batches: Sequence[int], widths: Sequence[int]) -> Floats:
    """The grid with its NaN cells filled in, those next to known ones first: each by the mean of its row's and its
    column's straight line between the known cells around it, or through the last two."""
    grid = values_BW.copy()
    across, down = np.array(widths, dtype=np.float64), np.array(batches, dtype=np.float64)
    while np.isnan(grid).any():
        guesses = np.stack(
            [
                np.stack([_guess(line, across) for line in grid]),
                np.stack([_guess(line, down) for line in grid.T], axis=1),
            ]
        )
        known = ~np.isnan(guesses)
        reached = known.any(axis=0) & np.isnan(grid)
        assert reached.any(), "a grid without a single known cell"
        sums = np.where(known, guesses, 0.0).sum(axis=0)
        grid = np.where(reached, sums / np.maximum(known.sum(axis=0), 1), grid)
    return grid


def _guess(line: Floats, axis: Floats) -> Floats:
    """The cells of a line that are between known ones, or next to one; NaN elsewhere."""
    guess = np.full(len(line), np.nan)
    known = np.flatnonzero(~np.isnan(line))
    if not len(known):
        return guess
    first, last = int(known[0]), int(known[-1])
    guess[first : last + 1] = np.interp(axis[first : last + 1], axis[known], line[known])
    for edge, inner, beyond in ((first, known[:2], first - 1), (last, known[-2:], last + 1)):
        if 0 <= beyond < len(line):
            rise = line[inner[-1]] - line[inner[0]]
            slope = rise / (axis[inner[-1]] - axis[inner[0]]) if len(inner) == 2 else 0.0
            guess[beyond] = max(line[edge] + slope * (axis[beyond] - axis[edge]), 0.0)
    return guess
