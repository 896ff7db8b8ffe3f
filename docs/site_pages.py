"""The parts of the documentation site that are generated when it is built.

A page marks where a part goes with `<!-- generated: NAME -->`, which a reader on GitHub does not
see. The navigation of the site comes from the links of docs/index.md.
"""

import pathlib
import posixpath
import re
from collections.abc import Iterator

from maxdiloco import diloco
from maxdiloco.config.keys import KEYS, Key
from maxdiloco.config.values import show

ROOT = pathlib.Path(__file__).parents[1]
INDEX = "docs/index"
MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+\.md)\)")
CHANGE = {"fixed": "no", "free": "yes", "drops in-flight": "yes; drops in-flight exchanges"}
# Pages that are reached from another page than the index: globs below the key's page.
CHILDREN = {"benchmarks/README": ("results/*", "link/README")}
API = """\
```{eval-rst}
.. autoclass:: maxdiloco.DiLoCo
   :members:

.. autoclass:: maxdiloco.engine.settings.ExchangeSettings

.. autoclass:: maxdiloco.Stacked

.. autoclass:: maxdiloco.Island
   :members:

.. autoclass:: maxdiloco.Checkpointer
   :members:

.. autofunction:: maxdiloco.save_state

.. autofunction:: maxdiloco.restore_state
```
"""


def filled(page: str, text: str) -> str:
    """Return the text of a page with its generated parts.

    Args:
      page: path from the root of the repository, without a suffix.
      text: Markdown.

    Raises:
      KeyError: the text names a part that does not exist.
    """
    parts = {
        "algorithm-lines": algorithm_lines,
        "configuration": configuration,
        "python-api": lambda: API,
    }
    text = MARKER.sub(lambda found: parts[found[1]](), text)
    if page == INDEX:
        text += navigation(text)
    if page in CHILDREN:
        text += _toctree("", CHILDREN[page], glob=True)
    return text


def navigation(index: str) -> str:
    """Return a hidden table of contents for each section of the index that has links."""
    found = []
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        folder = posixpath.dirname(INDEX)
        pages = [posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(body)]
        if pages:
            found.append(_toctree(title.strip(), [f"/{page}" for page in pages]))
    return "".join(found)


def _toctree(caption: str, pages: list[str] | tuple[str, ...], *, glob: bool = False) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    options += [":glob:"] if glob else []
    return "\n\n" + "\n".join(["```{toctree}", *options, "", *pages, "```", ""])


def algorithm_lines() -> str:
    """Return the table of the papers' lines and their functions, from maxdiloco/diloco."""
    return "\n".join(line for line in diloco.__doc__.splitlines() if line.startswith("|"))


def configuration() -> str:
    """Return a table of the keys of each group, from the models of maxdiloco/config."""
    return "\n".join(_configuration_lines())


def _configuration_lines() -> Iterator[str]:
    group, heading = "", ""
    for key in KEYS.values():
        if key.group != group:
            group, heading = key.group, ""
            title = re.sub(r" \(docs/[^)]*\)", "", key.title)
            yield f"\n## {group}\n\n{title[:1].upper()}{title[1:]}.\n"
            yield from _head()
        if key.heading != heading:
            heading = key.heading
            title = re.sub(r" \(docs/[^)]*\)", "", heading)
            yield f"\n### {title[:1].upper()}{title[1:]}\n"
            yield from _head()
        yield _row(key, f"[`{key.name}`]{{#{key.name}}}")
        for entry in key.entries.values():
            yield _row(entry, f"`{key.name}`: `{entry.name}`")


def _head() -> tuple[str, str]:
    return "| key | default | values | meaning | change on resume |", "|---|---|---|---|---|"


def _row(key: Key, name: str) -> str:
    required = key.field.is_required()
    default = "required" if required else f"`{show(key.default)}`" if key.default != "" else "empty"
    values = ", ".join(part for part in (key.expected(), key.unit) if part)
    cells = [name, default, values, key.description, CHANGE[key.resume.tag]]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
