"""Hosts as network namespaces on one switch, each on a link of its own. Linux, root, iproute2.

Every host has one interface, DEVICE, whose other end is a port of a bridge in a namespace of its
own. `tc tbf` shapes both ends: what the host sends, and what it receives. With a delay the two ends
are taps and delay.c carries the frames between them, since few kernels have netem; without, they
are a veth pair. Nothing is made outside the namespaces but their names, the compiled delay.c, and
/etc/netns, from where `ip netns exec` takes a host's /etc/hosts: gloo binds to the address of the
host's own name.

The names hold the id and the start of the process that made them, so that a later run finds the
leftovers of one that was killed, and ignores the namespaces of a running one.
"""

import atexit
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from maxdiloco.errors import ConfigError

PREFIX = "thinlink"
NAME = rf"{PREFIX}-(\d+)-(\d+)-(?:\d+|switch)"  # process id, its start, which host
DEVICE = "net0"
NAMESPACES = pathlib.Path("/run/netns")
ETC = pathlib.Path("/etc/netns")
PROGRAMS = pathlib.Path(tempfile.gettempdir())
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
WAIT_S = 10.0  # for taps to appear and for killed processes to be gone; our choice
BURST_BYTES = 10_000  # tbf's bucket: 6 full frames, 16 ms at 5 Mbit/s; our choice
BURST_S = 0.002  # and never less than the bytes of this time, or the timer limits the rate
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Link:
    """The links that join every host to the switch.

    mbit: rate of each direction [Mbit/s], None: not shaped. delay_ms: from one host to another,
    one way. loss_pct: of the frames of a link with a delay that are lost. queue_ms: longest time
    in a queue before frames are dropped. congestion: TCP's congestion control; "": what the
    system has.
    """

    mbit: float | None = None
    delay_ms: float = 0.0
    loss_pct: float = 0.0
    queue_ms: float = 400.0
    congestion: str = ""


@dataclass
class Hosts:
    """Namespaces that are up. processes: what `start` has started."""

    switch: str
    names: list[str]
    addresses: list[str]
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str], **options) -> subprocess.Popen:
        """Start a command on a host, in a session of its own. options: of subprocess.Popen."""
        return self._start(self.names[host], command, options)

    def _start(self, name: str, command: Sequence[str], options: dict) -> subprocess.Popen:
        inside = ["ip", "netns", "exec", name, *command]
        process = subprocess.Popen(
            inside, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )
        self.processes.append(process)
        return process

    def congestion(self) -> str:
        """TCP's congestion control on the hosts."""
        return _try("ip", "netns", "exec", self.names[0], "cat", CONGESTION).stdout.strip()


def check() -> None:
    """Raise ConfigError where hosts cannot be made: not root, or no iproute2."""
    if os.geteuid() != 0:
        raise ConfigError(
            f"user id {os.geteuid()} may not make network namespaces: the hosts of this benchmark "
            f"are such. Run it as root."
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"the command {program} is not there: it makes the hosts and their links. Install "
                f"iproute2."
            )


@contextlib.contextmanager
def hosts(count: int, link: Link) -> Iterator[Hosts]:
    """Hosts for the time of a `with`; afterwards they and their processes are removed.

    One `with` at a time in a process, in its main thread: signals are ignored while things are
    removed. Raises ConfigError where this machine cannot make hosts.
    """
    check()
    sweep()
    mine = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"
    atexit.register(_remove_all, mine)
    names = [f"{mine}-{i}" for i in range(count)]
    network = Hosts(f"{mine}-switch", names, [f"10.77.0.{i + 1}" for i in range(count)])
    try:
        _make(network, link)
        yield network
    finally:
        with _deaf():
            for process in network.processes:
                process.kill()  # one may not have entered its namespace yet
            _remove_all(mine)
            for process in network.processes:
                process.wait()
        atexit.unregister(_remove_all)


def sweep() -> list[str]:
    """Remove the namespaces that dead processes have left, and return their names."""
    gone = []
    for name in sorted(_names(PREFIX)):
        made = re.fullmatch(NAME, name)
        if made and not _is_alive(int(made[1]), made[2]):
            _remove(name)
            gone.append(name)
    return gone


def _is_alive(pid: int, started: str) -> bool:
    try:
        return _started(pid) == started
    except (FileNotFoundError, ProcessLookupError):
        return False


def _started(pid: int) -> str:
    """When a process has started, in ticks since boot: with its id, a name for it."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]  # field 22 of proc(5); those after the name


def _names(prefix: str) -> set[str]:
    folders = [folder for folder in (NAMESPACES, ETC, PROGRAMS) if folder.is_dir()]
    return {path.name for folder in folders for path in folder.glob(f"{prefix}-*")}


def _remove_all(mine: str) -> None:
    for name in _names(mine):
        _remove(name)


def _remove(name: str) -> None:
    """End a namespace's processes, then delete it with its interfaces. Another may do the same."""
    limit = time.monotonic() + WAIT_S
    while pids := _try("ip", "netns", "pids", name).stdout.split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > limit:
            raise RuntimeError(f"processes {pids} of namespace {name} do not end")
        time.sleep(0.02)
    told = _try("ip", "netns", "del", name).stderr
    if (NAMESPACES / name).exists():
        raise RuntimeError(f"namespace {name} cannot be deleted: {told}")
    for folder in (ETC, PROGRAMS):
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        ETC.rmdir()  # `hosts` made it, unless others use it: then it is not empty


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ignore signals that would end the process."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _make(network: Hosts, link: Link) -> None:
    switch = network.switch
    for name in (switch, *network.names):
        _run("ip", "netns", "add", name)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
    _up(switch, "bridge")
    delay_program = _compile_delay(network) if link.delay_ms else None
    for i, (name, address) in enumerate(zip(network.names, network.addresses, strict=True)):
        port = port_name(i)
        if delay_program is None:
            veth = ("type", "veth", "peer", "name", DEVICE, "netns", name)
            _run("ip", "-n", switch, "link", "add", port, *veth)
        else:
            _start_delay(network, delay_program, name, port, link)
        _run("ip", "-n", switch, "link", "set", "dev", port, "master", "bridge")
        _run("ip", "-n", name, "addr", "add", f"{address}/16", "dev", DEVICE)
        for namespace, device in ((switch, port), (name, DEVICE)):
            _up(namespace, device)
            _shape(namespace, device, link)
        _run("ip", "-n", name, "link", "set", "dev", "lo", "up")
        folder = ETC / name
        folder.mkdir(parents=True)
        known = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
        (folder / "hosts").write_text(known, encoding="utf-8")
        if link.congestion:
            _choose_congestion(name, link.congestion)


def port_name(host: int) -> str:
    """The host's port of the switch."""
    return f"port{host}"


def _up(namespace: str, device: str) -> None:
    # No IPv6 address of its own: its solicitations would be counted as bytes of the run.
    _run("ip", "-n", namespace, "link", "set", "dev", device, "addrgenmode", "none", "up")


def change_rate(network: Hosts, host: int, mbit: float) -> None:
    """Give a host's link, which has a rate, another rate in both directions [Mbit/s]."""
    for namespace, device in ((network.switch, port_name(host)), (network.names[host], DEVICE)):
        _shape(namespace, device, Link(mbit), "change")


def _shape(namespace: str, device: str, link: Link, verb: str = "add") -> None:
    if link.mbit is None:
        return
    burst = max(BURST_BYTES, int(link.mbit * 1e6 / 8 * BURST_S))
    rate = ("rate", f"{int(link.mbit * 1e6)}bit", "burst", str(burst))
    queue = ("latency", f"{link.queue_ms:g}ms")
    _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf", *rate, *queue)


def _choose_congestion(name: str, congestion: str) -> None:
    tee = ["ip", "netns", "exec", name, "tee", CONGESTION]
    done = subprocess.run(tee, input=congestion, capture_output=True, text=True)
    if done.returncode:
        allowed = pathlib.Path(CONGESTION).with_name("tcp_allowed_congestion_control")
        raise ConfigError(
            f"congestion={congestion} is not allowed in a network namespace of this system. Use "
            f"one of {', '.join(allowed.read_text().split())}, or add it to the sysctl "
            f"net.ipv4.{allowed.name}."
        )


def _compile_delay(network: Hosts) -> pathlib.Path:
    """The program that delays frames, in a folder called like the switch."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigError(
            "delay_ms: no C compiler (cc) to make the program that delays frames. Install one, or "
            "use delay_ms=0."
        )
    program = PROGRAMS / network.switch / "delay"
    program.parent.mkdir(mode=0o700)
    source = pathlib.Path(__file__).with_name("delay.c")
    _run(compiler, "-O2", "-Wall", "-o", str(program), str(source))
    return program


def _start_delay(
    network: Hosts, delay_program: pathlib.Path, name: str, port: str, link: Link
) -> None:
    """Start the process that makes both taps and carries frames between them."""
    delay_us, lost_ppm = str(round(1000 * link.delay_ms)), str(round(10_000 * link.loss_pct))
    command = [str(delay_program), delay_us, lost_ppm, port, str(NAMESPACES / name), DEVICE]
    process = network._start(network.switch, command, {"stdout": subprocess.PIPE, "text": True})
    if process.stdout.readline() != "ready\n":
        raise ConfigError(
            f"delay_ms={link.delay_ms:g}: the taps could not be made, see the line above. The "
            f"kernel needs CONFIG_TUN and /dev/net/tun; use delay_ms=0 without."
        )


def _try(*command: str) -> subprocess.CompletedProcess:
    # In a session of its own: Ctrl-C on the terminal must not stop a command that cleans up.
    return subprocess.run(command, capture_output=True, text=True, start_new_session=True)


def _run(*command: str) -> None:
    """Run a command that makes something. Raises ConfigError with its message."""
    done = _try(*command)
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise ConfigError(
            f"`{' '.join(command)}` failed: {words}. The hosts need a kernel with network "
            f"namespaces, veth, bridge and tbf (CONFIG_NET_SCH_TBF), and a container that may make "
            f"them (CAP_NET_ADMIN, CAP_SYS_ADMIN); rates=unlimited needs no tbf."
        )
