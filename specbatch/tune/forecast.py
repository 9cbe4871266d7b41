"""What all that was measured says of rows: how long they take by a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specbatch.tune.candidates import Candidate
from specbatch.tune.costs import CostModel
from specbatch.tune.predict import FileProfile, Limits, Prediction, predict
from specbatch.tune.replay import Replay
from specbatch.tune.schedule import Schedule
from specbatch.tune.trace import Trace


@dataclass(frozen=True)
class Forecast:
    """Of the traced rows, which stand for those of the file."""

    trace: Trace
    replays: Mapping[Candidate, Replay]
    costs: CostModel
    limits: Limits
    max_tokens: int  # of a row's output

    def predict(self, schedule: Schedule, count: int) -> Prediction:
        """Of a file of `count` rows: the traced ones from the first on, again and again."""
        part = replace(self.trace, rows=self.trace.rows[:count])
        own = {c: self.replays[c].of_rows(slice(count)) for c in schedule.candidates if c is not None}
        profile = replace(FileProfile.of(part, self.max_tokens, num_rows=count), in_order=True)
        return predict(profile, self.limits, self.costs, own, schedule)

    def seconds(self, schedule: Schedule, count: int) -> float:
        """Of the same."""
        return self.predict(schedule, count).seconds
