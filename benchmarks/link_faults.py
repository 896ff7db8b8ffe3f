"""Make a process or the thin link of a run fail, case by case, and report the result.

    PYTHONPATH=. python benchmarks/link_faults.py [name=value ...] [key=value ...]

Linux, root, iproute2. Hosts are network namespaces (link/hosts.py), with one process of
maxdiloco.train on each. Every fault is met at every one of MOMENTS: the victim stands still there
until the fault has begun, so no case depends on the speed of the machine. A run that ends is
started again. Writes table.md into `out`. OWN has the names and their defaults; further keys are
the trainer's.

Exit code 1: a process hung, ended where it had to continue or without a line that names a peer, or
the parameters at the end differ from an undisturbed run's.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.link import faults
from benchmarks.link.command import choices, guarded, help_text, number, split_arguments
from benchmarks.link.faults import CaseError, End, Fault
from benchmarks.link.hosts import Link
from maxdiloco.errors import LostPeerError

OWN = {
    "faults": "all",
    "moments": "all",
    "hosts": "2",
    "mbit": "10",  # of every link, each direction
    "timeout_s": "8",  # peer_timeout_seconds
    "out": "runs/link_faults",
}
KEYS = {
    "hardware": "cpu",
    "model_name": "tiny",
    "override_model_config": "true",
    "base_emb_dim": 16,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 8,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "dataset_type": "synthetic",
    "steps": 30,
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 2,
    "diloco_sync_period": 8,  # sends after steps 4, 8, 12, ...
    "num_communication_overlapping_steps": 2,  # applied after 6, 10, 14, ...
    "diloco_exchange_dtype": "float4_e3m0",
    "log_period": 10,
    "checkpoint_period": 10,
    "async_checkpointing": "false",
    "enable_tensorboard": "false",
}
MOMENTS = {"first step": 1, "inner steps": 12, "in flight": 14, "at apply": 12, "checkpoint": 20}
LIMIT_S = 60.0  # and three timeouts: a process that has not ended by then hangs; our choice


class Case(NamedTuple):
    """A fault at a moment, and its result. ends: of the processes; equal: the bits."""

    fault: str
    moment: str
    ends: list[End]
    equal: bool
    problems: list[str]


def all_faults(timeout_s: float) -> dict[str, Fault]:
    """The faults by their names."""
    short, long = min(5.0, 0.6 * timeout_s), 1.5 * timeout_s
    return {
        "kill -9 of process 1": Fault("kill"),
        "kill -9 of process 0": Fault("kill", victim=0),
        f"process 1 stopped for {short:g} s": Fault("stop", seconds=short),
        f"process 1 stopped for {long:g} s": Fault("stop", seconds=long),
        f"process 0 stopped for {long:g} s": Fault("stop", victim=0, seconds=long),
        f"link cut for {short:g} s": Fault("cut", seconds=short),
        "link cut for ever": Fault("cut"),
        "only messages from host 1 are lost": Fault("cut", receives=False),
        "only messages to host 1 are lost": Fault("cut", sends=False),
        f"1,000 unauthenticated connections for {short:g} s": Fault("flood", seconds=short),
        f"garbage for {short:g} s": Fault("garbage", seconds=short),
        f"clients with a wrong secret for {short:g} s": Fault("wrong secret", seconds=short),
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options, given = split_arguments(argv, OWN)
    count, timeout_s = number("hosts", options, least=2), number("timeout_s", options, least=4)
    link = Link(number("mbit", options, float, least=0.1))
    out = pathlib.Path(options["out"]).resolve()
    chosen = choices("faults", options, list(all_faults(timeout_s)))
    moments = choices("moments", options, list(MOMENTS))
    keys: dict[str, Any] = KEYS | given
    keys |= {"peer_timeout_seconds": timeout_s, "num_slices": count}
    keys["jax_cache_dir"] = out / "jax_cache"
    faults.clear(out / "undisturbed")
    faults.run_without_fault(count, link, out / "undisturbed", _named(keys, out / "undisturbed"))
    wanted = faults.digests(out / "undisturbed" / "run", int(keys["steps"]))
    cases = []
    for name in chosen:
        for moment in moments:
            folder = faults.clear(out / f"{name} {moment}".replace(" ", "_"))
            fault = all_faults(timeout_s)[name]
            case = run(name, fault, moment, count, link, folder, keys, wanted)
            cases.append(case)
            print(*(line(case)), *case.problems, sep="\n  ", flush=True)
    (out / "table.md").write_text(table(cases), encoding="utf-8")
    print(table(cases))
    return int(any(case.problems for case in cases))


def _named(keys: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    return keys | {"run_name": "run", "base_output_directory": folder}


def run(
    name: str,
    fault: Fault,
    moment: str,
    count: int,
    link: Link,
    folder: pathlib.Path,
    keys: dict[str, Any],
    wanted: dict[str, str],
) -> Case:
    """Meet a fault at a moment, start again what has ended, and compare."""
    timeout_s = keys["peer_timeout_seconds"]
    keys, limit_s = _named(keys, folder), LIMIT_S + 3 * timeout_s
    problems = []
    try:
        at = (moment, MOMENTS[moment])
        ends = faults.run_with_fault(fault, at, count, link, folder / "fault", keys, limit_s)
    except CaseError as error:
        ends, problems = [], [str(error)]
    if any(end.code for end in ends) or not ends:
        faults.run_without_fault(count, link, folder / "restart", keys)
    equal = faults.digests(folder / "run", int(keys["steps"])) == wanted
    if not equal:
        problems.append("the parameters differ from those of the undisturbed run")
    return Case(name, moment, ends, equal, problems + _wrong(fault, ends, timeout_s))


def _wrong(fault: Fault, ends: Sequence[End], timeout_s: float) -> list[str]:
    """Describe the errors of each process."""
    problems = []
    for process, end in enumerate(ends):
        if fault.kind == "kill" and process == fault.victim:
            continue
        names_peer = end.line.startswith("LostPeerError: ") and "process " in end.line
        lost = end.code == LostPeerError.exit_code and names_peer
        if end.code != 0 if fault.is_survivable(timeout_s) else not lost:
            problems.append(f"process {process} ended with {end.code}: {end.line}")
    return problems


def line(case: Case) -> list[str]:
    """A case in words."""
    head = f"{case.fault}, {case.moment}: {'equal' if case.equal else 'DIFFERENT'}"
    return [head, *(f"{i}: {words(end)}: {end.line}" for i, end in enumerate(case.ends))]


def words(end: End) -> str:
    """The result of a process, for a cell of the table."""
    if end.code == 0:
        return f"goes on after {end.stall_s:.1f} s"
    return f"{end.code} after {end.after_s:.1f} s"


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    count = max((len(case.ends) for case in cases), default=0)
    titles = ["fault", "moment", *(f"process {i}" for i in range(count)), "end equals undisturbed"]
    rows = [titles, ["---"] * len(titles)]
    for case in cases:
        cells = [words(end) for end in case.ends] or ["hangs"] * count
        restarted = any(end.code for end in case.ends)
        equal = ("yes" + ", restarted" * restarted) if case.equal else "NO"
        rows.append([case.fault, case.moment, *cells, equal])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
