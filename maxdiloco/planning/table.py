"""A plan as text, as JSON, and as the commands that run it."""

import dataclasses
import math
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from maxdiloco.output import aligned, span
from maxdiloco.planning import rating
from maxdiloco.planning.forecast import Forecast
from maxdiloco.planning.link_model import FULL
from maxdiloco.planning.proposal import Plan
from maxdiloco.planning.rating import RatedCandidate

GIB = 2**30
WIDTH = 100  # characters of a line, except for commands
FEW = 6  # rows that fit a screen together with the answers and the commands
COLUMNS = (
    "mode", "H", "P", "tau", "wire", "waits", "step", "busy", "GiB", "less sent", "Gbit/s",
    "loss",
)  # fmt: skip


def lines(plan: Plan, *, details: bool) -> list[str]:
    """Return the table of candidates, the meaning of its columns, and the commands.

    details: show all rows and the meaning of the columns, instead of FEW rows.
    """
    if details:
        return [*_table(plan, plan.rows), "", *_wrapped(_legend(plan)), "", *_commands(plan)]
    more = f"{len(plan.rows) - FEW} more rows and " if len(plan.rows) > FEW else ""
    text = f"details=true shows {more}the meaning of the columns; see docs/howto/plan-bandwidth.md"
    return [*_table(plan, plan.rows[:FEW]), "", text, "", *_commands(plan)]


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def setting(plan: Plan) -> list[str]:
    """Return the header: model, slices, link and the time of a step."""
    job, (share, of) = plan.job, plan.share
    one = f"{job.per_slice} device{'s' if job.per_slice > 1 else ''}"
    where = job.cfg.compile_topology or one
    link = f"{plan.link.gbps:g} Gbit/s a device, {plan.link.gbps * job.per_slice:g} a slice"
    if of == "host":
        link += f", {plan.link.gbps * share:g} a host"
    if plan.link.latency_s:
        link += f", {span(plan.link.latency_s)} one way"
    return _wrapped([
        f"model: {job.cfg.model_name}, {job.num_parameters:,} parameters; {job.num_replicas} "
        f"replicas on {job.slices} slices of {where}",
        f"step: {span(plan.step.seconds)} without an exchange ({plan.step.origin}), {job.tokens:,} "
        f"tokens, {job.tokens / plan.step.seconds:,.0f} tokens/s",
        f"link: {link}; transport {job.transport}",
    ])  # fmt: skip


def _table(plan: Plan, rows: Sequence[RatedCandidate]) -> list[str]:
    busy, job = plan.data_parallel, plan.job
    step_s, summed_in = plan.step.seconds / busy, job.model.gradient_dtype
    less = few_digits(rating.GRADIENT * job.num_parameters / job.gradient_bytes)
    cells = [COLUMNS, *(_cells(plan, row) for row in rows)]
    cells.append((
        "data parallel", 1, "-", "-", jnp.dtype(summed_in).name, span(step_s - plan.step.seconds),
        span(step_s), f"{busy:.1%}", "-", f"{less}x", "-", "0",
    ))  # fmt: skip
    return aligned(cells)


def _cells(plan: Plan, row: RatedCandidate) -> tuple[object, ...]:
    candidate, gbps = row.candidate, row.least_dcn_bandwidth_gbps * plan.share[0]
    loss = plan.forecast(candidate)
    mark = " host" if plan.is_moved(row) else "" if row.fits else " too big"
    return (
        candidate.mode,
        candidate.H,
        candidate.P,
        candidate.tau,
        candidate.wire + " rs" * plan.reduce_scatters(row),
        span(row.exposed_seconds_per_period),
        span(row.step_seconds),
        f"{row.utilisation:.1%}",
        f"{row.memory_bytes / GIB:.3g}{mark}",
        f"{few_digits(row.times_less_traffic)}x",
        f"{gbps:.3g}" if math.isfinite(gbps) else "none",
        "?" if loss.outside else f"{loss.share:+.1%}",
    )


def few_digits(number: float) -> str:
    """Show hours, money or a factor: whole from ten on, with two digits below."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _legend(plan: Plan) -> list[str]:
    memory = "of the state, without activations"
    if plan.step.peak:
        memory = "of the compiled step and the rest of the state"
    out = [
        f"waits: time that a period of H steps waits for the link; busy: fraction of the time that "
        f"devices compute; GiB: memory of a device, {memory}; less sent: factor compared with "
        f"bfloat16 gradients in every step; Gbit/s: least bandwidth of a {plan.share[1]}'s link "
        f"for {FULL:.0%} busy; loss: forecast relative to data parallelism on the same number of "
        f"tokens, ?: outside of the measured range",
        f"order: the candidate that is first at the loss of data parallelism comes first. Within "
        f"{rating.TIE - 1:.0%} of it the shortest period, the shortest overlap and the widest wire "
        f"format win. Candidates outside of the measured range follow. Times count bytes and "
        f"latency (latency_ms), but not pack and merge",
    ]
    if any(map(plan.reduce_scatters, plan.rows)):
        out.append(
            "rs: reduce-scatter, which sends less than all-gather (docs/concepts/wire-formats.md)"
        )
    if any(map(plan.is_moved, plan.rows)):
        out.append("host: fits only with diloco_outer_memory=pinned_host")
    return out


def _commands(plan: Plan) -> list[str]:
    train = shlex.join(train_command(plan))
    if refusals(plan):
        return [f"to run the first row nevertheless: {train}"]
    out = ["run it:", f"  {train}"]
    chip, on_host = plan.job.chip, plan.rows[0].candidate.memory == "pinned_host"
    if chip and (chip.timed or not on_host):  # absent GPUs have no host memory
        look = _command(plan, "train_compile", [f"dcn_bandwidth_gbps={plan.link.gbps:g}"])
        out += ["inspect its compiled programs first:", f"  {shlex.join(look)}"]
    return out


def train_command(plan: Plan) -> list[str]:
    """Return the command that trains with the best candidate."""
    job, more = plan.job, []
    not_training = ["compile_topology", "compile_topology_num_slices", "steps"]
    if job.chip and "hardware" not in map(_name, plan.keys):
        more = ["hardware=tpu" if job.chip.timed else "hardware=gpu"]
    if job.chip and not job.chip.timed and -1 in job.cfg.sizes("dcn").values():
        more.append(f"num_slices={job.slices}")  # otherwise each host of GPUs counts as a slice
        not_training.append("num_slices")
    steps = f"steps={math.ceil(plan.tokens / job.tokens)}"
    return _command(plan, "train", [*more, steps], without=not_training)


def _command(
    plan: Plan, program: str, more: Sequence[str], *, without: Sequence[str] = ()
) -> list[str]:
    """Return a command with the keys of the plan, further keys, and the best candidate's keys."""
    best = plan.rows[0].candidate
    keys = [key for key in plan.keys if _name(key) not in {*without, *best.keys()}]
    return ["python", "-m", f"maxdiloco.{program}", *keys, *more, *best.arguments()]


def _name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-")


def refusals(plan: Plan) -> list[str]:
    """Return the reasons why no candidate fits the link; empty if one fits, with any loss."""
    (share, of), least = plan.share, plan.undemanding
    if least.fits and least.fits_link:
        return []
    remedy = f"{least.least_dcn_bandwidth_gbps * share:.3g} Gbit/s a {of} would suffice"
    if not math.isfinite(least.least_dcn_bandwidth_gbps):
        remedy = f"No bandwidth suffices at a latency of {span(plan.link.latency_s)}; nearest"
    return [
        f"no candidate fits a link of {plan.link.gbps * share:g} Gbit/s a {of}: the best one "
        f"computes for {plan.rows[0].utilisation:.2%} of the time, not {FULL:.0%}. {remedy}, with "
        f"{least.candidate.mode}: {' '.join(least.candidate.arguments())}"
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the figures of the table, in bytes and seconds."""
    return {
        "model_name": plan.job.cfg.model_name,
        "num_parameters": plan.job.num_parameters,
        "num_slices": plan.job.slices,
        "devices_per_slice": plan.job.per_slice,
        "diloco_transport": plan.job.transport,
        "plain_step_seconds": plan.step.seconds,
        "plain_step_origin": plan.step.origin,
        "dcn_bandwidth_gbps": plan.link.gbps,
        "latency_seconds": plan.link.latency_s,
        "data_parallel_utilisation": plan.data_parallel,
        "candidates": [_row(plan, row) for row in plan.rows],
        "train_command": train_command(plan),
        "refused": refusals(plan),
    }


def loss_as_json(loss: Forecast) -> dict[str, Any]:
    """Return a forecast, without figures if the settings are outside the measured range."""
    shown = {name: getattr(loss, name) for name in ("share", "least", "most", "times_tokens")}
    return (dict.fromkeys(shown) if loss.outside else shown) | {"outside": ", ".join(loss.outside)}


def _row(plan: Plan, row: RatedCandidate) -> dict[str, Any]:
    candidate, least = row.candidate, row.least_dcn_bandwidth_gbps
    names = [field.name for field in dataclasses.fields(row)]
    figures = {name: getattr(row, name) for name in names if name != "candidate"}
    figures["least_dcn_bandwidth_gbps"] = least if math.isfinite(least) else None
    loss = loss_as_json(plan.forecast(candidate))
    return {"mode": candidate.mode, **candidate.keys(), **figures, "loss": loss}
