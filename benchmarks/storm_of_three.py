"""Compare maxdiloco, gradientmail and torchft in the same storm of faults.

    PYTHONPATH=. python benchmarks/storm_of_three.py gradientmail_python=PATH torchft_python=PATH

The faults are drawn once. Each system then meets them at the same moments, one system after the
other: a member is killed (kill -9), is stopped, or loses its link; the store does not answer, or
its link is slow. Every member and the store has a network namespace and a link (link/hosts.py:
Linux, root, iproute2). The store is one S3 server (moto). torchft has no store, so those faults hit
its lighthouse. All systems train the same decoder on the same synthetic data. Optimizers, tokens
a step and the sleep after a step are equal too. The peers exchange each fragment after
diloco_sync_period steps. maxdiloco does so every islands_period_seconds, which is as long as those
steps take the slowest member. gradientmail and maxdiloco send 4 bits a value; torchft sends float32
on a CPU. link/storm_peer.py is a member of the peers.

A token is committed if it counts for the model's fragment 0. maxdiloco has it in its log, and
gradientmail in a round. For torchft it is in a commit from which the last state comes.
systems=maxdiloco,gradientmail,maxdiloco,... repeats a system. OWN has the names and their defaults;
further keys are the trainer's. Writes figures.json and table.md into `out`.

Exit code 1: the audit of maxdiloco's log finds an error, or an island exited by itself or did not
come back.
"""

import bisect
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import islands_storm
from benchmarks.link import hosts, storm_figures
from benchmarks.link.command import guarded, help_text, number, numbers, split_arguments
from benchmarks.link.rows import ROOT, commit
from benchmarks.link.storm import (
    BUCKET,
    KINDS,
    PORT,
    Planned,
    Storm,
    System,
    address,
    draw,
    s3_environ,
    s3_server,
)
from benchmarks.link.storm_figures import Figures, Outcome
from benchmarks.peer_torchft import SPEC
from maxdiloco.config import config
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.errors import ConfigError

OURS, GRADIENTMAIL, TORCHFT = "maxdiloco", "gradientmail", "torchft"
SYSTEMS = (OURS, GRADIENTMAIL, TORCHFT)
OWN = {
    "systems": ",".join(SYSTEMS),  # in their order; one may be there more than once
    "seconds": "1800",  # for each
    "faults_per_hour": "120",
    "mbit": "20",  # of every link, each direction
    "members": "3",
    "step_ms": "400,300,200",  # of sleep after each step, by member
    "seed": "0",
    "gradientmail_python": "",  # an interpreter that has it
    "torchft_python": "",  # an interpreter that has it
    "out": "runs/storm_of_three",
}
KEYS = islands_storm.KEYS | {
    "islands_period_seconds": 8,
    "diloco_outer_lr": 0.7,
    "diloco_outer_momentum": 0.6,
}
PEERS = {  # the interpreter, and the packages to install
    GRADIENTMAIL: ("Python 3.12", "gradientmail[s3,torch,zstd]==0.0.2"),
    TORCHFT: ("Python 3.11", "torchft==0.2.0 torch==2.13.0 numpy"),
}
PEER = ROOT / "benchmarks" / "link" / "storm_peer.py"
WINDOWS = 1 << 16  # sequences of data for the peers
LIGHTHOUSE_PORT = 29510  # the lighthouse's default
LIGHTHOUSE = {  # as in torchft's README; a replica without a heartbeat for 5 s is dead, its default
    "bind": f"0.0.0.0:{LIGHTHOUSE_PORT}",
    "min_replicas": "1",
    "quorum_tick_ms": "100",
    "join_timeout_ms": "10000",
    "heartbeat_timeout_ms": "5000",
}
NEAR = 0.1  # the loss at N tokens is the mean of the rows from (1 - NEAR) N to (1 + NEAR) N


class Setup(NamedTuple):
    """The arguments for all systems. sleeps: by member, after each step [ms]."""

    keys: dict[str, Any]
    sleeps: dict[str, float]
    planned: list[Planned]
    seconds: float
    mbit: float
    pythons: dict[str, str]
    versions: list[str]
    out: pathlib.Path


class Committed(NamedTuple):
    """The committed work of a system.

    Attributes:
      tokens: that count for the model.
      exchanges: of fragment 0.
      losses: training losses, each with the committed tokens at its time, in order.
      wrong: errors of the audit and of members.
    """

    tokens: int
    exchanges: int
    losses: list[tuple[int, float]]
    wrong: list[str]


class Commit(NamedTuple):
    """Tokens that a peer committed at a time [s]. name: of the exchange."""

    time: float
    tokens: int
    name: tuple[int, ...]


Events = Mapping[str, Sequence[Sequence[dict[str, Any]]]]  # by member, of each start


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    systems, setup = arguments(argv)
    setup.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for i, name in enumerate(systems):
        print(f"{i + 1}/{len(systems)} {name}", flush=True)
        out = setup.out / f"{i}-{name}"
        with hosts.hosts(len(setup.sleeps) + 1, hosts.Link(setup.mbit)) as network:
            outcome, found = run(name, setup, out, network)
        figures = storm_figures.figures(outcome, islands_storm.tokens_of(setup.keys), found.tokens)
        runs.append({
            "system": name,
            "seconds": outcome.end - outcome.begun,
            "starts": sum(map(len, outcome.times.values())),
            "figures": figures._asdict(),
            "exchanges": found.exchanges,
            "losses": found.losses,
            "wrong": found.wrong,
            "ended": list(outcome.ended),
        })  # fmt: skip
        report(setup, runs)
    print((setup.out / "table.md").read_text(encoding="utf-8"))
    return int(any(run["wrong"] for run in runs))


def arguments(argv: Sequence[str]) -> tuple[list[str], Setup]:
    """Return the systems in their order, and the arguments for all. Raises ConfigError."""
    options, given = split_arguments(argv, OWN)
    systems = options["systems"].split(",")
    if unknown := sorted(set(systems) - set(SYSTEMS)):
        raise ConfigError(f"systems={options['systems']}: {unknown[0]} is not one of {SYSTEMS}.")
    sleeps = numbers("step_ms", options)
    if min(sleeps) < 1:
        raise ConfigError(f"step_ms={options['step_ms']}: expected numbers >= 1.")
    names = [f"member{i}" for i in range(number("members", options))]
    seconds, per_hour = (
        number("seconds", options, float),
        number("faults_per_hour", options, float, least=0),
    )
    pythons = {name: options[f"{name}_python"] for name in PEERS}
    versions = [version(name, pythons[name]) for name in PEERS if name in systems]
    setup = Setup(
        KEYS | given,
        {name: sleeps[i % len(sleeps)] for i, name in enumerate(names)},
        draw(seconds, per_hour, KINDS, names, number("seed", options, least=0)),
        seconds,
        number("mbit", options, float),
        pythons,
        versions,
        pathlib.Path(options["out"]).resolve(),
    )
    hosts.check()
    return systems, setup


def version(name: str, python: str) -> str:
    """Return the version of a peer and its torch. Raises ConfigError where they are missing."""
    code = f"import {name}, torch; from importlib.metadata import version; "
    code += f"print('{name}', version('{name}') + ', torch', torch.__version__)"
    done = None
    if python:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    if done is None or done.returncode:
        needs, packages = PEERS[name]
        raise ConfigError(
            f"{name}_python={python}: expected an interpreter with {name}. Make an environment of "
            f"{needs} and run `pip install {packages}` in it."
        )
    return done.stdout.strip()


def run(
    name: str, setup: Setup, out: pathlib.Path, network: hosts.Hosts
) -> tuple[Outcome, Committed]:
    """Run a system through the storm. out: folder for its logs."""
    out.mkdir(parents=True, exist_ok=True)
    if name == OURS:
        system = islands_storm.system(setup.keys, setup.sleeps, out, network)
    else:
        system = peer(name, setup, out, network)
    with Storm(system, list(setup.sleeps), out, network, setup.mbit) as storm:
        outcome = storm.run(setup.planned, setup.seconds)
        if name == OURS:
            clean, records, tokens = islands_storm.audit(storm)
            wrong = islands_storm.failures(outcome) + ["the audit finds errors"] * (not clean)
            return outcome, Committed(tokens, records, island_losses(out / "runs"), wrong)
        events = {
            member: [read_lines(start.trace.with_suffix(".events")) for start in starts]
            for member, starts in storm.starts.items()
        }
    if name == GRADIENTMAIL:
        commits = gradientmail_commits(events)
    else:
        commits = torchft_commits(events, islands_storm.tokens_of(setup.keys))
    tokens = sum(one.tokens for one in commits)
    exchanges = len({one.name for one in commits})
    return outcome, Committed(tokens, exchanges, losses(events, commits), [])


# -- the peers ------------------------------------------------------------------------------------


def peer(name: str, setup: Setup, out: pathlib.Path, network: hosts.Hosts) -> System:
    """Return the commands of a peer."""
    python, names = setup.pythons[name], list(setup.sleeps)
    keys = setup.keys | islands_storm.island_keys(names[0], out)
    cfg = config.load([f"{key}={value}" for key, value in keys.items()], {})
    spec = {key: int(getattr(cfg, key)) for key in SPEC}
    data = out / "data.npy"
    length = cfg.max_target_length + 1
    windows = SyntheticWindows(cfg.data_shuffle_seed, "train", cfg.vocab_size, length)
    np.save(data, windows.read(np.arange(WINDOWS))[0])
    if name == GRADIENTMAIL:
        server, ready, url = s3_server(), "ready", f"http://{address(network, 0)}:{PORT}"
    else:
        options = [f"--{key}={value}" for key, value in LIGHTHOUSE.items()]
        server, ready = [str(pathlib.Path(python).with_name("torchft_lighthouse")), *options], ""
        url = f"http://{address(network, 0)}:{LIGHTHOUSE_PORT}"

    def member(member: str, trace: pathlib.Path) -> list[str]:
        job = {
            "system": name,
            "name": member,
            "member": names.index(member),
            "address": address(network, names.index(member) + 1),
            "server": url,
            "bucket": BUCKET,
            "spec": spec,
            "decoder": {
                "tied": cfg.logits_via_embedding,
                "qk_norm": cfg.use_qk_norm != "false",
                "gated": len(cfg.mlp_activations) == 2,
            },
            "adamw": {
                "lr": cfg.learning_rate,
                "betas": [cfg.adam_b1, cfg.adam_b2],
                "eps": cfg.adam_eps,
                "weight_decay": cfg.adam_weight_decay,
            },
            "outer": {"lr": cfg.diloco_outer_lr, "momentum": cfg.diloco_outer_momentum},
            "bucketization": False,
            "checkpoint_period": cfg.checkpoint_period,
            "checkpoint": str(out / f"{member}.pt"),
            "dead_s": cfg.islands_dead_seconds,
            "sleep_ms": setup.sleeps[member],
            "data": str(data),
            "trace": str(trace),
            "events": str(trace.with_suffix(".events")),
        }
        return [python, "-I", str(PEER), json.dumps(job)]

    kept = {
        key: value
        for key, value in s3_environ(network).items()
        if not key.startswith(("TORCH", "PYTHONPATH")) and not key.lower().endswith("_proxy")
    }
    return System(server, ready, member, kept | {"GLOO_SOCKET_IFNAME": hosts.DEVICE})


# -- committed tokens and losses ------------------------------------------------------------------


def gradientmail_commits(events: Events) -> list[Commit]:
    """Return the rounds of fragment 0, each at the time when a member first saw it."""
    rounds: dict[int, Commit] = {}
    for event in sorted(_all(events), key=lambda event: event["time"]):
        if event.get("fragment") == 0:
            found = Commit(event["time"], event["tokens"], (event["round"],))
            rounds.setdefault(event["round"], found)
    return list(rounds.values())


def torchft_commits(events: Events, tokens: int) -> list[Commit]:
    """Return the members' commits of fragment 0 from which the last state comes.

    The last state has the latest commit among the last starts of the members. tokens: of a step.
    """
    lines = [_line_of(starts[-1]) for starts in events.values()]
    last = {tuple(one) for one in max(lines, key=lambda line: line[-1][1] if line else -1)}
    return sorted(
        Commit(event["time"], tokens * event["steps"], tuple(event["commit"]))
        for event in _all(events)
        if event.get("steps") and tuple(event["commit"]) in last
    )


def _line_of(start: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the commits that the state of a start comes from."""
    line: list[list[int]] = []
    for event in start:
        if "line" in event:
            line = list(event["line"])
        elif "commit" in event:
            line.append(event["commit"])
    return line


def losses(events: Events, commits: Sequence[Commit]) -> list[tuple[int, float]]:
    """Return the members' losses, each with the tokens committed by then."""
    times = [one.time for one in commits]
    totals = np.cumsum([0, *(one.tokens for one in commits)]).tolist()
    return sorted(
        (totals[bisect.bisect_right(times, event["time"])], event["loss"])
        for event in _all(events)
        if "loss" in event
    )


def island_losses(runs: pathlib.Path) -> list[tuple[int, float]]:
    """Return the islands' losses, each with the tokens committed by then."""
    rows = [row for path in sorted(runs.glob("*/metrics.jsonl")) for row in read_lines(path)]
    return sorted((int(row["islands/committed_tokens"]), row["learning/loss"]) for row in rows)


def loss_at(found: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the mean loss around a number of committed tokens."""
    near = [loss for at, loss in found if abs(at - tokens) <= NEAR * tokens]
    return sum(near) / len(near) if near else float("nan")


def _all(events: Events) -> list[dict[str, Any]]:
    return [event for starts in events.values() for start in starts for event in start]


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return JSON lines. The last one may be incomplete, if its process was killed."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


# -- the report -----------------------------------------------------------------------------------

COLUMNS = (
    "system", "tokens trained", "committed", "of trained", "of live time", "of wall time",
    "longest pause of a member not hit", "bytes a committed token", "exchanges of fragment 0",
    "starts", "ended by themselves",
)  # fmt: skip


def report(setup: Setup, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write figures.json and table.md."""
    saved = {
        "commit": commit(),
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load": os.getloadavg(),
        "versions": setup.versions,
        "faults": [one._asdict() for one in setup.planned],
        "runs": runs,
    }
    (setup.out / "figures.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")
    (setup.out / "table.md").write_text(table(runs), encoding="utf-8")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as Markdown."""
    least = min(run["figures"]["committed"] for run in runs)
    points = [least // 10, least * 9 // 10]
    columns = [*COLUMNS, *(f"loss at {point:,} committed tokens" for point in points)]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'--:|' * (len(columns) - 1)}"]
    for run in runs:
        one = Figures(**run["figures"])
        cells = [
            run["system"],
            f"{one.trained:,}",
            f"{one.committed:,}",
            f"{one.committed / one.trained:.1%}",
            f"{one.of_live:.1%}",
            f"{one.of_wall:.1%}",
            storm_figures.pauses_text(one.pauses),
            f"{one.sent:,.1f}",
            str(run["exchanges"]),
            str(run["starts"]),
            str(len(run["ended"])),
            *(f"{loss_at(run['losses'], point):.4f}" for point in points),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [f"{run['system']}: {what}" for run in runs for what in run["wrong"]]
    return "\n".join([*lines, "", *wrong]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
