"""How much of a thin link's slowness the trainer hides: utilisation, bytes and peaks, by mode.

    PYTHONPATH=. python benchmarks/thin_link.py [grid=published] [name=value ...] [key=value ...]

Linux, root, iproute2. Hosts are network namespaces whose links are shaped (link/hosts.py), with one
process of maxdiloco.train on each. For every mode, wire, carrier and rate a run of its own:
the mean step over whole periods after a warm-up, logs included, by the process that is last.
Utilisation is the plain step (no exchange, an unlimited link) / that mean. OWN in
link/arguments.py has the names and their defaults; further keys are the trainer's.
grid=published measures the rows of results/thin_link.md in two folders, fast_device and real;
other arguments go before its own.

Writes rows.json, table.md and two figures into `out`. An interrupted run continues at its next row.
Exit code 1: a row failed, or the link carried other bytes than the trainer claims.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.link import draw, figures, grid
from benchmarks.link.arguments import KEYS, OWN, Part, parts
from benchmarks.link.command import guarded, help_text
from benchmarks.link.grid import Row
from benchmarks.link.hosts import Link, hosts
from benchmarks.link.rows import RowError, measure
from maxdiloco.errors import ConfigError

Stored = list[dict[str, Any]]  # rows that are measured


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    again = "Interrupted. The same command continues at this row."
    return guarded(_main, argv, usage=help_text(__doc__, OWN | KEYS), interrupted=again)


def _main(argv: Sequence[str]) -> int:
    all_parts = parts(argv)
    done = [stored(part) for part in all_parts]
    setup = all_parts[0].setup
    thin = any(row.rate != figures.UNLIMITED for part in all_parts for row in part.rows)
    link = Link(1.0 if thin else None, setup["delay_ms"], congestion=setup["congestion"])
    with hosts(1, link):  # refused now rather than in the midst of the rows
        for part, rows in zip(all_parts, done, strict=True):
            print(f"{len(part.rows)} rows in {part.out}, {len(rows)} of them measured before")
    failed = []
    for k, part in enumerate(all_parts):
        for row in part.rows:
            if is_in(row, done[k]):
                continue
            progress(row, k, all_parts, done)
            if not run(row, part, done[k]):
                failed.append(row.name())
                if row == part.rows[0]:
                    break  # nothing can be compared with it
    codes = [report(part, rows) for part, rows in zip(all_parts, done, strict=True)]
    if failed:
        print(f"failed: {', '.join(failed)}. The same command tries again.", file=sys.stderr)
    return max(*codes, int(bool(failed)))


def is_in(row: Row, done: Stored) -> bool:
    """Whether a row is among those that are measured."""
    return any(Row(*(one[name] for name in Row._fields)) == row for one in done)


def progress(row: Row, k: int, all_parts: Sequence[Part], done: Sequence[Stored]) -> None:
    """Print the next row of part k, and how long it and the remaining rows take."""
    left = {}
    for i, part in enumerate(all_parts):
        for other in part.rows:
            if not is_in(other, done[i]):
                left[i, other] = grid.expected_s(other, part.setup, done[i])
    total = sum(len(part.rows) for part in all_parts)
    over = time.strftime("%H:%M", time.localtime(time.time() + sum(left.values())))
    where = f" in {all_parts[k].out.name}" if len(all_parts) > 1 else ""
    print(
        f"[{total - len(left) + 1}/{total}] {row.name()}{where}: about {left[k, row]:.0f} s; all "
        f"over in about {sum(left.values()) / 60:.0f} min, at {over}",
        flush=True,
    )


def stored(part: Part) -> Stored:
    """The rows that are measured already. Raises ConfigError for rows of another setup."""
    path = part.out / "rows.json"
    if not path.exists():
        part.out.mkdir(parents=True, exist_ok=True)
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["setup"] != part.setup:
        differ = [name for name in part.setup if saved["setup"].get(name) != part.setup[name]]
        raise ConfigError(
            f"out={part.out} has rows that were measured with another {', '.join(differ)}: figures "
            f"of one table have to compare. Name another folder, or remove this one."
        )
    return saved["rows"]


def run(row: Row, part: Part, done: Stored) -> bool:
    """Measure a row and store it in `done` and on disk; False where it failed."""
    plain = next((one for one in done if one["mode"] == figures.PLAIN), None)
    try:
        figure = measure(row, part.setup, part.out / "logs" / row.name(), plain)
    except RowError as error:
        print(f"RowError: {error}", file=sys.stderr, flush=True)
        return False
    done.append(figure)
    draft = part.out / "rows.json.new"
    draft.write_text(json.dumps({"setup": part.setup, "rows": done}, indent=1), encoding="utf-8")
    os.replace(draft, part.out / "rows.json")
    spread = f"{min(figure['period_ms']):,.1f}..{max(figure['period_ms']):,.1f}"
    share = f"{(plain or figure)['step_ms'] / figure['step_ms']:.1%} of the plain step's speed"
    print(f"{row.name()}: {figure['step_ms']:,.1f} ms a step ({spread}), {share}", flush=True)
    return True


def report(part: Part, rows: Stored) -> int:
    """Write the table and the figures; 1 where the bytes are not those that are claimed."""
    measured = [row for row in rows if row["mode"] != figures.PLAIN]
    if not measured:
        return 0
    setup, out = part.setup, part.out
    table = figures.table(rows, setup)
    (out / "table.md").write_text(table, encoding="utf-8")
    (out / "utilisation.svg").write_text(draw.utilisation(rows, setup), encoding="utf-8")
    (out / "period.svg").write_text(draw.period(rows, setup), encoding="utf-8")
    print(table)
    code = 0
    for row in measured:
        one = figures.result(row, rows, setup)
        if not one.bytes_agree:
            code = 1
            print(
                f"bytes: {figures.label(row, int(setup['keys'][figures.TAU]))} at {row['rate']} "
                f"Mbit/s: {one.claimed_ratio:.3f} of what dcn/bytes_sent claims is on the link."
            )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
