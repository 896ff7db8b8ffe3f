"""Run members and their store under planned faults: islands_storm.py and storm_of_three.py.

A storm starts a server, which has host 0, and several members, and injects one fault after the
other. It does not know which system the members belong to: a `System` has the commands.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.link import counters, hosts
from benchmarks.link.rows import ROOT
from benchmarks.link.storm_figures import Fault, Outcome, Start, times_of
from maxdiloco.errors import ConfigError

ON_ONE_NETWORK = ("kill", "stop", "store away")  # faults that need no hosts
KINDS = (*ON_ONE_NETWORK, "link", "store slow")
# Lengths of faults [s]. A member that was killed, or that exited, starts again after DOWN_S.
DOWN_S, STOPPED_S, CUT_S, AWAY_S, SLOW_S = 3.0, 12.0, 10.0, 10.0, 10.0
SLOW_PART = 0.1  # of its rate is left to the store's link while it is slow
START_S, END_S = 300.0, 120.0  # for the first steps; for the last messages, and for saves
POLL_S = 0.2

PORT, BUCKET = 9000, "storm"
S3_SERVER = f"""
import logging, threading
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("0.0.0.0", port={PORT}, verbose=False)
server.start()
s3_backends["123456789012"]["aws"].create_bucket("{BUCKET}", "us-east-1")
print("ready", flush=True)
threading.Event().wait()
"""


class Planned(NamedTuple):
    """A fault that will be injected. at: seconds after the storm began."""

    at: float
    kind: str
    name: str


def draw(
    seconds: float, faults_per_hour: float, kinds: Sequence[str], names: Sequence[str], seed: int
) -> list[Planned]:
    """Draw a fault for every 3600 / faults_per_hour seconds before the end of a storm."""
    rng, pause = random.Random(seed), 3600 / max(faults_per_hour, 1e-9)
    planned: list[Planned] = []
    while pause * (len(planned) + 1) < seconds:
        planned.append(Planned(pause * (len(planned) + 1), rng.choice(kinds), rng.choice(names)))
    return planned


class System(NamedTuple):
    """The commands of a system.

    Attributes:
      server: command of the store, or of the members' meeting point.
      ready: text in the server's log once it answers; "" if it is not waited for.
      member: called with a member's name and the trace of a start; returns its command. The
        process appends time.monotonic() to the trace at the beginning of each inner step.
      environ: variables of all processes.
    """

    server: list[str]
    ready: str
    member: Callable[[str, pathlib.Path], list[str]]
    environ: Mapping[str, str]


def s3_server() -> list[str]:
    """Return the command of an S3 server (moto) with the bucket BUCKET."""
    return [sys.executable, "-c", S3_SERVER]


def s3_environ(network: hosts.Hosts | None) -> dict[str, str]:
    """Return the variables with which processes reach that server."""
    return os.environ | {
        "AWS_ENDPOINT_URL": f"http://{address(network, 0)}:{PORT}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "PYTHONUNBUFFERED": "1",
    }


def address(network: hosts.Hosts | None, host: int) -> str:
    """Return the address of a host."""
    return network.addresses[host] if network else "127.0.0.1"


class Storm:
    """The processes of a system, from `with` to its end.

    Attributes:
      starts: by member, all starts of it.
      stopped_s: by member, how long it was stopped [s].
      ended: the members that exited by themselves, and why. They are started again.
    """

    def __init__(
        self,
        system: System,
        names: Sequence[str],
        out: pathlib.Path,
        network: hosts.Hosts | None,
        mbit: float,
    ):
        """Start the server. names: of the members. mbit: rate of the links of `network`.

        Raises ConfigError.
        """
        self.system, self.names, self.out = system, names, out
        self.network, self._mbit = network, mbit
        self.starts: dict[str, list[Start]] = {name: [] for name in names}
        self.stopped_s = dict.fromkeys(names, 0.0)
        self.ended: list[str] = []
        self._due: dict[str, float] = {}  # by member that is down, when it starts again
        out.mkdir(parents=True, exist_ok=True)
        self.server = self._launch(0, system.server, out / "server.log")
        log = out / "server.log"
        if not self._until(lambda: system.ready in log.read_text(), 60):
            raise ConfigError(f"the server does not start: see {log}.")

    def __enter__(self) -> "Storm":
        return self

    def __exit__(self, *_) -> None:
        for process in [self.server, *(s.process for all_ in self.starts.values() for s in all_)]:
            _signal(process, signal.SIGKILL)
            process.wait()

    def run(self, planned: Sequence[Planned], seconds: float, last_s: float = 0.0) -> Outcome:
        """Start the members, inject the faults, and end the members with SIGTERM.

        Args:
          planned: in the order of their moments.
          seconds: length of the storm, from the moment when all members train.
          last_s: least time from the moment when all members train again to the end.

        Raises:
          ConfigError: a member does not train at all.
        """
        if self.network is None:
            return self._run(planned, seconds, last_s)
        with counters.Sampler(self.network) as sampler:
            outcome = self._run(planned, seconds, last_s)
            time.sleep(2 * counters.SAMPLE_S)  # a sample after the end
        sent, _ = counters.between(sampler.samples, outcome.begun, outcome.end)
        return outcome._replace(sent=sum(sent))

    def _run(self, planned: Sequence[Planned], seconds: float, last_s: float) -> Outcome:
        for name in self.names:
            self._start(name)
        if not self._until(self._train, START_S):
            raise ConfigError(
                f"a member took no step in {START_S:g} s: see the logs in {self.out}."
            )
        begun, faults = time.monotonic(), []
        for one in planned:
            self._rest(begun + one.at - time.monotonic())
            print(f"{time.monotonic() - begun:.0f} s: {one.kind} {one.name}", flush=True)
            faults.append(self._fault(one.kind, one.name))
        self._until(self._train, END_S)
        absent = [name for name in self.names if not self.starts[name][-1].times()]
        self._rest(max(last_s, begun + seconds - time.monotonic()))
        end = time.monotonic()
        for name in self.names:
            _signal(self.starts[name][-1].process, signal.SIGTERM)
        codes = {name: self._exit_code(name) for name in self.names}
        times = times_of(self.starts)
        return Outcome(times, self.stopped_s, faults, begun, end, self.ended, absent, codes, None)

    def _exit_code(self, name: str) -> int:
        process = self.starts[name][-1].process
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            return process.wait()

    def _train(self) -> bool:
        """Return whether the last start of every member has taken a step."""
        return all(self.starts[name][-1].times() for name in self.names)

    def _fault(self, kind: str, name: str) -> Fault:
        """Inject a fault, and wait until it is over."""
        begin, process = time.monotonic(), self.starts[name][-1].process
        match kind:
            case "kill":
                _signal(process, signal.SIGKILL)
                process.wait()
                self._due[name] = time.monotonic() + DOWN_S
                self._rest(DOWN_S)
                self._start_due()
            case "stop":
                _signal(process, signal.SIGSTOP)
                self._rest(STOPPED_S)
                _signal(process, signal.SIGCONT)
                self.stopped_s[name] += STOPPED_S
            case "link":
                self._set_link(name, "down")
                self._rest(CUT_S)
                self._set_link(name, "up")
            case "store away":
                _signal(self.server, signal.SIGSTOP)
                self._rest(AWAY_S)
                _signal(self.server, signal.SIGCONT)
            case "store slow":
                hosts.change_rate(self.network, 0, SLOW_PART * self._mbit)
                self._rest(SLOW_S)
                hosts.change_rate(self.network, 0, self._mbit)
        return Fault(kind, "" if kind.startswith("store") else name, begin, time.monotonic())

    def _set_link(self, name: str, state: str) -> None:
        host = self.network.names[self.names.index(name) + 1]
        device = ["ip", "-n", host, "link", "set", "dev", hosts.DEVICE, state]
        subprocess.run(device, check=True)

    def _rest(self, seconds: float) -> None:
        """Sleep, and start members again that are down."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            self._start_due()
            time.sleep(min(left, POLL_S))

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Rest until done() or until the time is over; return done()."""
        limit = time.monotonic() + seconds
        while not done():
            if time.monotonic() > limit:
                return False
            self._rest(POLL_S)
        return True

    def _start_due(self) -> None:
        """Start members again, as a supervisor would, that have been down for DOWN_S."""
        now = time.monotonic()
        for name, all_ in self.starts.items():
            if all_ and name not in self._due and (code := all_[-1].process.poll()) is not None:
                last = all_[-1].log.read_text(errors="replace").strip().rpartition("\n")[2]
                self.ended.append(f"{name} with exit code {code}: {last[:120]}")
                self._due[name] = now + DOWN_S
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._start(name)

    def _start(self, name: str) -> None:
        """Start a member, the first time or again."""
        stem = f"{name}.{len(self.starts[name])}"
        log, trace = (self.out / f"{stem}.{kind}" for kind in ("log", "steps"))
        command = self.system.member(name, trace)
        process = self._launch(self.names.index(name) + 1, command, log)
        self.starts[name].append(Start(process, log, trace))

    def _launch(self, host: int, command: list[str], log: pathlib.Path) -> subprocess.Popen:
        options = dict(stdout=log.open("w"), stderr=subprocess.STDOUT)
        options |= dict(env=dict(self.system.environ), cwd=ROOT)
        if self.network:
            return self.network.start(host, command, **options)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )


def _signal(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a process and its children, unless it has exited."""
    if process.poll() is None:
        os.killpg(process.pid, number)  # each has a session of its own
