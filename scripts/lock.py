"""Read and write requirements.lock: every pin, its hashes, and the extras that need it.

    python scripts/lock.py extras [EXTRA,EXTRA...]  pins with hashes of the package and these extras
    python scripts/lock.py packages NAME...         pins with hashes of these packages
    python scripts/lock.py pins                     every pin without hashes, for `pip install -c`
    python scripts/lock.py write [OPTION...]        resolve again with uv, which has to be on PATH

The first two print a file for `pip install --require-hashes --no-deps -r`. All but `write` need
nothing but Python, as an image and a new environment have no more. `write` keeps the pins that fit
setup.py and accepts the options of `uv pip compile`, for example `--upgrade-package jax`.
"""

import ast
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
BASE = "base"  # requirements of the package without extras, and setuptools, which builds it
OLDEST_PYTHON = "3.11"  # of setup.py; markers tell the pins of newer ones apart
HEADER = """\
# The exact versions that maxdiloco is tested with on Linux x86_64. It has the hashes of all their
# files, also for aarch64 and for Python 3.11 and newer. scripts/lock.py writes it, and selects the
# pins of some extras. The file has the pins of all extras, with CUDA 12 and 13 and PyTorch.
"""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    match arguments:
        case ["extras", *given] if len(given) <= 1:
            wanted = {BASE, *filter(None, "".join(given).split(","))}
            known = {BASE, *requirements()}
            if unknown := sorted(wanted - known):
                return fail(f"{','.join(unknown)}: expected extras: {', '.join(sorted(known))}.")
            print("\n".join(pin for extras, pin in read() if extras & wanted))
        case ["packages", *names] if names:
            pins = [pin for _, pin in read() if pin.partition("==")[0] in names]
            if missing := sorted(set(names) - {pin.partition("==")[0] for pin in pins}):
                return fail(f"{', '.join(missing)}: expected packages of {LOCK.name}.")
            print("\n".join(pins))
        case ["pins"]:
            print("\n".join(pin.partition(" \\")[0] for _, pin in read()))
        case ["write", *options]:
            write(options)
        case _:
            print(__doc__.partition("\n\n")[2].partition("\n\n")[0], file=sys.stderr)
            return 2
    return 0


def fail(line: str) -> int:
    """Print a user's error; returns the exit code."""
    print(f"lock: {line}", file=sys.stderr)
    return 2


def read() -> list[tuple[set[str], str]]:
    """Return (the extras that need it, the pin with its marker and hashes) of each pin."""
    text = LOCK.read_text(encoding="utf-8").removeprefix(HEADER)
    parts = re.split(r"(?m)^# extras: (.*)\n", text)[1:]
    return [
        (set(extras.split(", ")), pin.rstrip("\n"))
        for extras, pin in zip(parts[::2], parts[1::2], strict=True)
    ]


def requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra of setup.py, without the ones of BASE."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (setup,) = [call for call in calls if ast.unparse(call.func) == "setup"]
    given = {keyword.arg: keyword.value for keyword in setup.keywords}
    needed = {BASE: [*ast.literal_eval(given["install_requires"]), "setuptools"]}
    return needed | ast.literal_eval(given["extras_require"])


def write(options: list[str]) -> None:
    """Resolve all extras together, and each one by itself to find its own pins."""
    needed = requirements()
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "all.txt")
        if LOCK.exists():  # uv prefers the pins of the file that it writes
            output.write_text("\n".join(pin for _, pin in read()), encoding="utf-8")
        everything = [line for lines in needed.values() for line in lines]
        _compile(everything, "--generate-hashes", f"--output-file={output}", *options)
        pins = re.findall(r"(?m)^\S.*(?:\n .*)*", output.read_text(encoding="utf-8"))
        found = {
            extra: _compile(needed[BASE] + lines, f"--constraints={output}").split()
            for extra, lines in needed.items()
        }
    lines = [HEADER]
    for pin in pins:
        extras = [extra for extra, words in found.items() if pin.split()[0] in words]
        named = [BASE] if BASE in extras else sorted(extras)
        lines.append(f"# extras: {', '.join(named)}\n{pin}\n")
    LOCK.write_text("".join(lines), encoding="utf-8")


def _compile(lines: list[str], *options: str) -> str:
    command = ["uv", "pip", "compile", "-", "--universal", f"--python-version={OLDEST_PYTHON}"]
    command += ["--no-annotate", "--no-header", "--quiet", *options]
    text = "\n".join(lines)
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
