"""A run of islands in a storm: processes and links that fail, and what of their work is in the log.

    PYTHONPATH=. python benchmarks/islands_storm.py [name=value ...] [key=value ...]

Islands of maxdiloco.train over a real S3 server, a process of its own (moto). Every 3600 /
faults_per_hour seconds one fault: kill -9 of an island, which starts again; an island that stands
still past its death; a link that is cut; a store that does not answer. With mbit=0 all share this
machine's network, no link is cut, and no root is needed; else every island and the store has a
network namespace and a link (link/hosts.py: Linux, root, iproute2). With step_ms=50,100,200 the
islands sleep after each step for so long, as on devices of their own; the tokens in the log are
beside those of the same steps all of the time that an island lived, and of the whole run. OWN has
the names and their defaults; further keys are the trainer's.

Exit code 1: the audit of the log finds an error, an island ended by itself, or did not come back.
"""

import itertools
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from benchmarks.link import hosts
from benchmarks.link.command import guarded, help_text
from maxdiloco.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
    "diloco_merge": "rda",
    "islands_period_seconds": 5,
    "islands_dead_seconds": 8,
    "log_period": 10,
    "checkpoint_period": 200,
    "enable_tensorboard": "false",
}
FROZEN_S, CUT_S, AWAY_S, DOWN_S = 12.0, 10.0, 10.0, 3.0  # past 8 s of islands_dead_seconds; ours
PORT, BUCKET = 9000, "storm"
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


class Start(NamedTuple):
    """A start of an island: its process, and the files with its output and its steps."""

    process: subprocess.Popen
    log: pathlib.Path
    trace: pathlib.Path

    def times(self) -> list[float]:
        """When each inner step of this start began [s]."""
        return [float(line) for line in self.trace.read_text().split()]


class Storm:
    """The islands and the store. starts: by island, all of them."""

    def __init__(self, own: dict[str, str], keys: dict[str, Any], made: hosts.Hosts | None):
        self.out, self.keys, self.made = pathlib.Path(own["out"]).resolve(), keys, made
        self.names = [f"box{i}" for i in range(int(own["boxes"]))]
        self.out.mkdir(parents=True, exist_ok=True)
        self.rng, self.starts = random.Random(int(own["seed"])), {name: [] for name in self.names}
        sleeps = own["step_ms"].split(",")
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
        self.server = self._process(0, [sys.executable, "-c", SERVER], "server")
        _until(lambda: "ready" in (self.out / "server.log").read_text(), 60, "no S3 server")

    def _process(self, host: int, command: list[str], name: str) -> subprocess.Popen:
        options = dict(stdout=(self.out / f"{name}.log").open("w"), stderr=subprocess.STDOUT)
        options |= dict(env=self.environ, cwd=ROOT)
        if self.made:
            return self.made.start(host, command, **options)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def start(self, name: str) -> None:
        """Start an island, the first time or again."""
        keys = self.keys | dict(
            islands="elastic", islands_store=f"s3://{BUCKET}/run", island=name, run_name=name,
            base_output_directory=self.out / "runs", jax_cache_dir=self.out / "jax_cache",
        )  # fmt: skip
        words = [f"{key}={value}" for key, value in keys.items()]
        file = f"{name}.{len(self.starts[name])}"
        log, trace = (self.out / f"{file}.{kind}" for kind in ("log", "steps"))
        traced = ["benchmarks.link.process", str(trace), "-1", self.sleeps[name]]
        command = [sys.executable, "-m", *traced, *words]
        process = self._process(self.names.index(name) + 1, command, file)
        self.starts[name].append(Start(process, log, trace))

    def fault(self, kind: str, name: str) -> None:
        """One fault, from its beginning to its end."""
        process = self.starts[name][-1].process
        if kind == "kill":
            _signal(process, signal.SIGKILL)
            process.wait()
            time.sleep(DOWN_S)
            self.start(name)
        elif kind == "freeze":
            self._pause(process, FROZEN_S)
            self.frozen_s[name] += FROZEN_S
        elif kind == "store":
            self._pause(self.server, AWAY_S)
        else:
            host = self.made.names[self.names.index(name) + 1]
            for state, seconds in (("down", CUT_S), ("up", 0)):
                device = ["ip", "-n", host, "link", "set", "dev", hosts.DEVICE, state]
                subprocess.run(device, check=True)
                time.sleep(seconds)

    def _pause(self, process: subprocess.Popen, seconds: float) -> None:
        _signal(process, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(process, signal.SIGCONT)

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


def _until(done, seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() > limit:
            raise ConfigError(f"seconds: {what} after {seconds:g} s. See the logs in out.")
        time.sleep(0.2)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    given = dict(argument.partition("=")[::2] for argument in argv)
    known = yaml.safe_load((ROOT / "configs" / "base.yml").read_text(encoding="utf-8"))
    for name in given:
        if name not in {*OWN, *known}:
            raise ConfigError(f"{name}={given[name]}: {name} is no key. Use {', '.join(OWN)}.")
    own = OWN | {name: value for name, value in given.items() if name in OWN}
    keys = KEYS | {name: value for name, value in given.items() if name not in OWN}
    if not re.fullmatch(r"[0-9.]+(,[0-9.]+)*", own["step_ms"]):
        raise ConfigError(f"step_ms={own['step_ms']} is no list of numbers. Use step_ms=50,100,200")
    if float(own["mbit"]) == 0:
        return run(own, keys, None)
    hosts.check()
    with hosts.hosts(int(own["boxes"]) + 1, hosts.Link(float(own["mbit"]))) as made:
        return run(own, keys, made)


def run(own: dict[str, str], keys: dict[str, Any], made: hosts.Hosts | None) -> int:
    """The storm, its end and its verdict. 1: something is wrong."""
    storm = Storm(own, keys, made)
    try:
        for name in storm.names:
            storm.start(name)
        is_in = lambda name: f"island {name} is in" in storm.text(name)  # noqa: E731
        _until(lambda: all(map(is_in, storm.names)), 300, "an island is not in")
        begun, pause = time.monotonic(), 3600 / max(float(own["faults_per_hour"]), 1e-9)
        kinds, met = ["kill", "freeze", "store", *["link"] * bool(made)], []
        while time.monotonic() + pause < begun + float(own["seconds"]):
            time.sleep(max(0.0, begun + pause * (len(met) + 1) - time.monotonic()))
            kind, name = storm.rng.choice(kinds), storm.rng.choice(storm.names)
            met.append(kind)
            print(f"{time.monotonic() - begun:.0f} s: {kind} {name}", flush=True)
            storm.fault(kind, name)
        _until(lambda: all(map(is_in, storm.names)), END_S, "an island is not back")
        first_messages = 3 * float(keys["islands_period_seconds"])
        time.sleep(max(first_messages, begun + float(own["seconds"]) - time.monotonic()))
        elapsed = time.monotonic() - begun
        for name in storm.names:
            _signal(storm.starts[name][-1].process, signal.SIGTERM)
        codes = {name: storm.starts[name][-1].process.wait(END_S) for name in storm.names}
        return verdict(storm, keys, met, elapsed, codes)
    finally:
        storm.close()


def verdict(storm: Storm, keys, met: list[str], elapsed: float, codes: dict[str, int]) -> int:
    """Prints what became of the work."""
    audit = [sys.executable, "-m", "maxdiloco.islands", "audit", f"s3://{BUCKET}/run"]
    inside = ["ip", "netns", "exec", storm.made.names[0]] if storm.made else []
    done = subprocess.run(
        [*inside, *audit], env=storm.environ, cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout, done.stderr, sep="")
    tokens = int(keys["per_device_batch_size"]) * int(keys["max_target_length"])
    trained, living, all_time = (tokens * n for n in map(sum, zip(*_steps(storm), strict=True)))
    found = re.search(r"fragment 0: (\d+) records.*; ([\d,]+) tokens;", done.stdout)
    committed = int(found[2].replace(",", "")) if found else 0
    starts = sum(map(len, storm.starts.values()))
    print(
        f"{len(met)} faults in {elapsed:.0f} s ({', '.join(met)}), {starts} starts: of "
        f"{trained:,} tokens trained {committed:,} are in the log, {committed / trained:.1%}; "
        f"{found[1] if found else 0} records of fragment 0"
    )
    print(
        f"{committed / living:.1%} of what each island's median step gives while it lives, "
        f"{committed / all_time:.1%} of what it gives from its first step to the end"
    )
    wrong = {name: code for name, code in codes.items() if code != 128 + signal.SIGTERM}
    print(f"islands that ended by themselves: {wrong or 'none'}")
    return int(done.returncode != 0 or bool(wrong))


def _steps(storm: Storm) -> Iterator[tuple[float, float, float]]:
    """Of each island: its steps, and those of its median step while it lives, and from its first
    one to the end of all."""
    times = {name: [s.times() for s in all_] for name, all_ in storm.starts.items()}
    end = max(t for all_ in times.values() for each in all_ for t in each)
    for name, all_ in times.items():
        lived = [each for each in all_ if len(each) > 1]
        step_s = statistics.median(b - a for each in lived for a, b in itertools.pairwise(each))
        living = sum(each[-1] - each[0] for each in lived) - storm.frozen_s[name]
        yield sum(map(len, all_)), living / step_s, (end - lived[0][0]) / step_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
