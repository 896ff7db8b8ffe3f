"""Seeded mutations of the files that programs read: bytes, JSON values, and the kind of file."""

import json
import os
import random

# Values that no program writes. OUTSIDE is replaced by the path of a file that nobody may open.
OUTSIDE = "OUTSIDE"
HOSTILE = (
    None, True, -1, 0, 10**9, 10**30, 1e308, 0.5, "", "x" * 5000, "\x1b[31m", "\u0000", "../../..",
    OUTSIDE, [], {}, [None], {"a": 1}, "float4_e3m0", "[1", "1e999", "gs://bucket/a",
)  # fmt: skip
# Text instead of a value that json.dumps cannot write.
RAW = ("1e999", "NaN", "-Infinity", "9" * 5000, "[" * 100_000, '{"a":' * 50_000)


def mutate(path, rng, outside):
    """Change one file in place.

    Args:
      path: pathlib.Path of the file.
      rng: random.Random, which decides the mutation.
      outside: path that is put into values; a program must not open it.

    Returns:
      A few words on the mutation.
    """
    content = path.read_bytes()
    changes = [flip_bits, cut, replace_by_other_kind, add_bytes]
    if parsed(content) is not None:
        changes += [change_value] * 6 + [raw_value] * 2
    change = rng.choice(changes)
    change(path, content, rng, outside)
    return f"{change.__name__} of {path.name}"


def parsed(content):
    """The JSON object or list in a file, or None."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) and found else None


def flip_bits(path, content, rng, outside):
    """Flip up to eight bits."""
    data = bytearray(content or b"a")
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path, content, rng, outside):
    """Keep the first bytes, perhaps none."""
    path.write_bytes(content[: rng.choice([0, 1, len(content) // 2, max(0, len(content) - 1)])])


def add_bytes(path, content, rng, outside):
    """Add bytes before or after, some of which are not UTF-8."""
    more = rng.choice([b"\xff\xfe", b"\x00" * 4096, b"}", content, b"\n- &a [*a]\n"])
    path.write_bytes(more + content if rng.random() < 0.5 else content + more)


def replace_by_other_kind(path, content, rng, outside):
    """Put a FIFO, a folder, a device or nothing in the place of the file."""
    path.unlink()
    kind = rng.choice(["fifo", "folder", "device", "nothing"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")


def change_value(path, content, rng, outside):
    """Replace, delete or double one value of a JSON file."""
    root = json.loads(content)
    holder, key = chosen(root, rng)
    value = rng.choice(HOSTILE)
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = str(outside) if value is OUTSIDE else value
    path.write_text(json.dumps(root))


def raw_value(path, content, rng, outside):
    """Replace one value of a JSON file by text that is no usual JSON."""
    root = json.loads(content)
    holder, key = chosen(root, rng)
    holder[key] = "HERE"
    path.write_text(json.dumps(root).replace('"HERE"', rng.choice(RAW), 1))


def chosen(root, rng):
    """(container, key) of a value anywhere in a JSON tree."""
    found = []
    stack = [root]
    while stack:
        node = stack.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    return rng.choice(found)


def rng_of(*names):
    """A generator that these names seed, the same in every process."""
    return random.Random("/".join(map(str, names)))
