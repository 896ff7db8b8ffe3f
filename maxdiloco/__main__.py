"""List the programs of the package: `python -m maxdiloco`."""

import ast
import pathlib
from collections.abc import Sequence

from maxdiloco import output
from maxdiloco.command_line import HELP, guarded
from maxdiloco.errors import ConfigError


@guarded
def main(argv: Sequence[str]) -> int:
    """Print the programs of the package; returns the exit code."""
    programs = programs_of(pathlib.Path(__file__).parent)
    if argv and argv[0] not in HELP:
        names = ", ".join(programs)
        known = f"Run `python -m maxdiloco.{argv[0]}`." if argv[0] in programs else ""
        raise ConfigError(f"{argv[0]}: expected --help. {known or f'Programs: {names}.'}")
    rows = [(f"python -m maxdiloco.{name}", meaning) for name, meaning in programs.items()]
    width = max(len(command) for command, _ in rows)
    output.say("The programs of maxdiloco; each has --help and --version:\n")
    for command, meaning in rows:
        output.say(f"  {command.ljust(width)}  {meaning}")
    return 0


def programs_of(package: pathlib.Path) -> dict[str, str]:
    """Return {name: description} of the programs of a package, from their docstrings.

    A program is a module, or a folder with a module `__main__`, that defines `main`.
    """
    found = {}
    for path in [*package.glob("[!_]*.py"), *package.glob("*/__main__.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if "main" in functions:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found[name] = (ast.get_docstring(tree) or "").partition(": `")[0]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
