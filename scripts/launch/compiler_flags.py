"""Flags of the compilers and their runtimes, from a file like xla_flags.env."""

import pathlib
import re

# Which variable of the file a kind of hardware reads.
OF = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}


def read(file: str, hardware: str, faults: list[str]) -> str:
    """The flags for a kind of hardware; "" for file=none. Faults are lines in faults.

    A line of the file is a comment, or VARIABLE+=" --flag=value" as bash takes it.
    """
    if file == "none":
        return ""
    path = pathlib.Path(file)
    if not path.is_file():
        faults.append(f"XLA_FLAGS_FILE={file} does not exist. Name a file, or set it to none.")
        return ""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r'([A-Z_]+)\+="( --[\w.]+=[\w.]+)"', line)
        if not match or match[1] not in OF.values():
            faults.append(
                f"XLA_FLAGS_FILE={file}: line {number} is no flag: {line}. Write it as "
                'LIBTPU_INIT_ARGS+=" --flag=value", or put # in front.'
            )
            continue
        found[match[1]] = found.get(match[1], "") + match[2]
    return found.get(OF[hardware], "").strip()
