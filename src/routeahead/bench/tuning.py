"""Finds settings for a machine and a model: one setting after the other, by interleaved runs.

The settings hardly depend on each other, so the best value of one is kept while the next is tried
(coordinate descent). A value replaces the present one only if it is faster by more than runs of one
setting differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from routeahead.bench.cells import CellList, parse_cell
from routeahead.bench.runs import Bench, Plan, Run
from routeahead.bench.statistics import Ratio
from routeahead.bench.summary import SPEED, summarise
from routeahead.errors import SettingsError
from routeahead.experts.layout import ModelLayout

LEAST_GAIN = 1.03
"""A value is taken if it is at least so many times as fast as the present one."""

Value = int | str


@dataclass(frozen=True)
class Knob:
    """A setting to tune.

    Attributes:
        name: its key in `config.toml`.
        flag: of `run`; of the environment, if it ends in "=".
        present: the value to start from.
        values: others to try.
    """

    name: str
    flag: str
    present: Value
    values: Sequence[Value]

    def words(self, value: Value) -> str:
        """How a cell says it."""
        return f"{self.flag}{'' if self.flag.endswith('=') else ' '}{value}"


@dataclass(frozen=True)
class Choice:
    """What was found for a knob: tokens a second by value, the median of its runs."""

    knob: Knob
    value: Value
    speeds: Mapping[Value, float]


class Tuning:
    """Each step of an iteration over it is one run; afterwards `choices` has what was found.

    Raises:
        SettingsError: no run of the present settings succeeded.
    """

    def __init__(self, layout: ModelLayout, knobs: Sequence[Knob], plan: Plan) -> None:
        self._layout, self._knobs, self._plan = layout, knobs, plan
        self.choices: list[Choice] = []

    def __len__(self) -> int:
        return sum((1 + len(knob.values)) * self._plan.passes for knob in self._knobs)

    def __iter__(self) -> Iterator[tuple[Knob, Run]]:
        now = {knob.name: knob.present for knob in self._knobs}
        for knob in self._knobs:
            values = [knob.present, *knob.values]
            cells = [
                self._cell(index, now | {knob.name: value}) for index, value in enumerate(values)
            ]
            bench = Bench(
                self._layout, CellList("", [parse_cell(cell) for cell in cells]), self._plan
            )
            for run in bench:
                yield knob, replace(run, cell=str(values[int(run.cell)]))
            choice = _choose(knob, values, bench)
            now[knob.name] = choice.value
            self.choices.append(choice)

    def _cell(self, index: int, values: Mapping[str, Value]) -> str:
        """Variables of the environment stand before flags."""
        knobs = sorted(self._knobs, key=lambda knob: not knob.flag.endswith("="))
        return f"{index}: {' '.join(knob.words(values[knob.name]) for knob in knobs)}"


def _choose(knob: Knob, values: Sequence[Value], bench: Bench) -> Choice:
    """The value that is fastest in pairs of runs; the present one if none is clearly faster.

    Values that do not run are left out.

    Raises:
        SettingsError: the present one does not run.
    """
    names = [str(index) for index in range(len(values))]
    summaries = summarise(bench.runs, names, names[0], bench.plan.warmup)
    ran = {values[int(one.name)]: one for one in summaries if SPEED in one.figures}
    if knob.present not in ran:
        errors = summaries[0].errors or ["no run"]
        raise SettingsError(f"tuning {knob.name}: {knob.present} does not run: {errors[-1]}")
    ratios = {value: one.ratios.get(SPEED) for value, one in ran.items()}
    gains = {value: one.median for value, one in ratios.items() if isinstance(one, Ratio)}
    best = max(gains, key=lambda value: gains[value], default=knob.present)
    clear = gains.get(best, 1.0) >= LEAST_GAIN
    speeds = {value: one.figures[SPEED].median for value, one in ran.items()}
    return Choice(knob, best if clear else knob.present, speeds)
