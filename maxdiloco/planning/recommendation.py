"""Answer the user's questions on a plan: the mode, the time, the loss, and how sure they are."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxdiloco.output import aligned, amount, span
from maxdiloco.planning import forecast, rating
from maxdiloco.planning.forecast import Case, Forecast, Law, Row, show_size
from maxdiloco.planning.proposal import Plan
from maxdiloco.planning.table import WIDTH, few_digits, loss_as_json

# Measured waits relative to the waits of the link model: docs/reference/results.md, "The plan
# compared with measurements".
MEASURED = "measured waits were 7 to 12% longer"
NEAR = 2.0  # factor within which a row is near a size: about the step between sizes of a table
LABEL = 7  # characters


@dataclass(frozen=True)
class Strategy:
    """A way to train on the tokens."""

    name: str
    step_seconds: float
    tokens_per_step: float
    devices: int
    bytes_per_step: float = 0.0  # total traffic between all sites
    loss: Forecast | None = None  # None: equal to data parallelism

    def seconds(self, tokens: float) -> float:
        """Return the time to train on this number of tokens [s], without evaluations and saves."""
        return tokens / self.tokens_per_step * self.step_seconds

    def seconds_to_loss(self, tokens: float) -> float | None:
        """Return the time to the loss that data parallelism has after `tokens` tokens [s].

        None if the loss is outside the measured range.
        """
        if self.loss is None:
            return self.seconds(tokens)
        return None if self.loss.outside else self.seconds(tokens) * self.loss.times_tokens

    def device_hours(self, tokens: float) -> float:
        """Return the hours of all devices."""
        return self.seconds(tokens) / 3600 * self.devices

    def bytes_sent(self, tokens: float) -> float:
        """Return the bytes that cross between sites."""
        return tokens / self.tokens_per_step * self.bytes_per_step

    def money(self, tokens: float, prices: tuple[float | None, float | None]) -> float | None:
        """Return the price, or None without prices of a device-hour or a gigabyte."""
        if prices == (None, None):
            return None
        an_hour, a_gb = (price or 0.0 for price in prices)
        return self.device_hours(tokens) * an_hour + self.bytes_sent(tokens) / 1e9 * a_gb


def compare_strategies(plan: Plan) -> list[Strategy]:
    """Return the best candidate, data parallelism over the link, one site, and an ideal link."""
    job, best, step_s = plan.job, plan.rows[0], plan.step.seconds
    gradients = rating.GRADIENT * job.num_parameters * job.slices
    in_parallel = job.gradient_bytes * job.slices
    devices, sent = job.slices * job.per_slice, gradients / best.times_less_traffic
    loss, name = plan.forecast(best.candidate), f"{best.candidate.mode}, H={best.candidate.H}"
    return [
        Strategy(name, best.step_seconds, job.tokens, devices, sent, loss),
        Strategy("data parallelism", step_s / plan.data_parallel, job.tokens, devices, in_parallel),
        Strategy("one site", step_s, job.tokens / job.slices, job.per_slice),
        Strategy("an ideal link", step_s, job.tokens, devices),
    ]


def recommend(plan: Plan, strategies: Sequence[Strategy]) -> Strategy | None:
    """Return the strategy that reaches the loss of data parallelism soonest.

    Among equals, the simplest. None if the choice depends on a loss outside the measured range.
    """
    best, other, tokens = strategies[0], _without_diloco(plan, strategies), plan.tokens
    known = best.seconds_to_loss(tokens)
    if known is None:
        return None if best.seconds(tokens) < other.seconds(tokens) else other
    return best if known < other.seconds(tokens) else other


def _without_diloco(plan: Plan, strategies: Sequence[Strategy]) -> Strategy:
    """Return the faster one of data parallelism over the link and one site."""
    return min(strategies[1:3], key=lambda strategy: strategy.seconds(plan.tokens))


def lines(plan: Plan) -> list[str]:
    """Return the answers, each after its label, and a table of the strategies."""
    strategies = compare_strategies(plan)
    answers = {
        "mode": _mode(plan, strategies),
        "time": _time(plan, strategies),
        "loss": _loss(strategies[0].loss),
        "basis": _basis(plan, strategies[0].loss),
    }
    indent = " " * LABEL
    wrapped = (
        textwrap.wrap(text, WIDTH, initial_indent=name.ljust(LABEL), subsequent_indent=indent)
        for name, text in answers.items()
    )
    return [*itertools.chain.from_iterable(wrapped), "", *_table(plan, strategies)]


def _mode(plan: Plan, strategies: Sequence[Strategy]) -> str:
    best, other = strategies[0], _without_diloco(plan, strategies)
    chosen, row, tokens = recommend(plan, strategies), plan.rows[0], plan.tokens
    H = row.candidate.H
    if chosen is best:
        text = f"{best.name}, {row.candidate.wire} over the link"
    elif chosen is None:
        pays = math.log(other.seconds(tokens) / best.seconds(tokens)) * forecast.EXPONENT / 2
        text = (
            f"not known: {best.name} is faster than {other.name}, but its loss was not measured. "
            f"It pays while the loss is less than {pays:.1%} above data parallelism"
        )
    else:
        key = " (enable_diloco=false)" * (other is strategies[1])
        text = f"{other.name}{key}, not {best.name}{_longer_period(plan, other.seconds(tokens))}"
    sent = rating.GRADIENT * plan.job.num_parameters * H / row.times_less_traffic
    return (
        f"{text}. {best.name} sends {amount(sent)} a slice every {H} steps and computes "
        f"{row.utilisation:.1%} of the time"
    )


def _longer_period(plan: Plan, seconds: float) -> str:
    """Name a candidate that fits the link and is faster, but whose loss was not measured."""
    row = plan.undemanding
    outside = plan.forecast(row.candidate).outside
    took = plan.tokens / plan.job.tokens * row.step_seconds
    if not outside or not row.fits or took >= seconds:
        return ""
    name = f"{row.candidate.mode}, H={row.candidate.H}"
    return f". {name} takes {span(took)}, but its loss was not measured: {', '.join(outside)}"


def _time(plan: Plan, strategies: Sequence[Strategy]) -> str:
    best, *others = strategies
    tokens, same = plan.tokens, best.seconds_to_loss(plan.tokens)
    text = f"{span(best.seconds(tokens))} with {best.name}"
    if same is not None and best.loss.times_tokens > 1.005:
        text += f" ({span(same)} to the loss of data parallelism)"
    compared = ", ".join(f"{span(each.seconds(tokens))} with {each.name}" for each in others)
    steps = math.ceil(tokens / best.tokens_per_step)
    return (
        f"{text}; {compared}. {tokens:.3g} tokens ({plan.tokens_origin}) are {steps:,} steps, "
        f"without evaluations and saves"
    )


def _loss(loss: Forecast) -> str:
    if loss.outside:
        return f"not known, outside of the measured range: {', '.join(loss.outside)}"
    return (
        f"{loss.share:+.1%} relative to data parallelism on the same number of tokens; nine in ten "
        f"runs are between {loss.least:+.1%} and {loss.most:+.1%}, also with rates that were not "
        f"tuned"
    )


def _basis(plan: Plan, loss: Forecast) -> str:
    near = near_rows(plan.law, plan.case(plan.rows[0].candidate))
    count = "one row" if len(near) == 1 else f"{len(near) or 'no'} rows"
    step = f"the time of a step is {plan.step.origin}"
    if plan.step.is_guess:
        step = "the time of a step is a guess: with half the efficiency it is twice as long"
    similar = f"with {plan.job.num_replicas} replicas and within a factor of {NEAR:g} of the size"
    rests = f"the loss rests on {count} {similar}"
    if sources := ", ".join(sorted({row.source.split()[0] for row in near})):
        rests += f" ({sources})"
    return f"{step}; the link is a model, {MEASURED}; {rests}. Nearest: {show_row(loss.nearest)}"


def near_rows(law: Law, case: Case) -> list[Row]:
    """Return the rows with equal replicas and modes, and a size within the factor NEAR."""
    alike = ("replicas", "overlap", "inner")
    return [
        row
        for row in law.rows
        if all(getattr(row.case, name) == getattr(case, name) for name in alike)
        and 1 / NEAR <= row.case.parameters / case.parameters <= NEAR
    ]


def show_row(row: Row) -> str:
    """Show a row in words."""
    case = row.case
    words = [f"{show_size(case.parameters)} parameters", f"M={case.replicas}", f"H={case.H}"]
    words += [f"tau={case.tau}"] * (case.tau > 0) + [case.overlap] * (case.overlap != "none")
    return f"{', '.join([*words, case.wire, case.inner])}: {row.gap:+.1%} ({row.source})"


def _table(plan: Plan, strategies: Sequence[Strategy]) -> list[str]:
    rows = [("", "tokens/s", "done in", "same loss in", "device-hours", "over the link", "money",
             "loss")]  # fmt: skip
    tokens = plan.tokens
    for strategy in strategies:
        same, money = strategy.seconds_to_loss(tokens), strategy.money(tokens, plan.prices)
        rows.append((
            strategy.name,
            f"{strategy.tokens_per_step / strategy.step_seconds:,.0f}",
            span(strategy.seconds(tokens)),
            "?" if same is None else span(same),
            few_digits(strategy.device_hours(tokens)),
            amount(strategy.bytes_sent(tokens)),
            "?" if money is None else few_digits(money),
            "?" if same is None else f"{strategy.loss.share:+.1%}" if strategy.loss else "0",
        ))  # fmt: skip
    return aligned(rows)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the answers in tokens, seconds, bytes, device-hours and money."""
    tokens, strategies = plan.tokens, compare_strategies(plan)
    chosen = recommend(plan, strategies)
    return {
        "tokens": tokens,
        "recommended": chosen and chosen.name,
        "loss": loss_as_json(strategies[0].loss),
        "strategies": [
            {
                "name": strategy.name,
                "seconds": strategy.seconds(tokens),
                "seconds_to_same_loss": strategy.seconds_to_loss(tokens),
                "device_hours": strategy.device_hours(tokens),
                "bytes_between_sites": strategy.bytes_sent(tokens),
                "money": strategy.money(tokens, plan.prices),
            }
            for strategy in strategies
        ],
    }
