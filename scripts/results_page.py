"""Write the tables of docs/reference/results.md from benchmarks/results/.

    python scripts/results_page.py

Rewrites the page; a test compares it.

The page's prose is written by hand. A table follows a comment that names its source, and ends with
`<!-- end -->`:

    <!-- from loss_by_mode.md#the-first-hour, table 1, rows /DiLoCo/, columns mode; loss -->

`block` instead of `table` copies a preformatted block. `rows` is a regular expression that the
first cell (the line, for a block) has to match; `columns` are headings. Both may be left out. The
line above a table has the date and the command of its source.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "reference" / "results.md", ROOT / "benchmarks" / "results"
MARKER = re.compile(
    r"<!-- from (?P<file>[\w.]+)#(?P<anchor>[\w-]+), (?P<kind>table|block) (?P<number>\d+)"
    r"(?:, rows /(?P<rows>.*?)/)?(?:, columns (?P<columns>.*?))? -->\n"
)
END = "<!-- end -->\n"


def anchor_of(title: str) -> str:
    """Return GitHub's anchor of a heading."""
    kept = re.sub(r"[^\w\- ]", "", title.strip().lower())
    return kept.replace(" ", "-")


def section(text: str, anchor: str) -> tuple[str, str]:
    """Return the text below a heading, up to the next heading, and the text of its parent.

    Raises KeyError if no heading has the anchor.
    """
    headings = list(re.finditer(r"^(#{2,3}) (.+)$", text, re.M))
    parent = ""
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        body = text[heading.end() : following.start() if following else len(text)]
        if len(heading[1]) == 2:
            parent = body
        if anchor_of(heading[2]) == anchor:
            return body, parent
    raise KeyError(anchor)


def cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(body: str) -> list[list[str]]:
    """Return the tables of a section, each as its lines."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", body + "\n", re.M)]


def chosen(lines: list[str], rows: str | None, columns: str | None) -> list[str]:
    """Return the lines of a table that has only the named rows and columns."""
    head = cells(lines[0])
    keep = range(len(head))
    if columns:
        keep = [head.index(name.strip()) for name in columns.split(";")]
    body = [line for line in lines[2:] if rows is None or re.search(rows, cells(line)[0])]
    if not body:
        raise ValueError(f"no row matches /{rows}/")
    parts = [[cells(line)[k] for k in keep] for line in (*lines[:2], *body)]
    return ["| " + " | ".join(part) + " |" for part in parts]


def generated(marker: re.Match[str]) -> str:
    """Return the text between a marker and its end."""
    body, parent = section((RESULTS / marker["file"]).read_text(encoding="utf-8"), marker["anchor"])
    index = int(marker["number"]) - 1
    if marker["kind"] == "table":
        lines = chosen(tables(body)[index], marker["rows"], marker["columns"])
        here = f"](../../benchmarks/results/{marker['file']}#"
        lines = [line.replace("](#", here) for line in lines]
    else:
        block = re.findall(r"^```\n(.*?)^```", body, re.M | re.S)[index].splitlines()
        wanted = [line for line in block if not marker["rows"] or re.search(marker["rows"], line)]
        lines = ["```", *wanted, "```"]
    date = re.search(r"Measured (\d{4}-\d\d-\d\d)", body) or re.search(
        r"Measured (\d{4}-\d\d-\d\d)", parent
    )
    command = re.search(r"PYTHONPATH=[^`]*?(?=`|\n\n|\n```|\s+\[|\s{3})", body) or re.search(
        r"`(python -m [^`]+)`", body
    )
    source = f"[all rows](../../benchmarks/results/{marker['file']}#{marker['anchor']})"
    words = [f"Measured {date[1]}" if date else "", source]
    if command:
        text = re.sub(r"\s+", " ", command[0].strip("`"))
        words.insert(1, f"`{text}`")
    note = ", ".join(word for word in words if word)
    return f"\n{note}:\n\n" + "\n".join(lines) + "\n\n"


def written(page: str) -> str:
    """Return the page with current tables."""
    parts, at = [], 0
    for marker in MARKER.finditer(page):
        end = page.index(END, marker.end())
        parts += [page[at : marker.end()], generated(marker)]
        at = end
    return "".join([*parts, page[at:]])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
