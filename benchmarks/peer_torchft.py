"""Compare maxdiloco with torchft's streaming DiLoCo on one thin link: utilisation, overhead, bytes.

    PYTHONPATH=. python benchmarks/peer_torchft.py [name=value ...] [key=value ...]

Linux, root, iproute2, and once a network: torchft and torch go into an environment of their own
below `out`. Both train one decoder of 1.03 M parameters in four fragments of one size, on hosts
whose links link/hosts.py shapes, with the same H, tau, batch and outer optimizer. Streaming with
overlap: torchft in float32, all that it has on a CPU; maxdiloco through host memory in float32 and
in 4 bits. The plain step of each is measured first and last, on an unlimited link. link/rows.py
measures a row; link/torchft_process.py is the driver of torchft.

Names and their defaults are in OWN; further keys are the trainer's. Writes rows.json and table.md
into `out`. Exit code 1: a row failed, torchft exchanged nothing or something else than it should,
or the link carried other bytes than the payload.
"""

import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.environment import environment
from benchmarks.link import arguments as link_arguments
from benchmarks.link import counters, figures, rows
from benchmarks.link.command import choices, guarded, help_text, number
from benchmarks.link.hosts import Link, hosts
from benchmarks.link.rows import Row, RowError, link_of
from maxdiloco.errors import ConfigError

OURS, THEIRS = "maxdiloco", "torchft"
REQUIREMENTS = ("torchft==0.2.0", "torch==2.13.0", "numpy==2.4.6")
PROCESS = rows.ROOT / "benchmarks" / "link" / "torchft_process.py"
SPEC = (  # the trainer's keys that torchft's process needs; whole numbers
    "base_emb_dim", "base_mlp_dim", "vocab_size", "base_num_query_heads", "base_num_kv_heads",
    "head_dim", "base_num_decoder_layers", "num_diloco_fragments", "diloco_sync_period",
    figures.TAU, "max_target_length", "per_device_batch_size",
)  # fmt: skip
OWN = {
    "hosts": "2",
    "rates": "unlimited,20,5",  # Mbit/s, each direction
    "fast_device_ms": "120",  # sleep in a step of a small model; 0: real compute
    "periods": "4",  # that are measured, of H steps
    "delay_ms": "0",  # from host to host, one way
    "congestion": "",  # TCP's congestion control; empty: the system's
    "queue_ms": "400",  # of a link
    "row_limit_s": "600",  # then a row has failed
    "bucketization": "false",  # torchft's: one message a fragment instead of one a parameter
    "out": "runs/peer_torchft",
}
MODEL = {  # four fragments of 258,304 and 3 * 258,368 parameters: the ends, and a layer each
    "model_name": "tiny",
    "override_model_config": "true",
    "base_emb_dim": "128",
    "base_mlp_dim": "544",
    "base_num_decoder_layers": "3",
    "base_num_query_heads": "4",
    "base_num_kv_heads": "2",
    "head_dim": "32",
    "vocab_size": "2017",
    "remat_policy": "none",  # torchft's process keeps all activations too
}
CHOSEN = {"modes": "overlapped", "wires": "float32,float4_e3m0", "carriers": "host"}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    setup, turns, out = arguments(argv)
    thin = any(row.rate != figures.UNLIMITED for _, row in turns)
    with hosts(setup["hosts"], Link(1.0 if thin else None, congestion=setup["congestion"])):
        pass  # refused now rather than in the midst of the rows
    python = environment(out, REQUIREMENTS)
    measured: list[dict[str, Any]] = []
    for i, (trainer, row) in enumerate(turns):
        folder = out / "logs" / f"{trainer}-{row.name()}"
        if trainer == OURS:
            plain = next(iter(measured), None)
            figure = rows.measure(row, setup, folder, plain)
        else:
            figure = measure(row, setup, python, folder)
        measured.append({"trainer": trainer} | figure)
        same_model(measured)
        saved = json.dumps({"setup": setup, "rows": measured}, indent=1)
        (out / "rows.json").write_text(saved, encoding="utf-8")
        spread = f"{min(figure['period_ms']):,.1f}..{max(figure['period_ms']):,.1f}"
        print(
            f"{i + 1}/{len(turns)} {trainer} {row.name()}: {figure['step_ms']:,.1f} ms a step "
            f"({spread} by period)",
            flush=True,
        )
    return report(out, setup, measured)


def arguments(
    argv: Sequence[str],
) -> tuple[dict[str, Any], list[tuple[str, Row]], pathlib.Path]:
    """The values that all rows share, the turns (trainer, row) in their order, and the folder.

    Raises ConfigError.
    """
    given = dict(argument.partition("=")[::2] for argument in argv)
    for name in sorted(set(given) & set(CHOSEN)):
        raise ConfigError(f"{name}={given[name]}: expected {CHOSEN[name]}. Leave it out.")
    all_given = OWN | MODEL | given
    (bucketization,) = choices("bucketization", all_given, ("false", "true"))
    del all_given["bucketization"]
    pairs = [f"{name}={value}" for name, value in (all_given | CHOSEN).items()]
    setup, found, out = link_arguments.arguments(pairs)
    setup["bucketization"] = bucketization == "true"
    _check_spec(setup["keys"])
    turns = []
    for row in found:
        turns.append((OURS, row))
        if row.mode == figures.PLAIN or row.wire == "float32":
            turns.append((THEIRS, row._replace(carrier="gloo" if row.wire else "")))
    return setup, turns, out


def _check_spec(keys: dict[str, str]) -> None:
    """Raise ConfigError for settings that torchft or its driver does not have."""
    spec = {name: number(name, keys, least=0) for name in SPEC}
    P, H = spec["num_diloco_fragments"], spec["diloco_sync_period"]
    # A fragment for the ends and at least one for the layers; one exchange at a time.
    if not 2 <= P <= spec["base_num_decoder_layers"] + 1 or H % P or spec[figures.TAU] >= H // P:
        raise ConfigError(
            f"num_diloco_fragments={P}, diloco_sync_period={H}, {figures.TAU}={spec[figures.TAU]}: "
            f"torchft needs 2 to base_num_decoder_layers + 1 fragments, a period that is a "
            f"multiple of them, and an overlap below period / fragments."
        )


def same_model(measured: Sequence[dict[str, Any]]) -> None:
    """Raise RowError where two rows are of models of different size."""
    sizes = {row["parameters"] for row in measured}
    if len(sizes) > 1:
        raise RowError(f"the models have {' and '.join(map(str, sorted(sizes)))} parameters.")


def report(out: pathlib.Path, setup: dict[str, Any], measured: list[dict[str, Any]]) -> int:
    """Write the table; 1 where the bytes are not those of the payload."""
    table = markdown_table(measured, setup)
    (out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    code = 0
    for row in measured:
        if row["mode"] == figures.PLAIN:
            continue
        one = figures.result(row, rows_of(row["trainer"], measured), setup)
        if not one.bytes_agree:
            code = 1
            print(
                f"bytes: {row['trainer']} {row['wire']} at {row['rate']} Mbit/s: "
                f"{one.claimed_ratio:.3f} of the payload is on the link."
            )
    return code


def job(
    replica: int, addresses: Sequence[str], row: Row, setup: Mapping[str, Any], folder: pathlib.Path
) -> dict[str, Any]:
    """Return the job description of a torchft process.

    Its steps are those of the row's window and of a period for the checks after it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    spec = {name: int(setup["keys"][name]) for name in SPEC}
    return {
        "replica": replica,
        "replicas": len(addresses),
        "addresses": list(addresses),
        "cpu": cpus[replica % len(cpus)],
        "fast_ms": setup["fast_device_ms"],
        "exchange": row.mode != figures.PLAIN,
        "bucketization": setup["bucketization"],
        "spec": spec,
        "steps": rows.window(row, setup, None).last + spec["diloco_sync_period"],
        "trace": str(rows.trace_path(folder, replica)),
        "report": str(folder / f"process_{replica}.json"),
    }


def measure(
    row: Row, setup: Mapping[str, Any], python: pathlib.Path, folder: pathlib.Path
) -> dict[str, Any]:
    """Run torchft for a row and return its figures, as `rows.measure` returns those of the trainer.

    Raises RowError: it failed, or its exchanges are not the expected ones.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with hosts(setup["hosts"], link_of(row, setup)) as network:
        congestion = network.congestion()
        jobs = [job(i, network.addresses, row, setup, folder) for i in range(setup["hosts"])]
        with counters.Sampler(network) as sampler:
            # -I: the script's folder is not searched for modules.
            commands = [[str(python), "-I", str(PROCESS), json.dumps(one)] for one in jobs]
            processes = rows.start(network, commands, folder, rows.environment(network))
            rows.wait(processes, folder, setup["row_limit_s"])
    reports = [json.loads(pathlib.Path(one["report"]).read_text()) for one in jobs]
    if row.mode != figures.PLAIN:
        check_exchanges(reports, jobs[0])
    begun = [list(map(float, pathlib.Path(one["trace"]).read_text().split())) for one in jobs]
    span, H = rows.window(row, setup, None), int(setup["keys"]["diloco_sync_period"])
    return row._asdict() | {
        **rows.measured(rows.together(begun), sampler.samples, span, H),
        "claimed_per_step": payload(reports[0], setup) if row.mode != figures.PLAIN else None,
        "parameters": reports[0]["parameters"],
        "fragment_bytes": reports[0]["fragment_bytes"],
        "versions": reports[0]["versions"],
        "congestion": congestion,
        "commit": rows.commit(),
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def check_exchanges(reports: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> None:
    """Raise RowError unless the replicas exchanged the expected values.

    In the last period every fragment changed once by torchft's own work: its checksum differs
    from replica to replica before and is the same after. one: the job of any of them.
    """
    spec = one["spec"]
    P, H = spec["num_diloco_fragments"], spec["diloco_sync_period"]
    for report in reports:
        commits = one["steps"] // (H // P)
        found = report["commits"], report["participants"], [p for p, *_ in report["exchanged"]]
        if found != (commits, one["replicas"], list(range(P))):
            raise RowError(
                f"torchft made {found[0]} exchanges of {commits} among {found[1]} replicas of "
                f"{one['replicas']}, in the last period of fragments {found[2]} of {P}."
            )
    for p in range(P):
        befores, afters = ({report["exchanged"][p][k] for report in reports} for k in (1, 2))
        if len(befores) != len(reports) or len(afters) != 1:
            raise RowError(
                f"torchft's fragment {p} has {len(befores)} values on {len(reports)} replicas "
                f"before an exchange and {len(afters)} after it: not as many as replicas, and one."
            )


def payload(report: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    """Bytes a step and host of gloo's ring over float32: 2 (M - 1) / M of the model a period."""
    M, H = setup["hosts"], int(setup["keys"]["diloco_sync_period"])
    return 4 * report["parameters"] * 2 * (M - 1) / M / H


COLUMNS = (
    "trainer", "wire", "Mbit/s", "step, ms", "utilisation", "above plain, ms", "sent a step, KB",
    "of the payload", "peak, Mbit/s",
)  # fmt: skip


def markdown_table(measured: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """The figures as Markdown. measured: rows with a `trainer`, both plain steps too."""
    lines = [conditions(measured, setup), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|---|---|{'--:|' * (len(COLUMNS) - 2)}"]
    for row in measured:
        if row["mode"] == figures.PLAIN:
            continue
        one = figures.result(row, rows_of(row["trainer"], measured), setup)
        cells = (
            row["trainer"],
            row["wire"],
            row["rate"],
            f"{row['step_ms']:,.1f}",
            f"{one.utilisation:.1%}",
            f"{one.exposed_ms:,.1f}",
            f"{sum(row['sent_per_step']) / len(row['sent_per_step']) / 1000:,.1f}",
            f"{one.claimed_ratio:.3f}",
            f"{row['peak_mbit']:,.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    chatter = {who: figures.chatter(rows_of(who, measured)) for who in (OURS, THEIRS)}
    lines += [
        "",
        f"Above plain: beside the trainer's own plain step; at {figures.UNLIMITED} it is the step "
        f"overhead. Of the payload: bytes on the link less the chatter / those of the payload, of "
        f"{OURS} by `dcn/bytes_sent`, of {THEIRS} by float32 x parameters. Chatter when nothing is "
        f"exchanged: {' and '.join(f'{who} {x:,.0f}' for who, x in chatter.items())} bytes a step "
        f"and host.",
    ]
    return "\n".join(lines) + "\n"


def rows_of(trainer: str, measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a trainer."""
    return [row for row in measured if row["trainer"] == trainer]


def conditions(measured: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """Describe how the figures were measured."""
    plain = []
    for who in (OURS, THEIRS):
        steps = [row["step_ms"] for row in rows_of(who, measured) if row["mode"] == figures.PLAIN]
        plain.append(f"{who} {' and '.join(f'{step:.1f}' for step in steps)} ms")
    keys, theirs = setup["keys"], rows_of(THEIRS, measured)[0]
    sizes = " + ".join(f"{size / 1e6:.2f}" for size in theirs["fragment_bytes"])
    return (
        f"{figures.device(setup)}; {setup['hosts']} hosts, {theirs['parameters']:,} parameters in "
        f"fragments of {sizes} MB in float32, H={keys['diloco_sync_period']}, "
        f"tau={keys[figures.TAU]}; plain step {', '.join(plain)}; "
        f"{', '.join(f'{name} {version}' for name, version in theirs['versions'].items())}, "
        f"bucketization {'on' if setup['bucketization'] else 'off'}; TCP "
        f"{', '.join(sorted({row['congestion'] for row in measured}))}; delay "
        f"{setup['delay_ms']:g} ms one way; commit "
        f"{', '.join(sorted({row['commit'] for row in measured}))}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
