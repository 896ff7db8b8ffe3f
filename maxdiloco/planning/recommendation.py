"""What a user asks before a run: should I, how, how long, at what price, how good, how sure."""

import itertools
import math
import textwrap
from typing import NamedTuple

from maxdiloco.output import aligned, amount, span
from maxdiloco.planning import forecast, rating
from maxdiloco.planning.forecast import Gap
from maxdiloco.planning.table import WIDTH, Plan, few_digits

# Measured waits over those of this arithmetic: docs/results.md, "Training over a thin link".
MEASURED = "waits measured on thin links were 7 to 12% longer"
LABEL = 12  # characters


class Way(NamedTuple):
    """A way to spend the tokens. bytes_per_step: that all sites together send to each other.

    gap: None for data parallelism.
    """

    name: str
    step_seconds: float
    tokens_per_step: float
    devices: int
    bytes_per_step: float = 0.0
    gap: Gap | None = None

    def seconds(self, tokens: float) -> float:
        """Until so many tokens are trained on, without evaluations and saves."""
        return tokens / self.tokens_per_step * self.step_seconds

    def to_same_loss(self, tokens: float) -> float:
        """Seconds until the loss that data parallelism has after so many tokens; see is_known."""
        return self.seconds(tokens) * (self.gap.times_tokens if self.gap else 1.0)

    @property
    def is_known(self) -> bool:
        """Whether its loss is within what was measured."""
        return self.gap is None or not self.gap.outside

    def device_hours(self, tokens: float) -> float:
        """Of all its devices."""
        return self.seconds(tokens) / 3600 * self.devices

    def bytes_sent(self, tokens: float) -> float:
        """Between sites."""
        return tokens / self.tokens_per_step * self.bytes_per_step


def ways(plan: Plan) -> list[Way]:
    """The best choice, data parallelism over the link, one site alone, all as one site."""
    job, best, step_s = plan.job, plan.rows[0], plan.step.seconds
    gradients = rating.GRADIENT * job.num_parameters * job.slices
    in_parallel = job.gradient_bytes * job.slices
    devices = job.slices * job.per_slice
    sites = "both sites" if job.slices == 2 else f"all {job.slices} sites"
    return [
        Way(
            f"{best.choice.mode}, H={best.choice.H}",
            best.step_seconds,
            job.tokens,
            devices,
            gradients / best.times_less_traffic,
            plan.gap(best.choice),
        ),
        Way("data parallel", step_s / plan.data_parallel, job.tokens, devices, in_parallel),
        Way("one site alone", step_s, job.tokens / job.slices, job.per_slice),
        Way(f"{sites} as one", step_s, job.tokens, devices),
    ]


def money(plan: Plan, way: Way) -> float | None:
    """The price of a way; None without any."""
    an_hour, a_gb = plan.prices
    if an_hour is None and a_gb is None:
        return None
    sent = way.bytes_sent(plan.tokens) / 1e9
    return way.device_hours(plan.tokens) * (an_hour or 0.0) + sent * (a_gb or 0.0)


def lines(plan: Plan) -> list[str]:
    """The answers, each with its question, and the ways beside each other."""
    said = {
        "should I": should_i(plan),
        "how": how(plan),
        "how long": how_long(plan),
        "what price": price(plan),
        "how good": how_good(plan),
        "how sure": how_sure(plan),
    }
    wrapped = [
        textwrap.wrap(
            answer, WIDTH, initial_indent=question.ljust(LABEL), subsequent_indent=" " * LABEL
        )
        for question, answer in said.items()
    ]
    return [
        *itertools.chain.from_iterable(wrapped),
        "",
        *_beside(plan),
    ]


def should_i(plan: Plan) -> str:
    """Whether to train over the link by the best choice, by the time to the same loss."""
    best, parallel, alone, _ = ways(plan)
    named = (  # of equals the simplest
        (parallel, "data parallelism over the link", "enable_diloco=false"),
        (alone, "one site alone", "train on one site"),
        (best, f"{best.name} over the link", ""),
    )
    took = [(way.to_same_loss(plan.tokens), name, remedy) for way, name, remedy in named]
    seconds, name, remedy = min(took, key=lambda each: each[0])
    if not best.is_known:
        return _if_it_pays(plan, best, took[:-1])
    others = [f"{span(other_s)} with {other}" for other_s, other, _ in took if other != name]
    more = _longer_period(plan, seconds) if remedy else ""
    return (
        f"{f'no: {remedy}, ' if remedy else 'yes: '}{span(seconds)} with {name}, to a loss that "
        f"takes {' and '.join(others)}{more}"
    )


def _longer_period(plan: Plan, seconds: float) -> str:
    """Describe a sooner choice that fits the link but whose loss was not measured, or ""."""
    row = plan.undemanding
    outside = plan.gap(row.choice).outside
    took = plan.tokens / plan.job.tokens * row.step_seconds
    if not outside or not row.fits or took >= seconds:
        return ""
    return (
        f". {row.choice.mode}, H={row.choice.H} takes {span(took)} for the tokens, and its loss is "
        f"not known: {outside}"
    )


def _if_it_pays(plan: Plan, best: Way, others: list[tuple[float, str, str]]) -> str:
    """Whether to train over the link, where the loss is outside of what was measured."""
    seconds, name, remedy = min(others)
    took = best.seconds(plan.tokens)
    if took >= seconds:
        return (
            f"no: {remedy}, {span(seconds)} with {name}; {best.name} over the link takes "
            f"{span(took)} for as many tokens, and its loss is no lower"
        )
    pays = math.log(seconds / took) * forecast.EXPONENT / 2
    return (
        f"not known: {best.name} over the link takes {span(took)} for the tokens, and {name} "
        f"{span(seconds)}. The link pays while the loss is less than {pays:.1%} above data "
        f"parallelism, and that is outside of what was measured"
    )


def how(plan: Plan) -> str:
    """The best choice with its reason, and what becomes of the latency."""
    best, job = plan.rows[0], plan.job
    choice = best.choice
    sent = rating.GRADIENT * job.num_parameters * choice.H / best.times_less_traffic
    link_s = sent * 8 / (plan.gbps * job.per_slice * 1e9)
    steps = f"{choice.tau} step{'s' * (choice.tau > 1)}"
    hides = (
        f"behind the {choice.H} steps to the next" if choice.overlap != "none" else
        f"behind {steps} after each of {choice.P} sends" if choice.tau else
        "behind nothing: the step waits"
    )  # fmt: skip
    said = (
        f"{choice.mode}, {choice.wire}: in {choice.H} steps ({span(choice.H * plan.step.seconds)}) "
        f"a slice sends {amount(sent)} ({span(link_s)} of the link) {hides}, and computes "
        f"{best.utilisation:.1%} of the time; {_why(plan)}"
    )
    if plan.latency_s:
        again = rating.rated(job, choice, step=plan.step, gbps=plan.gbps)
        added = best.exposed_seconds_per_period - again.exposed_seconds_per_period
        of = span(plan.latency_s)
        said += (
            f". The latency of {of} adds {span(added)} to each of these periods"
            if added > 1e-3 * plan.latency_s
            else f". The latency of {of} is hidden with it"
        )
    return f"{said}."


def _why(plan: Plan) -> str:
    """Why the first row is before the others."""
    best, *others = plan.rows
    if not others:
        return "it is what was asked for"
    known = "" if plan.gap(best.choice).outside else "of what was measured "
    return (
        f"{known}it is soonest at the loss of data parallelism, and of what is as soon within "
        f"{rating.TIE - 1:.0%} it changes training least"
    )


def how_long(plan: Plan) -> str:
    """The time to the tokens, without what a run does beside its steps."""
    best, _, alone, free = ways(plan)
    tokens = plan.tokens
    return (
        f"{span(best.seconds(tokens))} for {tokens:.3g} tokens ({plan.tokens_origin}) in "
        f"{math.ceil(tokens / best.tokens_per_step):,} steps, without evaluations and saves; "
        f"{span(free.seconds(tokens))} if the link were free, {span(alone.seconds(tokens))} on one "
        f"site"
    )


def price(plan: Plan) -> str:
    """Device-hours, bytes over the link, and money where prices are given."""
    best, _, alone, _ = ways(plan)
    hours, sent = best.device_hours(plan.tokens), best.bytes_sent(plan.tokens)
    used = f"{few_digits(hours)} device-hours and {amount(sent)} over the link"
    beside = f"one site alone {few_digits(alone.device_hours(plan.tokens))} device-hours"
    total, (an_hour, a_gb) = money(plan, best), plan.prices
    if total is None:
        return f"{used}, {beside}; price_per_device_hour and price_per_gb make money of them"
    parts = [
        f"{few_digits(hours * an_hour)} for {few_digits(hours)} device-hours" if an_hour else
        f"{few_digits(hours)} device-hours without a price",
        f"{few_digits(sent / 1e9 * a_gb)} for {amount(sent)} over the link" if a_gb else
        f"{amount(sent)} over the link without a price",
    ]  # fmt: skip
    return f"{few_digits(total)}: {' and '.join(parts)}; {beside}"


def how_good(plan: Plan) -> str:
    """The gap of the loss with its interval and its source."""
    gap = plan.gap(plan.rows[0].choice)
    if gap.outside:
        more = ", and here it is more" if gap.is_worse else ""
        return f"outside of what was measured: {gap.outside}. Nearest: {gap.nearest}{more}"
    said = (
        f"{gap.share:+.1%} of the loss of data parallelism after as many tokens, {gap.least:+.1%} "
        f"to {gap.most:+.1%}"
    )
    if gap.times_tokens > 1:
        said += f"; {gap.times_tokens - 1:.0%} more tokens make up for it"
    return (
        f"{said}. It rests on {gap.support} with as many replicas within {forecast.NEAR:g} times "
        f"this size. Nearest that was measured: {gap.nearest}"
    )


def how_sure(plan: Plan) -> str:
    """Where the figures come from, and how far off they may be."""
    step = "the step is a guess: at half its efficiency all but the link takes twice as long"
    if not plan.step.is_guess:
        step = f"the step's time is {plan.step.origin}"
    loss = (
        f"; the loss is a law of {len(plan.law.rows)} rows, off by {plan.law.error:.1%} of it for "
        f"a row that it has not seen; its interval is for nine in ten losses of another source, "
        f"whose outer rate need not be tuned"
    )
    outside = plan.gap(plan.rows[0].choice).outside
    return f"{step}; the link is arithmetic, {MEASURED}{'' if outside else loss}"


def _beside(plan: Plan) -> list[str]:
    rows = [("", "tokens/s", "done in", "same loss in", "device-hours", "over the link", "money",
             "loss")]  # fmt: skip
    tokens = plan.tokens
    for way in ways(plan):
        total = money(plan, way)
        gap = f"{way.gap.share:+.1%}" if way.gap else "0"
        rows.append((
            way.name,
            f"{way.tokens_per_step / way.step_seconds:,.0f}",
            span(way.seconds(tokens)),
            span(way.to_same_loss(tokens)) if way.is_known else "?",
            few_digits(way.device_hours(tokens)),
            amount(way.bytes_sent(tokens)),
            "?" if total is None else few_digits(total),
            gap if way.is_known else "?",
        ))  # fmt: skip
    return aligned(rows)


def as_json(plan: Plan) -> dict[str, object]:
    """The figures of the answers: seconds, bytes, hours of devices, money."""
    gap = plan.gap(plan.rows[0].choice)
    return {
        "tokens": plan.tokens,
        "should": should_i(plan),
        "gap": gap.as_json(),
        "ways": [
            {
                "name": way.name,
                "seconds": way.seconds(plan.tokens),
                "seconds_to_same_loss": way.to_same_loss(plan.tokens) if way.is_known else None,
                "device_hours": way.device_hours(plan.tokens),
                "bytes_between_sites": way.bytes_sent(plan.tokens),
                "money": money(plan, way),
            }
            for way in ways(plan)
        ],
    }
