"""torchft beside the islands of a storm: its processes, and what of their work was committed."""

import json
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.link import hosts, storm_figures
from benchmarks.link.storm_figures import Fault, Start
from benchmarks.link.torchft_rows import SPEC
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config

PROCESS = pathlib.Path(__file__).with_name("torchft_elastic.py")
LIGHTHOUSE_PORT = 29510  # its own default
LIGHTHOUSE = {  # torchft's README; without a sign of life for 5 s a replica is dead: its default
    "bind": f"0.0.0.0:{LIGHTHOUSE_PORT}",
    "min_replicas": "1",
    "quorum_tick_ms": "100",
    "join_timeout_ms": "10000",
    "heartbeat_timeout_ms": "5000",
}
DOWN_S = 3.0  # from an end to the next start: an island's, too; our choice
LOOPBACK = "127.0.0.1"


def model_job(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What each replica is told of model and schedule. Raises ConfigError."""
    cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
    spec = {name: int(getattr(cfg, name)) for name in SPEC}
    P, L, H, tau = (
        spec[name]
        for name in ("num_diloco_fragments", "base_num_decoder_layers", "diloco_sync_period",
                     "num_communication_overlapping_steps")
    )  # fmt: skip
    if not 2 <= P <= L + 1 or H % P or tau >= H // P:
        raise ConfigError(
            f"peer=torchft with num_diloco_fragments={P}, diloco_sync_period={H} and "
            f"num_communication_overlapping_steps={tau}: torchft has 2 to {L + 1} fragments here, "
            f"a period that is a multiple of them, and an overlap below period / fragments. Use "
            f"2, 20 and 0, say, or peer=none."
        )
    decoder = {
        "tied": cfg.logits_via_embedding,
        "qk_norm": cfg.use_qk_norm != "false",
        "gated": len(cfg.mlp_activations) == 2,
    }
    common = {"checkpoint_period": cfg.checkpoint_period, "bucketization": False}
    return {"spec": spec, "decoder": decoder} | common


class Replicas:
    """A replica group of torchft for each box, and its lighthouse. starts: by box, all of them."""

    def __init__(
        self,
        python: pathlib.Path,
        job: Mapping[str, Any],
        sleeps: Mapping[str, str],
        made: hosts.Hosts | None,
        out: pathlib.Path,
        launch: Callable,
    ):
        """sleeps: after each step, by box [ms]. launch: starts a command on a host."""
        self.python, self.job, self.sleeps, self.made = python, job, sleeps, made
        self.out, self.launch, self.names = out, launch, list(sleeps)
        self.starts: dict[str, list[Start]] = {name: [] for name in self.names}
        self.ended: list[str] = []
        self._start_at: dict[str, float] = dict.fromkeys(self.names, 0.0)  # of those that are down
        for name in self.names:
            self._checkpoint(name).unlink(missing_ok=True)
        options = [f"--{name}={value}" for name, value in LIGHTHOUSE.items()]
        command = [str(python.with_name("torchft_lighthouse")), *options]
        self.lighthouse = self.launch(len(self.names) + 1, command, "lighthouse", self._environ())
        self.tend()

    def host(self, name: str) -> int:
        """After those of the store, the islands and the lighthouse."""
        return len(self.names) + 2 + self.names.index(name)

    def tend(self) -> None:
        """Start again what has ended DOWN_S ago, as a supervisor would."""
        now = time.monotonic()
        for name in self.names:
            if name not in self._start_at:
                code = self.starts[name][-1].process.poll()
                if code is not None:
                    last = self.starts[name][-1].log.read_text().strip().rpartition("\n")[2]
                    self.ended.append(f"{name} with {code}: {last[:120]}")
                    self._start_at[name] = now + DOWN_S
            if self._start_at.get(name, math.inf) <= now:
                del self._start_at[name]
                self._start(name)

    def _start(self, name: str) -> None:
        file = f"torchft_{name}.{len(self.starts[name])}"
        start = Start(None, *(self.out / f"{file}.{kind}" for kind in ("log", "steps")))
        job = dict(self.job) | {
            "replica": self.names.index(name),
            "address": self._address(self.host(name)),
            "lighthouse": f"http://{self._address(len(self.names) + 1)}:{LIGHTHOUSE_PORT}",
            "sleep_ms": float(self.sleeps[name]),
            "trace": str(start.trace),
            "events": str(start.trace.with_suffix(".events")),
            "checkpoint": str(self._checkpoint(name)),
        }
        command = [str(self.python), "-I", str(PROCESS), json.dumps(job)]
        process = self.launch(self.host(name), command, file, self._environ())
        self.starts[name].append(start._replace(process=process))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a box's replica, if it lives. One that is killed is started again."""
        process = self.starts[name][-1].process
        if process.poll() is None:
            os.killpg(process.pid, number)
            if number == signal.SIGKILL:
                process.wait()
                self._start_at[name] = time.monotonic() + DOWN_S

    def trains(self) -> bool:
        """Whether each box's replica has taken steps."""
        times = storm_figures.times_of(self.starts)
        return all(any(len(each) > 1 for each in all_) for all_ in times.values())

    def close(self) -> None:
        """End all."""
        for name in self.names:
            if self.starts[name]:
                self.signal(name, signal.SIGKILL)
        if self.lighthouse.poll() is None:
            os.killpg(self.lighthouse.pid, signal.SIGKILL)
            self.lighthouse.wait()

    def _address(self, host: int) -> str:
        return self.made.addresses[host] if self.made else LOOPBACK

    def _checkpoint(self, name: str) -> pathlib.Path:
        return self.out / f"torchft_{name}.pt"

    def _environ(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH", "PYTHON")) and not name.lower().endswith("_proxy")
        }
        return kept | {"GLOO_SOCKET_IFNAME": hosts.DEVICE if self.made else "lo"}

    def events(self) -> dict[str, list[list[dict[str, Any]]]]:
        """By box, of each start, what torchft_elastic.py says of its commits."""
        return {
            name: [_lines(one.trace.with_suffix(".events")) for one in all_]
            for name, all_ in self.starts.items()
        }


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """JSON lines. The last one may be cut: its process was killed."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def committed(events: Mapping[str, Sequence[Sequence[dict[str, Any]]]]) -> tuple[int, int]:
    """Inner steps that commits of fragment 0 have counted: those that the last state comes from,
    and the rest, of commits that no state comes from any more.

    The last state: of the boxes' last starts that of the latest commit.
    """
    lines = [_line_of(all_[-1]) for all_ in events.values()]
    last = {tuple(commit) for commit in max(lines, key=lambda line: line[-1][1] if line else -1)}
    counted = [0, 0]
    for all_ in events.values():
        for event in (event for start in all_ for event in start if "commit" in event):
            counted[tuple(event["commit"]) not in last] += event["steps"]
    return counted[0], counted[1]


def _line_of(start: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The commits that the state of a start comes from."""
    line: list[list[int]] = []
    for event in start:
        if "line" in event:
            line = list(event["line"])
        else:
            line.append(event["commit"])
    return line


def report(
    replicas: Replicas,
    tokens: int,
    frozen_s: Mapping[str, float],
    faults: Sequence[Fault],
    begun: float,
    end: float,
) -> str:
    """What became of torchft's work. tokens: of a step. begun, end: of the storm."""
    times = storm_figures.times_of(replicas.starts)
    trained, living, all_time = map(
        sum, zip(*storm_figures.given(times, frozen_s, end), strict=True)
    )
    counted, dropped = committed(replicas.events())
    pauses = storm_figures.longest_pauses(times, faults, begun)
    return (
        f"torchft: {sum(map(len, replicas.starts.values()))} starts: of {tokens * trained:,} "
        f"tokens trained {tokens * counted:,} are committed, {counted / trained:.1%}; "
        f"{tokens * dropped:,} more were in commits that the last state does not come from\n"
        f"torchft: {counted / living:.1%} of what each replica's median step gives while it "
        f"lives, {counted / all_time:.1%} of what it gives from its first step to the end\n"
        f"torchft: replicas that ended by themselves and were started again: "
        f"{'; '.join(replicas.ended) or 'none'}\n"
        f"torchft: longest pause of one that was not hit: {storm_figures.pauses_text(pauses)}"
    )
