"""Breaks one line of the package at a time and asks whether the default tier notices.

    .venv/bin/python tests/mutate.py [NUMBER ...]

Each mutation is made in a copy of the checkout. The tests of its own room run first, then, if they
pass, all of the default tier; the first failure ends a mutation. A line tells for each what was
broken and the test that found it. tests/README.md has the outcome.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
COPIED = ("maxdiloco", "configs", "tests", "scripts", "benchmarks", "docs")
WORKERS = os.environ.get("MAXDILOCO_TEST_WORKERS", "2")


class Mutation(NamedTuple):
    """What stands in a file of the package, what is put in its place, and why that is wrong."""

    file: str
    old: str
    new: str
    wrong: str


MUTATIONS = (
    Mutation("diloco/outer.py", "_float32(o) - _float32(i), outer_p",
             "_float32(i) - _float32(o), outer_p", "sign of the outer gradient"),
    Mutation("diloco/outer.py", "(1 - alpha) * (_float32(o)", "alpha * (_float32(o)",
             "the merge weighs theta by alpha"),
    Mutation("diloco/schedule.py", "tuple(p * H // P for p in range(P))",
             "tuple(-(-p * H // P) for p in range(P))", "offsets rounded up"),
    Mutation("diloco/fragments.py", "range(short + (p < longer))",
             "range(short + (P - p <= longer))",
             "the last runs of layers are the longer ones"),
    Mutation("diloco/codecs.py", ".astype(np.uint32) // 127", ".astype(np.uint32) // 126",
             "scale of int8"),
    Mutation("engine/collective.py", "first = jax.lax.axis_index(\"diloco\") * num_here",
             "first = jax.lax.axis_index(\"diloco\")", "an eager replica uses another's index"),
    Mutation("engine/collective.py", "outer.eager_own_term(stale, x_N, r, first + s)",
             "outer.eager_own_term(x_N, stale, r, first + s)", "fresh and stale terms swapped"),
    Mutation("engine/host_transfer.py", "start = shard.slice_index * transfer.rows",
             "start = (self._slices - 1 - shard.slice_index) * transfer.rows",
             "replicas of two slices swapped"),
    Mutation("engine/diloco.py", "residual = with_fragment(state.residual, plan, sent.residual)",
             "residual = state.residual", "the residual of error feedback is dropped"),
    Mutation("engine/reduce_scatter.py", "row(mine * replicas + s)", "row(s)",
             "a slice passes on the headers of other replicas"),
    Mutation("engine/transports.py", "self._pending(state)[-1:]", "self._pending(state)[:0]",
             "what was in flight is not sent again after a restore"),
    Mutation("checkpoint/write.py", "        durable.sync_tree(folder)\n", "",
             "no fsync before a checkpoint becomes visible"),
    Mutation("checkpoint/seal.py", "if size_now != size:", "if False:", "sizes unchecked"),
    Mutation("checkpoint/arrays.py",
             "READ_AHEAD_BYTES:\n                found.append(started.popleft()",
             "READ_AHEAD_BYTES:\n                found.append(started.pop()",
             "leaves read in another order"),
    Mutation("data/order.py", "((step - position.s0) * position.M + replicas) * position.B",
             "((step - position.s0) * position.M + replicas) * position.M",
             "replicas read each other's sequences"),
    Mutation("data/order.py", "-(-(number + 1) * T // share_K[k])",
             "(number + 1) * T // share_K[k]", "deadlines of a mixture rounded down"),
    Mutation("data/shards.py", "if size_now != tokens * width:", "if False:",
             "a shard cut short is read"),
    Mutation("data/shards.py", "if zlib.crc32(content) != ", "if False and 0 != ",
             "a shard that was replaced is read"),
    Mutation("cluster/channel.py", "if number != self._received + 1:", "if False:",
             "a message out of turn is delivered"),
    Mutation("cluster/certificates.py", "context.verify_mode = ssl.CERT_REQUIRED",
             "context.verify_mode = ssl.CERT_OPTIONAL",
             "a client without a certificate is accepted"),
    Mutation("diloco/schedule.py", "not 0 <= tau < H", "not 0 <= tau <= H", "tau = H is taken"),
    Mutation("run/resume.py", "if as_json(before) != as_json(after):",
             "if name in saved and as_json(before) != as_json(after):",
             "a key younger than the checkpoint may differ"),
)  # fmt: skip


def broken_copy(mutation: Mutation, folder: pathlib.Path) -> None:
    """A checkout in `folder` with the mutation in it."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    path = folder / "maxdiloco" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))


def finder(folder: pathlib.Path, *arguments: str) -> str:
    """The first test that fails in a copy, or "" when none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=120", *arguments]
    environ = os.environ | {"PYTHONPATH": str(folder), "CI": "true"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else done.stdout[-300:]


def main(numbers: list[int]) -> None:
    """Prints a line for each mutation, and how many were found."""
    chosen = numbers or range(1, len(MUTATIONS) + 1)
    caught = 0
    for number in chosen:
        mutation = MUTATIONS[number - 1]
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            broken_copy(mutation, folder)
            room = f"tests/{pathlib.Path(mutation.file).parent}"
            by = finder(folder, room) or finder(folder, "-n", WORKERS, "--dist", "loadscope")
        caught += bool(by)
        print(f"{number:2} {mutation.file}: {mutation.wrong}: {by or 'NOT FOUND'}", flush=True)
    print(f"{caught} of {len(chosen)} found")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
