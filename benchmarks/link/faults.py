"""One case: a run on hosts with a fault at a chosen moment, and the result of every process.

A link that is cut drops frames without a word: the neighbour entry of the sending host has an
address that nobody has. Nothing on the way sends an error back, as with a dead switch.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.link.hosts import DEVICE, Hosts, Link, hosts
from benchmarks.link.rows import PORT, ROOT, RowError, environment, start, tails, wait
from maxdiloco.errors import ConfigError

NOBODY = "02:00:00:00:00:99"  # a locally administered address that no host has
ARRIVED = "flight['incoming']", "flight['arrived']"
POLL_S = 0.02
START_S = 300.0  # until the moment, and for a run to end; our choice
ERROR = re.compile(r"^\w+Error: .*", re.MULTILINE)


# Connections that say nothing, a byte each second, or nonsense; those that are closed come again.
FLOOD = """
import os, socket, sys, time
address, count, open_ = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), {}
while True:
    for i in range(count):
        try:
            if i not in open_:
                open_[i] = socket.create_connection(address, timeout=1)
                open_[i].setblocking(False)
                open_[i].send(os.urandom(i % 3 // 2 * 1000))
            elif i % 3 == 1:
                open_[i].send(b"\\x16")
            if open_[i].recv(100) == b"":
                del open_[i]
        except BlockingIOError:
            pass
        except OSError:
            open_.pop(i, None)
    time.sleep(1)
"""


# Connections one after the other: random bytes, or TLS with a certificate of another authority.
GARBAGE = """
import os, socket, sys, time
while True:
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1) as connection:
            connection.sendall(os.urandom(100_000))
    except OSError:
        pass
    time.sleep(0.01)
"""
WRONG_SECRET = """
import socket, ssl, sys, time
from maxdiloco.cluster import certificates
authority = certificates.authority_key(b"not the secret of the run")
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with certificates.key_files(authority, certificates.name_of(1)) as keys:
    context.load_cert_chain(keys.certificate, keys.key)
while True:
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1) as plain:
            with context.wrap_socket(plain) as connection:
                connection.sendall(b"POST /start/bulk HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                connection.recv(100)
    except OSError:
        pass
    time.sleep(0.01)
"""
CLIENTS = {"flood": FLOOD, "garbage": GARBAGE, "wrong secret": WRONG_SECRET}


class CaseError(RowError):
    """A case did not come to its fault, or its processes hang."""


class Fault(NamedTuple):
    """The fault that hits host or process `victim`.

    kind: kill, stop, cut, or one of CLIENTS: unauthenticated clients, 1,000 of them in a flood.
    seconds: how long; None: until the end. sends, receives: which direction of the victim's link a
    cut drops.
    """

    kind: str
    victim: int = 1
    seconds: float | None = None
    sends: bool = True
    receives: bool = True

    def is_survivable(self, timeout_s: float) -> bool:
        """Whether the run has to survive it."""
        return self.seconds is not None and self.seconds < timeout_s


class End(NamedTuple):
    """The result of a process. after_s: since the fault [s]. stall_s: longest step since then."""

    code: int
    after_s: float
    stall_s: float
    line: str


def train(
    network: Hosts, folder: pathlib.Path, keys: Mapping[str, Any], where: Sequence[object]
) -> list[subprocess.Popen]:
    """Start a process of the run on every host. where: VICTIM MOMENT T of fault_process."""
    module = [sys.executable, "-m", "benchmarks.link.fault_process", str(folder)]
    command = [*module, *map(str, where), *(f"{key}={value}" for key, value in keys.items())]
    folder.mkdir(parents=True)
    return start(network, [command] * len(network.names), folder, environment(network))


def run_without_fault(
    count: int, link: Link, folder: pathlib.Path, keys: Mapping[str, Any]
) -> None:
    """Train to the end on new hosts. Raises RowError."""
    with hosts(count, link) as network:
        wait(train(network, folder, keys, (-1, "none", 0)), folder, START_S)


def run_with_fault(
    fault: Fault,
    moment: tuple[str, int],
    count: int,
    link: Link,
    folder: pathlib.Path,
    keys: Mapping[str, Any],
    limit_s: float,
) -> list[End]:
    """Run into a fault on new hosts. moment: its name and its step. limit_s: for all to end.

    Raises CaseError.
    """
    with hosts(count, link) as network:
        processes = train(network, folder, keys, (fault.victim, *moment))
        _wait_for(folder / "held", processes, folder)
        if moment[0] == "at apply":
            for i in set(range(count)) - {fault.victim}:
                _wait_for(folder / f"take.{i}", processes, folder)
        begun = time.monotonic()
        until = begun + (fault.seconds or 0.0)
        _begin(fault, network, processes[fault.victim])
        (folder / "go").touch()
        ends: dict[int, float] = {}
        over = fault.seconds is None
        while len(ends) < count:
            time.sleep(POLL_S)
            now = time.monotonic()
            if not over and now >= until:
                over = _finish(fault, network, processes[fault.victim])
            for i, process in enumerate(processes):
                if process.poll() is not None:
                    ends.setdefault(i, now)
            if now > begun + limit_s:
                hang = sorted(set(range(count)) - set(ends))
                raise CaseError(f"{folder}: processes {hang} hang. {tails(folder)}")
        return [
            End(
                processes[i].returncode,
                ends[i] - begun,
                _stall(folder / f"steps.{i}", begun),
                last_line((folder / f"process_{i}.log").read_text(errors="replace")),
            )
            for i in range(count)
        ]


def _begin(fault: Fault, network: Hosts, victim: subprocess.Popen) -> None:
    if fault.kind == "cut":
        _cut(fault, network, mend=False)
    elif fault.kind in CLIENTS:  # of the port after JAX's
        client = [sys.executable, "-c", CLIENTS[fault.kind], network.addresses[0], str(PORT + 1)]
        network.start(fault.victim, [*client, "1000"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    else:
        os.kill(victim.pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _finish(fault: Fault, network: Hosts, victim: subprocess.Popen) -> bool:
    if fault.kind == "cut":
        _cut(fault, network, mend=True)
    elif fault.kind in CLIENTS:
        network.processes.pop().kill()
    else:
        victim.send_signal(signal.SIGCONT)
    return True


def _cut(fault: Fault, network: Hosts, *, mend: bool) -> None:
    """Drop the frames that the victim's host sends or receives, or let them pass again."""
    for other in set(range(len(network.names))) - {fault.victim}:
        for cut, source, target in (
            (fault.sends, fault.victim, other),
            (fault.receives, other, fault.victim),
        ):
            if cut:
                address = _mac(network.names[target]) if mend else NOBODY
                neighbour = (network.addresses[target], "lladdr", address, "nud", "permanent")
                _ip(network.names[source], "neigh", "replace", *neighbour, "dev", DEVICE)


def _mac(name: str) -> str:
    return json.loads(_ip(name, "-json", "link", "show", "dev", DEVICE))[0]["address"]


def _ip(name: str, *words: str) -> str:
    command = ["ip", "-n", name, *words]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}.")
    return done.stdout


def _wait_for(
    file: pathlib.Path, processes: Sequence[subprocess.Popen], folder: pathlib.Path
) -> None:
    limit = time.monotonic() + START_S
    while not file.exists():
        if time.monotonic() > limit or any(p.poll() is not None for p in processes):
            raise CaseError(f"{folder}: never came to {file.name}. {tails(folder)}")
        time.sleep(POLL_S)


def _stall(path: pathlib.Path, begun: float) -> float:
    """The longest time from one step to the next, of those that end after `begun` [s]."""
    times = [float(line) for line in path.read_text().split()]
    return max((b - a for a, b in zip(times, times[1:], strict=False) if b > begun), default=0.0)


def last_line(text: str) -> str:
    """The error of ours, else the last line."""
    return (ERROR.findall(text) or text.splitlines() or [""])[-1]


def digests(run: pathlib.Path, step: int) -> dict[str, str]:
    """{item and leaf: digest of its bits} of a checkpoint.

    Without what has arrived: places that wait for their next exchange may still hold the last one.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    found = {}
    for item in sorted((run / "checkpoints" / str(step)).iterdir()):
        if item.name == "meta" or not item.is_dir():
            continue
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.metadata(item).item_metadata.tree
            plan = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            read = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=plan))
        for path, leaf in jax.tree_util.tree_leaves_with_path(read):
            bits = f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes()
            found[item.name + jax.tree_util.keystr(path)] = hashlib.sha256(bits).hexdigest()
    return {name: one for name, one in found.items() if not name.startswith(ARRIVED)}


def clear(folder: pathlib.Path) -> pathlib.Path:
    """The folder, which is not there any more."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
