"""A figure: the loss against the bytes that a replica sends, a line for each number of replicas.

    PYTHONPATH=. python benchmarks/learning/draw_replicas.py FILE.svg

Lines are the forecast of maxdiloco.plan for the quality table's model and tokens, where its rows
reach: H from long to short, 4 bits. Marks are the rows themselves, of any wire. Everything is
compared with data parallelism with AdamW.
"""

import functools
import math
import pathlib
import sys
from collections.abc import Sequence

import jax

from benchmarks.learning.modes import DILOCO, FOUR_BITS, SCALES, WIRE
from benchmarks.learning.plan import FIRST_SEED, Row
from benchmarks.learning.rows import keys_of
from benchmarks.learning.traffic import traffic
from maxdiloco.planning import forecast
from maxdiloco.planning.forecast import Case
from scripts import svg

LEFT, TOP, WIDTH, HEIGHT = 60, 44, 560, 340
REPLICAS = {2: "#2471a3", 4: "#1e8449", 8: "#c0392b"}
DASHES = {"adamw": "6 3", "muon": ""}
PERIODS = (166, 100, 60, 45, 30, 24, 20, 15, 12, 10)
SHORT, MOST_TIMES, LEAST, MOST = 10, 2000, -0.03, 0.18  # ends of the axes
SIZE, TOKENS, STEPS = 279_296, 5.5, 1500  # parameters, and tokens for each
OFFSET = {"adamw": 0.0, "muon": 1.2262 / 1.2629 - 1}  # of data parallelism, three seeds


def main(argv: Sequence[str]) -> None:
    """Write the figure."""
    (path,) = argv
    jax.config.update("jax_platforms", "cpu")
    law = forecast.fit(forecast.read_rows())
    parts = [svg.text(LEFT, 22, "Loss over data parallelism (AdamW)", size=14, bold=True)]
    for k in range(8):
        y = LEAST + (MOST - LEAST) * k / 7
        parts += [svg.line([_at(SHORT, y), _at(MOST_TIMES, y)], "#dddddd")]
        parts += [svg.text(LEFT - 6, _at(SHORT, y)[1] + 4, f"{y:+.0%}", anchor="end")]
    for times in (10, 30, 100, 300, 1000):
        parts.append(svg.text(_at(times, 0)[0], TOP + HEIGHT + 18, f"{times:,}", anchor="middle"))
    words = "times fewer bytes than data parallelism sends"
    parts.append(svg.text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, words, anchor="middle"))
    four_bits = FOUR_BITS[WIRE]
    for k, (inner, M) in enumerate((inner, M) for inner in DASHES for M in REPLICAS):
        kind = dict(wire=four_bits, inner=inner, tokens=TOKENS, batch=SIZE * TOKENS / STEPS)
        found = [Case(SIZE, M, H, **kind) for H in PERIODS]
        gaps = [(case, forecast.predict(law, case)) for case in found]
        line = [_at(_times(c), _over(c, g.share)) for c, g in gaps if not g.outside]
        parts.append(svg.line(line, REPLICAS[M], dash=DASHES[inner], width=1.8))
        x, y = LEFT + WIDTH + 16, TOP + 10 + 20 * k
        parts.append(svg.line([(x, y), (x + 24, y)], REPLICAS[M], dash=DASHES[inner], width=2.5))
        parts.append(svg.text(x + 30, y + 4, f"M={M}, {inner}, 4 bits"))
    for row in law.rows:
        case = row.case
        if case.parameters == 279e3 and case.tokens == TOKENS and case.overlap == "none":
            x, y = _at(_times(case), _over(case, row.gap))
            parts.append(svg.box(x - 3, y - 3, 6, 6, REPLICAS[case.replicas]))
            if case.inner == "muon":
                parts.append(svg.box(x - 1.5, y - 1.5, 3, 3, "white"))
    parts.append(svg.text(LEFT + WIDTH + 16, TOP + 140, "marks: measured; hollow: muon"))
    text = svg.figure(LEFT + WIDTH + 200, TOP + HEIGHT + 50, parts)
    pathlib.Path(path).write_text(text, encoding="utf-8")


def _over(case: Case, gap: float) -> float:
    """A loss over that of AdamW's data parallelism, of one over its own optimizer's."""
    return (1 + gap) * (1 + OFFSET[case.inner]) - 1


def _times(case: Case) -> float:
    """Times fewer bytes than data parallelism."""
    return case.H * _at_each_step(case.wire)


@functools.cache
def _at_each_step(wire: str) -> float:
    """The same with an exchange at each step, as the trainer sends it, for any M."""
    keys = keys_of(Row(DILOCO, 1e-3, 0.5, FIRST_SEED), SCALES["cpu"], {})
    found = traffic(keys | {"diloco_sync_period": 1, "steps": 1, WIRE: wire})
    return found.baseline / found.sent


def _at(times: float, over: float) -> tuple[float, float]:
    x = math.log(times / SHORT) / math.log(MOST_TIMES / SHORT)
    return LEFT + WIDTH * x, TOP + HEIGHT * (MOST - over) / (MOST - LEAST)


if __name__ == "__main__":
    main(sys.argv[1:])
