"""Short runs: what makes DiLoCo worse than data parallelism, each made once on purpose.

    PYTHONPATH=. python benchmarks/symptoms.py [group=symptoms|first_hour] [out=FOLDER] [key=value]

symptoms: one thing wrong in each run, drawn beside a healthy one. first_hour: the modes after 200
and 800 steps at several outer learning rates and momenta. Every row is a run of maxdiloco.train of
a minute on an idle core; other keys are the trainer's. A run that was ended goes on at its rows.
Writes table.md and, for the symptoms, a figure each.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.learning import draw_cases
from benchmarks.learning.cases import BASE, GROUPS, Case
from benchmarks.link.command import divided, guarded, help_text
from benchmarks.link.rows import ROOT, RowError
from maxdiloco.errors import ConfigError

OWN = {"group": "symptoms", "out": "runs/symptoms"}
Rows = list[dict[str, Any]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    own, keys = divided(argv, OWN)
    if own["group"] not in GROUPS:
        raise ConfigError(f"group={own['group']} is unknown. Use {' or '.join(GROUPS)}.")
    out = pathlib.Path(own["out"]).resolve()
    cases = GROUPS[own["group"]]
    found: dict[str, Rows] = {}
    for case in cases:
        found[case.name] = rows_of(case, keys, out)
        print(f"{case.name}: {last(found[case.name]):.4f}", flush=True)
    text = table(cases, found)
    (out / f"{own['group']}.md").write_text(text, encoding="utf-8")
    for case in cases:
        if case.metric:
            figure = draw_cases.figure(case, found[case.name], found[case.beside], found)
            (out / f"{folder_name(case)}.svg").write_text(figure, encoding="utf-8")
    print(text)
    return 0


def keys_of(case: Case, own: Mapping[str, str], folder: pathlib.Path) -> dict[str, Any]:
    """The trainer's keys of a case. own: those of the command line."""
    cache = folder.parent / "jax_cache"
    where = {"run_name": "run", "base_output_directory": folder, "jax_cache_dir": cache}
    return BASE | dict(case.keys) | dict(own) | where


def folder_name(case: Case) -> str:
    """Name of a case's folder and figure."""
    return case.name.replace(",", "").replace("=", "").replace(" ", "_")


def rows_of(case: Case, own: Mapping[str, str], out: pathlib.Path) -> Rows:
    """The rows of metrics of a case, which is run if they are not there. Raises RowError."""
    folder = out / folder_name(case)
    keys = keys_of(case, own, folder)
    stored = _stored(folder)
    if stored and stored[-1]["step"] == int(keys["steps"]) and "eval/loss" in stored[-1]:
        return stored
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run" / "metrics.jsonl").unlink(missing_ok=True)
    module = [sys.executable, "-m", "benchmarks.learning.process", ""]
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            module + [f"{name}={value}" for name, value in keys.items()],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if code:
        raise RowError(f"{case.name}: exit code {code}, see {folder / 'log'}.")
    return _stored(folder)


def _stored(folder: pathlib.Path) -> Rows:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last(rows: Rows) -> float:
    """The last loss of theta."""
    return rows[-1]["eval/loss"]


def table(cases: Sequence[Case], found: Mapping[str, Rows]) -> str:
    """Loss of theta and what the metrics said; differences are to data parallelism as long."""
    lines = [
        "| run | loss of theta | to data parallel | cosine | outer update | drift |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    base = {
        rows[-1]["step"]: last(rows) for name, rows in found.items() if "data parallel" in name
    }
    for case in cases:
        rows = found[case.name]
        difference = f"{last(rows) / base[rows[-1]['step']] - 1:+.1%}"
        cells = [_median(rows, f"diloco/{name}") for name in
                 ("outer_grad_cosine", "outer_update_ratio", "drift")]  # fmt: skip
        same_text = "dataset_mixture" not in case.keys
        shown = difference if same_text and "data parallel" not in case.name else ""
        lines.append(f"| {case.name} | {last(rows):.4f} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _median(rows: Rows, name: str) -> str:
    values = sorted(row[name] for row in rows if name in row)
    return f"{values[len(values) // 2]:.3g}" if values else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
