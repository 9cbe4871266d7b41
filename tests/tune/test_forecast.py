"""How long rows take, by all that was measured of some."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.tune.candidates import NgramShape
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.forecast import Forecast
from specbatch.tune.predict import Limits
from specbatch.tune.replay import replay
from specbatch.tune.schedule import Schedule
from specbatch.tune.trace import RowTrace, Trace

LOOKUP = NgramShape(5, 1, 3)


@pytest.mark.parametrize("candidate", [None, LOOKUP], ids=["plain", "lookup"])
def test_rows_of_a_forecast(candidate: NgramShape | None) -> None:
    """One after the other, rows take what they take alone, again and again."""
    texts = ([1, 2, 3, 4] * 10, list(range(100, 130)), [7, 8] * 35)
    rows = [RowTrace(4, np.array(text, dtype=np.int32)) for text in texts]
    parts = {"plain": 10.0, "verify": 16.0, "prefill": 3.0}
    costs = CostModel.fit([Measurement(kind, 1, 1, ms) for kind, ms in parts.items()])
    limits = Limits(1, 4096, 64, 4, 0, 64, 0, None)

    def forecast(*rows: RowTrace) -> Forecast:
        trace = Trace(rows, 0, 0, False)
        return Forecast(trace, {LOOKUP: replay(trace, LOOKUP)}, costs, limits, 128)

    schedule = Schedule.always(candidate)
    alone = [forecast(row).seconds(schedule, 1) for row in rows]
    assert len(set(alone)) == 3
    totals = [forecast(*rows).seconds(schedule, count) for count in (1, 2, 3, 4, 6)]
    expected = [alone[0], sum(alone[:2]), sum(alone), sum(alone) + alone[0], 2 * sum(alone)]
    assert totals == pytest.approx(expected)
