"""The plan as lines, as JSON, and as the command that runs it."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from maxdiloco.diloco.schedule import REDUCE_SCATTER
from maxdiloco.output import aligned, span
from maxdiloco.planning import forecast, link_model, rating
from maxdiloco.planning.forecast import Case, Gap, Law
from maxdiloco.planning.job import Choice, Job
from maxdiloco.planning.link_model import FULL
from maxdiloco.planning.rating import Rated, Step

MIB, GIB = 2**20, 2**30
WIDTH = 100  # of a line but for the commands, in characters; our choice
FEW = 6  # rows of choices in the short view: our choice
COLUMNS = (
    "mode", "H", "P", "tau", "wire", "waits", "step", "busy", "GiB", "less sent", "Gbit/s",
    "loss",
)  # fmt: skip


class Plan(NamedTuple):
    """Rated choices, best first.

    gbps: one device's share of the link; share: devices of the link that the user named, and what
    it is of. keys: of the command line of the plan, without its options. law: of the losses.
    tokens: to train on, and where that number is from. prices: of an hour of a device and of a
    gigabyte between sites. undemanding: the choice that fits the link, or else needs the least
    bandwidth to.
    """

    job: Job
    step: Step
    gbps: float
    share: tuple[int, str]
    rows: Sequence[Rated]
    keys: Sequence[str]
    law: Law
    latency_s: float = 0.0
    tokens: float = 0.0
    tokens_origin: str = ""
    prices: tuple[float | None, float | None] = (None, None)
    undemanding: Rated | None = None

    def gap(self, choice: Choice) -> Gap:
        """The loss that a choice costs, by the law."""
        job, size = self.job, self.job.num_parameters
        asked = Case(
            size,
            job.num_replicas,
            choice.H,
            choice.tau,
            choice.wire,
            choice.overlap,
            inner=job.cfg.opt_type,
            tokens=self.tokens / size,
            layers="mixture of experts" if job.cfg.num_experts > 1 else "dense",
            of_rounds=self.tokens / job.tokens / choice.H,
        )
        return forecast.gap(self.law, asked)

    @property
    def data_parallel(self) -> float:
        """Utilisation of data parallelism on the same link, by the papers' simulator.

        Of each micro-batch it takes the trainer's bytes.
        """
        job, count = self.job, self.job.num_parameters
        micro_batches = job.cfg.gradient_accumulation_steps
        link = dict(gbps=self.gbps * job.per_slice, latency_s=self.latency_s)
        link["bits"] = 8 * job.gradient_bytes / micro_batches / count
        micro_s = self.step.seconds / micro_batches
        return link_model.data_parallel(job.model.config.num_layers, count, micro_s, **link)

    def reduce_scatters(self, row: Rated) -> bool:
        """Tell whether slices average parts of the fragments."""
        return rating.settings_of(self.job, row.choice).collective == REDUCE_SCATTER

    def is_moved(self, row: Rated) -> bool:
        """Whether a choice fits the chip only with its outer state in host memory."""
        return row.choice.memory != self.job.asked.memory


def proposed(plan: Plan, families: list[list[Choice]]) -> Plan:
    """The plan with the choices of its link, rated."""
    link = dict(step=plan.step, gbps=plan.gbps, latency_s=plan.latency_s)
    busy = rating.utilisations(plan.job, families, **link)
    rows = rating.ranked(plan.job, families, busy=busy, gap=plan.gap, **link)
    undemanding = rating.nearest_to_fitting(plan.job, families, busy=busy, **link)
    return plan._replace(rows=rows, undemanding=undemanding)


def lines(plan: Plan, *, details: bool) -> list[str]:
    """The choices, what the columns mean, and the commands. details: all of it, or a screen."""
    legend, shown = _legend(plan), plan.rows
    if not details:
        shown, more = shown[:FEW], len(shown[FEW:])
        rest = f"{more} more rows and " if more else ""
        legend = [f"details=true has {rest}what the columns mean; see docs/howto/plan-bandwidth.md"]
    return [*_table(plan._replace(rows=shown)), "", *_wrapped(legend), "", *_commands(plan)]


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def setting(plan: Plan) -> list[str]:
    """What is planned for."""
    job, (share, of) = plan.job, plan.share
    one = f"{job.per_slice} device{'s' if job.per_slice > 1 else ''}"
    where = job.cfg.compile_topology or one
    link = f"{plan.gbps:g} Gbit/s a device, {plan.gbps * job.per_slice:g} a slice"
    if of == "host":
        link += f", {plan.gbps * share:g} a host"
    if plan.latency_s:
        link += f", {span(plan.latency_s)} one way"
    return _wrapped([
        f"model: {job.cfg.model_name}, {job.num_parameters:,} parameters; {job.num_replicas} "
        f"replicas on {job.slices} slices of {where}",
        f"step: {span(plan.step.seconds)} without an exchange ({plan.step.origin}), {job.tokens:,} "
        f"tokens, {job.tokens / plan.step.seconds:,.0f} tokens/s",
        f"link: {link}; transport {job.transport}",
    ])  # fmt: skip


def _table(plan: Plan) -> list[str]:
    busy, job = plan.data_parallel, plan.job
    step_s, summed_in = plan.step.seconds / busy, job.model.gradient_dtype
    less = few_digits(rating.GRADIENT * job.num_parameters / job.gradient_bytes)
    rows = [COLUMNS, *(_cells(plan, row) for row in plan.rows)]
    rows.append((
        "data parallel", 1, "-", "-", jnp.dtype(summed_in).name, span(step_s - plan.step.seconds),
        span(step_s), f"{busy:.1%}", "-", f"{less}x", "-", "0",
    ))  # fmt: skip
    return aligned(rows)


def _cells(plan: Plan, row: Rated) -> tuple[object, ...]:
    choice, gbps = row.choice, row.least_dcn_bandwidth_gbps * plan.share[0]
    gap = plan.gap(choice)
    mark = " host" if plan.is_moved(row) else "" if row.fits else " too big"
    return (
        choice.mode,
        choice.H,
        choice.P,
        choice.tau,
        choice.wire + " rs" * plan.reduce_scatters(row),
        span(row.exposed_seconds_per_period),
        span(row.step_seconds),
        f"{row.utilisation:.1%}",
        f"{row.memory_bytes / GIB:.3g}{mark}",
        f"{few_digits(row.times_less_traffic)}x",
        f"{gbps:.3g}" if math.isfinite(gbps) else "none",
        "?" if gap.outside else f"{gap.share:+.1%}",
    )


def few_digits(number: float) -> str:
    """Hours, money, factors: whole from ten on, two digits below."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _legend(plan: Plan) -> list[str]:
    memory = "of the compiled step and the rest of the state" if plan.step.peak else (
        "of the state alone, without activations"
    )  # fmt: skip
    out = [
        f"waits: time that a period of H steps waits for the link; busy: part of the time that "
        f"computes; GiB: memory of a device, {memory}; less sent: than bfloat16 gradients in every "
        f"step; Gbit/s: the least of a {plan.share[1]}'s link for {FULL:.0%} busy; loss: forecast "
        f"above data parallelism on as many tokens, ?: outside of what was measured"
    ]
    out.append(
        f"best first: what is soonest at the loss of data parallelism, of each mode and wire with "
        f"its period and overlap; of what is as soon within {rating.TIE - 1:.0%} what changes "
        f"training least: the shorter period, the shorter overlap, the wider wire; then what is "
        f"outside of what was measured. Times are arithmetic on bytes"
        + (" and latency" if plan.latency_s else ": no latency (latency_ms)")
        + ", no pack and merge."
    )
    if any(map(plan.reduce_scatters, plan.rows)):
        out.append(
            "rs: reduce-scatter: a slice averages a part of a fragment for all slices, so it sends "
            "less than with diloco_collective=all_gather (docs/concepts/wire-formats.md)"
        )
    if any(map(plan.is_moved, plan.rows)):
        out.append(
            "host: a row that fits with diloco_outer_memory=pinned_host, and not with the outer "
            "state on the device"
        )
    return out


def _commands(plan: Plan) -> list[str]:
    train = shlex.join(train_command(plan))
    if refusals(plan):
        return [f"the first row all the same: {train}"]
    out = ["run it:", f"  {train}"]
    chip, on_host = plan.job.chip, plan.rows[0].choice.memory == "pinned_host"
    if chip and (chip.timed or not on_host):  # absent GPUs have no host memory
        look = _command(plan, "train_compile", [f"dcn_bandwidth_gbps={plan.gbps:g}"])
        out += ["look at its programs first:", f"  {shlex.join(look)}"]
    return out


def train_command(plan: Plan) -> list[str]:
    """The command that trains with the best choice."""
    job, more = plan.job, []
    not_training = ["compile_topology", "compile_topology_num_slices", "steps"]
    if job.chip and "hardware" not in map(_name, plan.keys):
        more = ["hardware=tpu" if job.chip.timed else "hardware=gpu"]
    if job.chip and not job.chip.timed and -1 in job.cfg.sizes("dcn").values():
        more.append(f"num_slices={job.slices}")  # GPUs count as a slice each host otherwise
        not_training.append("num_slices")
    steps = f"steps={math.ceil(plan.tokens / job.tokens)}"
    return _command(plan, "train", [*more, steps], without=not_training)


def _command(
    plan: Plan, program: str, more: Sequence[str], *, without: Sequence[str] = ()
) -> list[str]:
    """A command with the plan's keys, more, and those of the best choice."""
    best = plan.rows[0].choice
    keys = [key for key in plan.keys if _name(key) not in {*without, *best.keys()}]
    return ["python", "-m", f"maxdiloco.{program}", *keys, *more, *best.arguments()]


def _name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-")


def refusals(plan: Plan) -> list[str]:
    """Return why no choice should be run; empty if one fits the link, whatever its loss."""
    (share, of), least = plan.share, plan.undemanding
    if least.fits and least.fits_link:
        return []
    remedy = f"{least.least_dcn_bandwidth_gbps * share:.3g} Gbit/s a {of} would suffice"
    if not math.isfinite(least.least_dcn_bandwidth_gbps):
        remedy = f"No bandwidth suffices at a latency of {span(plan.latency_s)}; nearest"
    return [
        f"no choice fits a link of {plan.gbps * share:g} Gbit/s a {of}: the best one computes for "
        f"{plan.rows[0].utilisation:.2%} of the time, not {FULL:.0%}. {remedy}, with "
        f"{least.choice.mode}: {' '.join(least.choice.arguments())}"
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """The figures of the table, in bytes and seconds."""
    return {
        "model_name": plan.job.cfg.model_name,
        "num_parameters": plan.job.num_parameters,
        "num_slices": plan.job.slices,
        "devices_per_slice": plan.job.per_slice,
        "diloco_transport": plan.job.transport,
        "plain_step_seconds": plan.step.seconds,
        "plain_step_origin": plan.step.origin,
        "dcn_bandwidth_gbps": plan.gbps,
        "latency_seconds": plan.latency_s,
        "data_parallel_utilisation": plan.data_parallel,
        "choices": [_row(plan, row) for row in plan.rows],
        "train_command": train_command(plan),
        "refused": refusals(plan),
    }


def _row(plan: Plan, row: Rated) -> dict[str, Any]:
    figures = row._asdict()
    choice, least = figures.pop("choice"), row.least_dcn_bandwidth_gbps
    figures["least_dcn_bandwidth_gbps"] = least if math.isfinite(least) else None
    loss = plan.gap(choice).as_json()
    return {"mode": choice.mode, **choice.keys(), **figures, "loss": loss}
