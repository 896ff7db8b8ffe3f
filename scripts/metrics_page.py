"""Write the tables of docs/reference/metrics.md from maxdiloco/metrics/definitions.py.

    PYTHONPATH=. python scripts/metrics_page.py

Rewrites the page; a test compares it.

The page's prose is written by hand. The tables are between START and END, one for each prefix.
"""

import pathlib

from maxdiloco.metrics.definitions import METRICS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
START, END = "<!-- tables of scripts/metrics_page.py -->\n", "<!-- end -->\n"
TITLES = {
    "learning": "Training",
    "eval": "Held-out text",
    "data": "Data",
    "moe": "Experts",
    "diloco": "Outer optimization",
    "perf": "Speed",
    "dcn": "Communication",
    "islands": "Islands",
    "device": "Memory",
}


def tables() -> str:
    """Return a section with a table for each prefix."""
    lines = []
    for prefix, title in TITLES.items():
        lines += ["", f"## {title}", "", "| metric | unit | meaning | look at it when |"]
        lines.append("|---|---|---|---|")
        for metric in METRICS:
            if metric.name.startswith(f"{prefix}/"):
                cells = [f"`{metric.name}`", metric.unit, metric.meaning, metric.look_when]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


def written(page: str) -> str:
    """Return the page with current tables."""
    before, _, rest = page.partition(START)
    return before + START + tables() + END + rest.partition(END)[2]


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
