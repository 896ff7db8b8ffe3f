"""Print sentences that are hard to read, in the lines that changed since a commit.

    python scripts/plain_language.py [COMMIT]           # by default main, or the last commit
    python scripts/plain_language.py --all [PATH ...]   # whole files; by default all that git knows

Reads Markdown, docstrings, comments and messages. It is a hint and not a rule: the exit code is 0,
and a sentence that is clear may stay.
"""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
LONG = 25  # words of a sentence
MESSAGE = 4  # words from which a string counts as a message
# A pattern and how to mend it.
PATTERNS = {
    "clause for a noun": (
        r"\b([Ww]hat(ever)?|[Ww]hoever)\b(?!:|[^.]*\?)|^(Who|Where)\b(?!.*\?)",
        "name the thing",
    ),
    "of without its noun": (r"^Of\b|\b(that|those) of\b", "put the noun first, or repeat it"),
    "preposition": (
        r"\bbeside\b|\bbut for\b|\bin place of\b",
        "in addition to; except; instead of",
    ),
    "word after its noun": (r"\b(?<!let )(?<!-)alone\b|\blikewise\b|\banew\b", "only; also; again"),
    "negated noun": (
        r"(?<![Tt]here )\b(is|are|was|were) "
        r"(no (?!longer\b|more\b|such\b|less\b|later\b)\w+|none of)\b",
        "is not a ...; expected one of ...",
    ),
    "personified software": (
        r"\b(says|said|told|strangers?|guests?)\b",
        "logs; is configured with",
    ),
    "all-purpose verb": (
        r"\b(go|goes|went|going) on\b|\bends? with \d|\b(lie|lies|lay) (in|on|at|below)\b"
        r"|\btaken (for|up)\b|\btakes? up\b",
        "continue; exit; is stored in",
    ),
    "private noun": (
        r"\bcarriers?\b|(?<!\()\btheta\b(?!'? (=|[-+]|\d))|\bin the (finer )?wire\b",
        "transport; outer parameters",
    ),
    "distant reference": (r"\bso (many|few|long|thin)\b|\bas many\b", "repeat the noun"),
}
# Parts of a line of Markdown that are not prose.
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|<[^>]*>")
ITEM = re.compile(r"\s*([*|>-]|\d+\.|#+)\s")
CELLS = re.compile(r"(?<=\S) {2,}(?=\S)")  # between the columns of a table in a docstring


class Text(NamedTuple):
    """A piece of prose, with the numbers of its first and last line."""

    first: int
    last: int
    text: str


class Finding(NamedTuple):
    """A sentence, and the pattern that it has."""

    first: int
    last: int
    pattern: str
    sentence: str


def prose(name: str, content: str) -> Iterator[Text]:
    """Return the prose of a file: paragraphs, docstrings, comments and messages."""
    if name.endswith(".md"):
        yield from _markdown(content)
    elif name.endswith(".py"):
        yield from _python(content)
    elif name.endswith((".sh", ".yml", ".yaml", ".toml")):
        yield from _comments(
            (number, found[1])
            for number, line in enumerate(content.splitlines(), 1)
            if (found := re.search(r"(?:^|\s)#+ (.*)", line))
        )


def _markdown(content: str) -> Iterator[Text]:
    """Return paragraphs, items of lists, headings and rows of tables, without code."""
    block: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*content.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        ends = fence or fenced or not line.strip() or ITEM.match(line)
        if ends and block:
            yield Text(start, number - 1, NOT_PROSE.sub("", " ".join(block)))
            block = []
        fenced ^= fence
        if fence or fenced or not line.strip() or (line.startswith("    ") and not block):
            continue
        if not block:
            start = number
        item = ITEM.match(line)
        block.append(line[item.end() if item else 0 :].strip())


def _comments(lines: Iterator[tuple[int, str]]) -> Iterator[Text]:
    """Join the comments of adjacent lines."""
    block: list[str] = []
    start = last = 0
    for number, text in lines:
        command = re.match(r"\s*(python|bash|PYTHONPATH=\S+) ", text)
        if block and (number != last + 1 or command):
            yield Text(start, last, " ".join(block))
            block = []
        if command:
            continue
        if not block:
            start = number
        block.append(text)
        last = number
    if block:
        yield Text(start, last, " ".join(block))


def _python(content: str) -> Iterator[Text]:
    whole_lines = []
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            number, text = token.start[0], token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                whole_lines.append((number, text))
            else:  # a comment behind code is about its line only
                yield Text(number, number, text)
    yield from _comments(iter(whole_lines))
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) >= MESSAGE:
                for offset, part in _blocks(node.value):
                    last = min(node.lineno + offset + part.count("\n"), node.end_lineno)
                    yield Text(node.lineno + offset, last, NOT_PROSE.sub("", part))


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    offset = 0
    for part in re.split(r"(\n\s*\n)", text):
        if part.strip():
            yield offset, part
        offset += part.count("\n")


def findings(name: str, content: str) -> Iterator[Finding]:
    """Return the sentences of a file that have a pattern."""
    for first, last, text in prose(name, content):
        for sentence in _sentences(text):
            for pattern, (expression, _) in PATTERNS.items():
                if re.search(expression, sentence):
                    yield Finding(first, last, pattern, sentence)
            if _is_long(sentence):
                yield Finding(first, last, "long sentence", sentence)


def _is_long(sentence: str) -> bool:
    """Return whether a sentence has too many words. Numbers and lists of names do not count."""
    words = [word for word in sentence.split() if re.search("[A-Za-z]", word)]
    is_list = not re.search(r"[.,:;?!]", sentence) and {"a", "the", "of", "to"}.isdisjoint(words)
    return len(words) > LONG and "|" not in sentence and not is_list


def _sentences(text: str) -> Iterator[str]:
    """Return the sentences of a text, and the cells of its tables."""
    lines: list[str] = [""]
    for line in map(str.strip, text.splitlines()):
        cells = CELLS.split(line)
        if len(cells) == 1:
            lines[-1] += f" {line}"
        else:
            lines += [*cells, ""]
    for line in lines:
        yield from filter(None, re.split(r"(?<=[.!?:])\s+", line.strip()))


def changed(commit: str) -> dict[str, set[int]]:
    """Return {file: its lines that differ from a commit}, files that git does not know included."""
    found: dict[str, set[int]] = {}
    name = ""
    for line in _git("diff", "-U0", "--no-color", commit).splitlines():
        if line.startswith("+++ "):
            name = line[6:] if line[4:6] == "b/" else ""
        elif name and (hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line)):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(name, set()).update(range(first, first + count))
    for name in _git("ls-files", "--others", "--exclude-standard").splitlines():
        found[name] = set(range(1, 100_000))
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _base() -> str:
    """Return the commit at which this branch left main; on main itself, its last commit."""
    done = subprocess.run(["git", "merge-base", "HEAD", "main"], capture_output=True, text=True)
    return done.stdout.strip() or "HEAD"


def main(arguments: list[str]) -> int:
    """Print the findings; returns 0."""
    everything = arguments[:1] == ["--all"]
    if everything:
        names = _git("ls-files", *arguments[1:]).splitlines()
        lines = dict.fromkeys(names)
    else:
        lines = changed(arguments[0] if arguments else _base())
    counts: Counter[str] = Counter()
    for name, numbers in sorted(lines.items()):
        path = pathlib.Path(name)
        if not path.is_file() or name == "scripts/plain_language.py":
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        for first, last, pattern, sentence in findings(name, content):
            if numbers is None or not numbers.isdisjoint(range(first, last + 1)):
                counts[pattern] += 1
                hint = PATTERNS[pattern][1] if pattern in PATTERNS else f"at most {LONG} words"
                print(f"{name}:{first}: {pattern} ({hint}): {sentence[:160]}")
    for pattern, count in counts.most_common():
        print(f"{count:5} {pattern}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
