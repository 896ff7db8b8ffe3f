"""Check the relative links and the anchors of all Markdown pages.

    python scripts/check_links.py

Prints each link that leads nowhere; the exit code is then 1. Addresses on the web are not opened.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    """Return a page without its code blocks and code spans."""
    text = re.sub(r"^(```).*?^```$", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^(```).*?^```$", "", text, flags=re.S | re.M)
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = 0
        while (name := f"{anchor}-{count}" if count else anchor) in found:
            count += 1
        found.add(name)
    return found


def broken(root: pathlib.Path, pages: list[pathlib.Path]) -> list[str]:
    """Return a line for each link of the pages that leads nowhere."""
    lines = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in LINK.findall(without_code(text)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                lines.append(f"{page.relative_to(root)}: {link}: no such file")
            elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
                lines.append(f"{page.relative_to(root)}: {link}: no such heading")
    return lines


def main() -> int:
    """Check every Markdown page that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = broken(ROOT, [ROOT / name for name in names.splitlines() if (ROOT / name).exists()])
    for line in lines:
        print(line)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
