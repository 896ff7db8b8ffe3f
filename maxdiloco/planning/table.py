"""The plan as lines, as JSON, and as the command that runs it."""

import functools
import math
import shlex
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from maxdiloco.aot import topology
from maxdiloco.planning import losses, rating
from maxdiloco.planning.exposure import FULL
from maxdiloco.planning.job import Job
from maxdiloco.planning.rating import Rated, Step
from maxdiloco.processes.output import aligned, span

MIB, GIB = 2**20, 2**30
WIDTH = 100  # of a line but for the commands, in characters; our choice
# Keys of train_compile and of the plan, which a run does not need.
NOT_TRAINING = (
    "compile_topology",
    "compile_topology_num_slices",
    "compile_data_parallel",
    "dcn_bandwidth_gbps",
    "max_exposed_fraction",
    "report",
)
COLUMNS = (
    "mode", "H", "P", "tau", "wire", "waits", "step", "busy", "memory", "less sent", "Gbit/s",
    "loss",
)  # fmt: skip


class Plan(NamedTuple):
    """Rated choices, best first. gbps: one device's share of the link; share: devices of the link
    that the user named, and what it is of. argv: the command line of the plan.
    """

    job: Job
    step: Step
    gbps: float
    share: tuple[int, str]
    rows: Sequence[Rated]
    argv: Sequence[str]
    latency_s: float = 0.0

    @property
    def best(self) -> Rated:
        """The first row."""
        return self.rows[0]

    @property
    def least(self) -> Rated:
        """The row that needs the least of a link."""
        return min((row for row in self.rows if row.fits), key=lambda row: row.least_gbps)

    @property
    def data_parallel(self) -> float:
        """Utilisation of data parallelism."""
        return rating.data_parallel(
            self.job, step=self.step, gbps=self.gbps, latency_s=self.latency_s
        )


def lines(plan: Plan) -> list[str]:
    """What is planned for, the choices, what the columns mean, and the commands."""
    wrapped = functools.partial(textwrap.wrap, width=WIDTH, subsequent_indent="  ")
    setting, legend = (
        [line for text in texts for line in wrapped(text)]
        for texts in (_setting(plan), _legend(plan))
    )
    return [*setting, "", *_table(plan), "", *legend, "", *_commands(plan)]


def _setting(plan: Plan) -> list[str]:
    job, (share, of) = plan.job, plan.share
    where = job.cfg.compile_topology or (
        f"{job.per_slice} device{'s' if job.per_slice > 1 else ''}"
    )
    link = f"{plan.gbps:g} Gbit/s a device, {plan.gbps * job.per_slice:g} a slice"
    if of == "host":
        link += f", {plan.gbps * share:g} a host"
    if plan.latency_s:
        link += f", {span(plan.latency_s)} one way"
    return [
        f"model: {job.cfg.model_name}, {job.num_parameters:,} parameters; {job.num_replicas} "
        f"replicas on {job.slices} slices of {where}",
        f"step: {span(plan.step.seconds)} without an exchange ({plan.step.origin}), {job.tokens:,} "
        f"tokens, {job.tokens / plan.step.seconds:,.0f} tokens/s",
        f"link: {link}; exchange by {job.carrier}",
    ]


def _table(plan: Plan) -> list[str]:
    known = losses.measured()
    rows = [COLUMNS, *(_cells(plan, row, known) for row in plan.rows)]
    share = plan.data_parallel
    step_s = plan.step.seconds / share
    rows.append((
        "data parallel", 1, "-", "-", "bfloat16", span(step_s - plan.step.seconds), span(step_s),
        f"{share:.1%}", "-", "1x", "-", "0",
    ))  # fmt: skip
    return aligned(rows)


def _cells(plan: Plan, row: Rated, known: list[losses.Loss]) -> tuple[object, ...]:
    choice = row.choice
    share, _ = plan.share
    mark = " host" if _is_moved(plan, row) else "" if row.fits else " too big"
    return (
        choice.mode,
        choice.H,
        choice.P,
        choice.tau,
        choice.wire,
        span(row.exposed_s),
        span(row.step_s),
        f"{row.utilisation:.1%}",
        f"{row.memory / GIB:.3g} GiB{mark}",
        f"{row.less:,.0f}x" if row.less >= 10 else f"{row.less:.2g}x",
        f"{row.least_gbps * share:.3g}" if math.isfinite(row.least_gbps) else "none",
        loss_words(plan, row, known).partition(" (")[0].replace("not measured", "?"),
    )


def _is_moved(plan: Plan, row: Rated) -> bool:
    """Whether a choice fits the chip only with its outer state in host memory."""
    return row.choice.memory != plan.job.cfg.diloco_outer_memory


def loss_words(plan: Plan, row: Rated, known: list[losses.Loss]) -> str:
    """The measured difference, with the model it is of unless that is the planned one."""
    cfg = plan.job.cfg
    found = losses.of_choice(
        row.choice, model=cfg.model_name, replicas=plan.job.num_replicas, known=known
    )
    if found is None:
        return "not measured"
    return f"{found.difference:+.3f} ({found.model}, M={found.replicas})"


def _legend(plan: Plan) -> list[str]:
    memory = "of the compiled step and the rest of the state" if plan.step.peak else (
        "of the state alone, without activations"
    )  # fmt: skip
    out = [
        f"waits: time that a period of H steps waits for the link; busy: part of the time that "
        f"computes; memory: of a device, {memory}; less sent: than bfloat16 gradients in every "
        f"step; Gbit/s: the least of a {plan.share[1]}'s link for {FULL:.0%} busy; loss: nats a "
        f"token above data parallelism as maxdiloco/planning/losses.yml has it, ?: not measured",
        *_measured(plan),
        f"best first: what is {FULL:.0%} busy and changes training least: the shorter period, the "
        f"shorter overlap, the wider wire. Eager costs most loss, so it follows what is "
        f"{rating.PATIENT:.0%} busy. Each row is the shortest such period and overlap of its mode "
        f"and wire. Times are arithmetic on bytes"
        + (" and latency" if plan.latency_s else ": no latency (latency_ms)")
        + ", no pack and merge.",
    ]
    if any(_is_moved(plan, row) for row in plan.rows):
        out.append(
            "host: a row that fits with diloco_outer_memory=pinned_host, and not with the outer "
            "state on the device"
        )
    return out


def _measured(plan: Plan) -> list[str]:
    """What was measured of the best row's mode, where the table has no figure for that row."""
    known = losses.measured()
    if loss_words(plan, plan.best, known) != "not measured":
        return []
    of_mode = [loss for loss in known if loss.mode == plan.best.choice.mode]
    return [
        "measured of the first row's mode: "
        + ", ".join(
            f"{loss.difference:+.3f} at H {loss.H}, tau {loss.tau}, {loss.wire}" for loss in of_mode
        )
        + f" ({of_mode[0].model}, M={of_mode[0].replicas})"
    ] * bool(of_mode)


def _commands(plan: Plan) -> list[str]:
    if refusals(plan):
        return [f"the first row all the same: {shlex.join(train_command(plan))}"]
    out = ["run it:", f"  {shlex.join(train_command(plan))}"]
    name, on_host = plan.job.cfg.compile_topology, plan.best.choice.memory == "pinned_host"
    if name and not (on_host and topology.is_gpu(name)):  # absent GPUs have no host memory
        out += ["look at its programs first:", f"  {shlex.join(compile_command(plan))}"]
    return out


def train_command(plan: Plan) -> list[str]:
    """The command that trains with the best choice."""
    keys = _without(plan.argv, {*NOT_TRAINING, *plan.best.choice.keys()})
    hardware = []
    if plan.job.chip is not None and not _names(keys) & {"hardware"}:
        hardware = ["hardware=tpu" if plan.job.chip.timed else "hardware=gpu"]
    return ["python", "-m", "maxdiloco.train", *keys, *hardware, *plan.best.choice.arguments()]


def compile_command(plan: Plan) -> list[str]:
    """The command that compiles the best choice and reports on it."""
    keys = _without(plan.argv, {"dcn_bandwidth_gbps", "report", *plan.best.choice.keys()})
    return [
        *("python", "-m", "maxdiloco.train_compile"),
        *keys,
        f"dcn_bandwidth_gbps={plan.gbps:g}",
        *plan.best.choice.arguments(),
    ]


def name_of(argument: str) -> str:
    """The key of key=value."""
    return argument.partition("=")[0].lstrip("-")


def _names(argv: Sequence[str]) -> set[str]:
    return {name_of(argument) for argument in argv}


def _without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    return [argument for argument in argv if name_of(argument) not in names]


def refusals(plan: Plan) -> list[str]:
    """Why no choice should be run; empty where one fills the link."""
    if any(row.fits and row.fills for row in plan.rows):
        return []
    share, of = plan.share
    least = plan.least
    choice = least.choice
    remedy = f"{least.least_gbps * share:.3g} Gbit/s a {of} would do"
    if not math.isfinite(least.least_gbps):
        remedy = f"No bandwidth would do at a latency of {span(plan.latency_s)}; nearest"
    return [
        f"no choice fills a link of {plan.gbps * share:g} Gbit/s a {of}: the best one trains for "
        f"{plan.best.utilisation:.2%} of the time, not {FULL:.0%}. {remedy}, with {choice.mode}: "
        f"{' '.join(choice.arguments())}"
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """The figures of the table, in bytes and seconds."""
    known = losses.measured()
    return {
        "model_name": plan.job.cfg.model_name,
        "num_parameters": plan.job.num_parameters,
        "num_slices": plan.job.slices,
        "devices_per_slice": plan.job.per_slice,
        "exchange_carrier": plan.job.carrier,
        "plain_step_seconds": plan.step.seconds,
        "plain_step_origin": plan.step.origin,
        "dcn_bandwidth_gbps": plan.gbps,
        "latency_seconds": plan.latency_s,
        "data_parallel_utilisation": plan.data_parallel,
        "choices": [_row(plan, row, known) for row in plan.rows],
        "train_command": train_command(plan),
        "refused": refusals(plan),
    }


def _row(plan: Plan, row: Rated, known: list[losses.Loss]) -> dict[str, Any]:
    return {
        "mode": row.choice.mode,
        **row.choice.keys(),
        "exposed_seconds_per_period": row.exposed_s,
        "step_seconds": row.step_s,
        "tokens_per_second": row.tokens_per_s,
        "utilisation": row.utilisation,
        "memory_bytes": row.memory,
        "fits": row.fits,
        "staleness_steps": row.choice.staleness,
        "times_less_traffic": row.less,
        "least_dcn_bandwidth_gbps": row.least_gbps if math.isfinite(row.least_gbps) else None,
        "loss": loss_words(plan, row, known),
    }
