"""A run of islands in a storm: processes and links that fail, and what of their work is in the log.

    PYTHONPATH=. python benchmarks/islands_storm.py [name=value ...] [key=value ...]

Islands of maxdiloco.train over a real S3 server, a process of its own (moto). Every 3600 /
faults_per_hour seconds one fault: kill -9 of an island, which starts again; an island that stands
still past its death; a link that is cut; a store that does not answer. With mbit=0 all share this
machine's network, no link is cut, and no root is needed; else every island and the store has a
network namespace and a link (link/hosts.py: Linux, root, iproute2). With step_ms=50,100,200 the
islands sleep after each step for so long, as on devices of their own; the tokens in the log are
beside those of the same steps all of the time that an island lived, and of the whole run; the
longest pause between two steps of an island is of those that the fault did not hit. OWN has the
names and their defaults; further keys are the trainer's.

Exit code 1: the audit of the log finds an error, an island ended by itself, or did not come back.
"""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.link import hosts, storm_figures
from benchmarks.link.command import divided, guarded, help_text, number, numbers
from benchmarks.link.rows import ROOT
from benchmarks.link.storm_figures import Fault, Start
from maxdiloco.errors import ConfigError

OWN = {
    "seconds": "300",
    "faults_per_hour": "120",
    "mbit": "20",  # of every link, each direction; 0: no links of their own
    "boxes": "3",  # islands
    "step_ms": "0",  # of sleep after each step, by island, with commas between
    "seed": "0",
    "out": "runs/islands_storm",
}
KEYS = {
    "hardware": "cpu",
    "model_name": "tiny",
    "override_model_config": "true",
    "base_emb_dim": 64,
    "base_num_decoder_layers": 2,
    "max_target_length": 64,
    "per_device_batch_size": 4,
    "dataset_type": "synthetic",
    "steps": 10**6,  # it does not end by itself, so neither does the schedule rise nor fall
    "warmup_steps_fraction": 0.0,
    "learning_rate": 1e-3,
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 2,
    "diloco_sync_period": 20,
    "diloco_exchange_dtype": "float4_e3m0",
    "diloco_aggregation": "radial_directional_mean",
    "islands_period_seconds": 5,
    "islands_dead_seconds": 11,  # above a usual cut, CUT_S, and below a standstill, FROZEN_S
    "log_period": 10,
    "checkpoint_period": 200,
    "enable_tensorboard": "false",
}
# Lengths of faults. A killed island starts again after DOWN_S.
DOWN_S, FROZEN_S, CUT_S, AWAY_S = 3.0, 12.0, 10.0, 10.0
PORT, BUCKET = 9000, "storm"
ISLANDS = {"enable_islands": "true", "islands_store": f"s3://{BUCKET}/run"}
SERVER = f"""
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
END_S = 120.0  # for the last records, and for saves; our choice


class Storm:
    """The islands and the store. starts: by island, all of them."""

    def __init__(self, own: dict[str, str], keys: dict[str, Any], made: hosts.Hosts | None):
        self.out, self.keys, self.made = pathlib.Path(own["out"]).resolve(), keys, made
        self.names = [f"box{i}" for i in range(int(own["boxes"]))]
        self.out.mkdir(parents=True, exist_ok=True)
        self.rng, self.starts = random.Random(int(own["seed"])), {name: [] for name in self.names}
        sleeps = numbers("step_ms", own)
        self.sleeps = {name: sleeps[i % len(sleeps)] for i, name in enumerate(self.names)}
        self.frozen_s = dict.fromkeys(self.names, 0.0)
        address = made.addresses[0] if made else "127.0.0.1"
        self.environ = os.environ | {
            "AWS_ENDPOINT_URL": f"http://{address}:{PORT}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.server = self._launch(0, [sys.executable, "-c", SERVER], "server", self.environ)
        self.until(lambda: "ready" in (self.out / "server.log").read_text(), 60, "no S3 server")

    def _launch(self, host: int, command: list[str], name: str, environ) -> subprocess.Popen:
        options = dict(stdout=(self.out / f"{name}.log").open("w"), stderr=subprocess.STDOUT)
        options |= dict(env=environ, cwd=ROOT)
        if self.made:
            return self.made.start(host, command, **options)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def start(self, name: str) -> None:
        """Start an island, the first time or again."""
        keys = self.keys | ISLANDS | dict(
            island_name=name, run_name=name, base_output_directory=self.out / "runs",
            jax_cache_dir=self.out / "jax_cache",
        )  # fmt: skip
        words = [f"{key}={value}" for key, value in keys.items()]
        file = f"{name}.{len(self.starts[name])}"
        log, trace = (self.out / f"{file}.{kind}" for kind in ("log", "steps"))
        traced = ["benchmarks.link.process", str(trace), "-1", str(self.sleeps[name])]
        command = [sys.executable, "-m", *traced, *words]
        process = self._launch(self.names.index(name) + 1, command, file, self.environ)
        self.starts[name].append(Start(process, log, trace))

    def fault(self, kind: str, name: str) -> Fault:
        """One fault, from its beginning to its end."""
        begin, island = time.monotonic(), self.starts[name][-1].process
        if kind == "kill":
            _signal(island, signal.SIGKILL)
            island.wait()
            time.sleep(DOWN_S)
            self.start(name)
        elif kind == "freeze":
            _signal(island, signal.SIGSTOP)
            time.sleep(FROZEN_S)
            _signal(island, signal.SIGCONT)
            self.frozen_s[name] += FROZEN_S
        elif kind == "store":
            _signal(self.server, signal.SIGSTOP)
            time.sleep(AWAY_S)
            _signal(self.server, signal.SIGCONT)
        else:
            host = self.made.names[self.names.index(name) + 1]
            device = ["ip", "-n", host, "link", "set", "dev", hosts.DEVICE]
            subprocess.run([*device, "down"], check=True)
            time.sleep(CUT_S)
            subprocess.run([*device, "up"], check=True)
        return Fault(kind, "" if kind == "store" else name, begin, time.monotonic())

    def until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until it is done. Raises ConfigError after so many seconds."""
        limit = time.monotonic() + seconds
        while not done():
            if time.monotonic() > limit:
                raise ConfigError(f"seconds: {what} after {seconds:g} s. See the logs in out.")
            time.sleep(0.2)

    def text(self, name: str) -> str:
        """The output of the last start of an island."""
        return self.starts[name][-1].log.read_text()

    def close(self) -> None:
        """End what still runs."""
        for process in [self.server, *(s.process for all_ in self.starts.values() for s in all_)]:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
                process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    os.killpg(process.pid, number)  # each has a session of its own


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    own, given = divided(argv, OWN)
    keys = KEYS | given
    mbit, count = number("mbit", own, float, least=0), number("boxes", own)
    if mbit == 0:
        return run(own, keys, None)
    with hosts.hosts(count + 1, hosts.Link(mbit)) as made:  # the store has a host of its own
        return run(own, keys, made)


def run(own: dict[str, str], keys: dict[str, Any], made: hosts.Hosts | None) -> int:
    """The storm, its end and its verdict. 1: something is wrong."""
    storm = Storm(own, keys, made)
    try:
        for name in storm.names:
            storm.start(name)
        is_in = lambda name: f"island {name} is in" in storm.text(name)  # noqa: E731
        storm.until(lambda: all(map(is_in, storm.names)), 300, "an island is not in")
        begun, pause = time.monotonic(), 3600 / max(float(own["faults_per_hour"]), 1e-9)
        kinds, met = ["kill", "freeze", "store", *["link"] * bool(made)], []
        while time.monotonic() + pause < begun + float(own["seconds"]):
            time.sleep(max(0.0, begun + pause * (len(met) + 1) - time.monotonic()))
            kind, name = storm.rng.choice(kinds), storm.rng.choice(storm.names)
            print(f"{time.monotonic() - begun:.0f} s: {kind} {name}", flush=True)
            met.append(storm.fault(kind, name))
        storm.until(lambda: all(map(is_in, storm.names)), END_S, "an island is not back")
        first_messages = 3 * float(keys["islands_period_seconds"])
        time.sleep(max(first_messages, begun + float(own["seconds"]) - time.monotonic()))
        end = time.monotonic()
        for name in storm.names:
            _signal(storm.starts[name][-1].process, signal.SIGTERM)
        codes = {name: storm.starts[name][-1].process.wait(END_S) for name in storm.names}
        return verdict(storm, keys, met, (begun, end), codes)
    finally:
        storm.close()


def _tokens(keys: dict[str, Any]) -> int:
    """Of a step."""
    return int(keys["per_device_batch_size"]) * int(keys["max_target_length"])


def verdict(
    storm: Storm,
    keys: dict[str, Any],
    met: list[Fault],
    span: tuple[float, float],
    codes: dict[str, int],
) -> int:
    """Prints what became of the work. span: when the storm began and ended."""
    audit = [sys.executable, "-m", "maxdiloco.islands", "audit", f"s3://{BUCKET}/run"]
    inside = ["ip", "netns", "exec", storm.made.names[0]] if storm.made else []
    done = subprocess.run(
        [*inside, *audit], env=storm.environ, cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout, done.stderr, sep="")
    times = storm_figures.times_of(storm.starts)
    end = max(t for all_ in times.values() for each in all_ for t in each)
    steps = zip(*storm_figures.given(times, storm.frozen_s, end), strict=True)
    trained, living, all_time = (_tokens(keys) * n for n in map(sum, steps))
    found = re.search(r"fragment 0: (\d+) records.*; ([\d,]+) tokens;", done.stdout)
    committed = int(found[2].replace(",", "")) if found else 0
    starts, kinds = sum(map(len, storm.starts.values())), ", ".join(fault.kind for fault in met)
    print(
        f"{len(met)} faults in {span[1] - span[0]:.0f} s ({kinds}), {starts} starts: of "
        f"{trained:,} tokens trained {committed:,} are in the log, {committed / trained:.1%}; "
        f"{found[1] if found else 0} records of fragment 0"
    )
    print(
        f"{committed / living:.1%} of what each island's median step gives while it lives, "
        f"{committed / all_time:.1%} of what it gives from its first step to the end"
    )
    pauses = storm_figures.longest_pauses(times, met, span[0])
    print(f"longest pause of an island that was not hit: {storm_figures.pauses_text(pauses)}")
    wrong = {name: code for name, code in codes.items() if code != 128 + signal.SIGTERM}
    print(f"islands that ended by themselves: {wrong or 'none'}")
    return int(done.returncode != 0 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
