"""What a way to synchronise costs in loss: one law, fitted to the rows of losses.yml. No JAX."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import yaml

# K rows  P coefficients of `features`, and the head start
LOSSES = pathlib.Path(__file__).parent / "losses.yml"
UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}
TOKENS = 20.0  # for each parameter, as most rows have
# Sequences of 2,048 tokens a step that are best for data parallelism: A N^b, 2503.09799 Tab. 10.
SEQUENCES, SEQUENCES_EXPONENT, LENGTH = 0.00709, 0.4695, 2048
# Wires that lose nothing in any table; each of the others is a class of its own.
FREE_WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
# Value and deviation of each coefficient before a row is seen: our choice, wide where rows tell.
PRIOR = ((-4.5, 3), (0, 1), (0, 0.5), (0, 1), (0, 1), (0.003, 0.003))
SPREAD = 0.2  # of a row about the law, of its gap and the head start: our choice
SLACK = 1.5  # how far beyond its rows the law is asked, as a factor: our choice
COVERED = 0.9  # part of the losses that lie in their interval: the customary nine in ten
# Gap and head start at an outer rate one step of our sweeps beside the best one, over those at the
# best: nine in ten of 25 such rows lie below ("A rate that was not tuned" in
# benchmarks/results/loss_by_mode.md).
UNTUNED = 2.17
NEAR = 2.0  # factor of size of a row that is near: about that between the sizes of a table
# Loss of data parallelism with as many tokens as pay: A N^-EXPONENT (2503.09799 Tab. 7), where
# compute grows with N^2. The split of compute is the best one there, so tokens alone lower the loss
# as much as compute does: by EXPONENT / 2 of it for each factor e.
EXPONENT = 0.0953


class Case(NamedTuple):
    """What a loss is of.

    inner: the inner optimizer. tokens: for each parameter. of_rounds: how many rounds of H steps;
    0: as many as tokens give, in the batch that is best for such a model.
    """

    parameters: float
    replicas: int
    H: int
    tau: int = 0
    wire: str = "float32"
    overlap: str = "none"
    inner: str = "adamw"
    tokens: float = TOKENS
    layers: str = "dense"
    of_rounds: float = 0.0

    @property
    def rounds(self) -> float:
        """Outer steps of each fragment."""
        if self.of_rounds:
            return self.of_rounds
        batch = LENGTH * SEQUENCES * self.parameters**SEQUENCES_EXPONENT
        return self.parameters * self.tokens / batch / self.H


class Row(NamedTuple):
    """A loss that was measured.

    gap: over that of data parallelism, less 1; error: of the gap. source: a paper, or ours.
    """

    case: Case
    gap: float
    error: float
    words: str
    source: str = ""


class Law(NamedTuple):
    """A law and its rows.

    half: of an interval, in deviations, by leaving out each source in turn. left_out_K: the gap of
    each row less that of the law of the others.
    """

    rows: Sequence[Row]
    coefficients_P: np.ndarray
    covariance_PP: np.ndarray
    half: float = 0.0
    left_out_K: Sequence[float] = ()

    @property
    def error(self) -> float:
        """Root mean square of left_out_K."""
        return math.sqrt(sum(gap**2 for gap in self.left_out_K) / len(self.left_out_K))


class Gap(NamedTuple):
    """Loss over that of data parallelism on as many tokens, less 1, and its interval.

    times_tokens: the tokens that make up for it, as a factor of 1 or more. nearest: a row, in
    words. support: how many rows are within NEAR of its size with as many replicas, in words.
    outside: what of the case lies beyond the rows, in words, or ""; num_beyond: how many things
    that are. Then the figures are the law's all the same, for an order and not to be shown, and
    is_worse says that all of it costs.
    """

    share: float
    least: float
    most: float
    times_tokens: float
    nearest: str
    support: str = ""
    outside: str = ""
    num_beyond: int = 0
    is_worse: bool = False

    def as_json(self) -> dict[str, float | str | bool | None]:
        """Its fields, without figures of what is outside."""
        figures = ("share", "least", "most", "times_tokens")
        hidden = dict.fromkeys(figures) if self.outside else {}
        return self._asdict() | hidden


def rows(path: pathlib.Path = LOSSES) -> list[Row]:
    """What losses.yml has."""
    out = []
    for table in yaml.safe_load(path.read_text(encoding="utf-8")):
        losses, source, error = (table.pop(name) for name in ("losses", "source", "error"))
        batch = table.pop("batch", 0)
        for size, (parallel, loss) in losses.items():
            case = Case(float(size[:-1]) * UNITS[size[-1]], **table)
            if batch:
                rounds = case.parameters * case.tokens / batch / case.H
                case = case._replace(of_rounds=rounds)
            gap, both = loss / parallel - 1, math.sqrt(2) * error / parallel  # of two losses
            words = f"{_words(case)}: {gap:+.1%}, {source}"
            out.append(Row(case, gap, both, words, source.split()[0]))
    return out


def _words(case: Case) -> str:
    parts = [f"{_size(case.parameters)}, M={case.replicas}, H={case.H}"]
    parts += [f"tau={case.tau}"] if case.tau else []
    parts += [case.overlap] if case.overlap != "none" else []
    return ", ".join([*parts, case.wire, case.inner])


def _size(parameters: float) -> str:
    name = next((name for name in "BMk" if parameters >= UNITS[name]), "k")
    return f"{parameters / UNITS[name]:.3g}{name}"


def features(case: Case) -> list[float]:
    """The gap is the exponential of coefficients times these, less a head start.

    So it has powers of the other replicas (another one for muon) and of the rounds, and a factor
    for eager updates. With these the size, H and tokens have no part of their own that the rows
    show; nor have wires and tau. The head start is what is left with no others: M=1 is ahead of
    data parallelism (2503.09799 Tab. 4).
    """
    others = math.log(max(0.5, case.replicas - 1))
    return [
        1.0,
        others,
        others * (case.inner == "muon"),
        math.log(case.rounds / 500),
        float(case.overlap == "eager"),
    ]


def fit(given: Sequence[Row], start_P: Sequence[float] = (), steps: int = 30) -> Law:
    """Least squares, weighted by error and SPREAD, with PRIOR as rows; by Gauss and Newton."""
    x_KP = np.array([features(row.case) for row in given])
    gap_K, error_K = np.array([(row.gap, row.error) for row in given]).T
    mean_P, deviation_P = np.array(PRIOR).T
    at_P = np.array(start_P) if len(start_P) else mean_P
    for _ in range(steps):
        over_K = np.exp(x_KP @ at_P[:-1])
        weight_K = 1 / np.hypot(error_K, SPREAD * over_K)
        slope_KP = np.column_stack([x_KP * over_K[:, None], -np.ones(len(given))])
        a = np.vstack([slope_KP * weight_K[:, None], np.diag(1 / deviation_P)])
        b = [(gap_K - over_K + at_P[-1]) * weight_K, (mean_P - at_P) / deviation_P]
        at_P = at_P + np.linalg.lstsq(a, np.concatenate(b), rcond=None)[0]
    return Law(given, at_P, np.linalg.inv(a.T @ a))


def law() -> Law:
    """The law of losses.yml, with its error by leaving out each row in turn.

    Its interval is by leaving out each source in turn, and each counts as much as another: rows of
    one source share its text, its recipe and how its rates were tuned, which another run does not.
    """
    given = rows()
    of_all = fit(given)
    left_out = []
    for k, row in enumerate(given):
        others = fit([*given[:k], *given[k + 1 :]], of_all.coefficients_P, steps=6)
        left_out.append(row.gap - estimate(others, row.case)[0])
    deviations, parts = [], []
    for source in {row.source: None for row in given}:
        its = [row for row in given if row.source == source]
        others = fit([row for row in given if row.source != source])
        for row in its:
            gap, deviation = estimate(others, row.case)
            deviations.append(abs(row.gap - gap) / math.hypot(deviation, row.error))
            parts.append(1 / len(its))
    order = np.argsort(deviations)
    covered = np.cumsum(np.array(parts)[order]) / sum(parts)
    half = deviations[order[np.searchsorted(covered, COVERED)]]
    return of_all._replace(half=float(half), left_out_K=left_out)


def estimate(of: Law, case: Case) -> tuple[float, float]:
    """The gap of a case, and its deviation: of the coefficients, and of rows about the law."""
    x_P = np.array(features(case))
    over = math.exp(x_P @ of.coefficients_P[:-1])
    slope_P = np.append(x_P * over, -1)
    deviation = math.hypot(SPREAD * over, math.sqrt(slope_P @ of.covariance_PP @ slope_P))
    return over - float(of.coefficients_P[-1]), deviation


def gap(of: Law, case: Case) -> Gap:
    """The forecast of a case, or what lies outside.

    The interval is that of a source which the law has not seen. Its upper end allows for an outer
    rate that was not tuned, which costs and never gains.
    """
    asked, beyond = _beyond(of.rows, case)
    share, deviation = estimate(of, asked)
    untuned = (UNTUNED - 1) * (share + float(of.coefficients_P[-1]))
    here = np.array(features(asked))

    def distance(row: Row) -> float:
        other = row.case
        far = np.abs(np.array(features(other)) - here).sum() + (other.inner != asked.inner)
        far += abs(math.log(other.parameters / asked.parameters)) + abs(math.log(other.H / asked.H))
        return float(far) + (other.tau != asked.tau) / 9 + (other.wire != asked.wire) / 9

    return Gap(
        share,
        share - of.half * deviation,
        share + math.hypot(of.half * deviation, untuned),
        times_tokens=math.exp(min(max(0.0, share), 1.0) / (EXPONENT / 2)),  # a number in any case
        nearest=min(of.rows, key=distance).words,
        support=_support(of.rows, asked),
        outside=", ".join(words for words, _ in beyond),
        num_beyond=len(beyond),
        is_worse=bool(beyond) and all(costs for _, costs in beyond),
    )


def _support(given: Sequence[Row], case: Case) -> str:
    """How many rows, of which sources, are within NEAR of a size with as many replicas."""
    near = [
        row
        for row in given
        if (row.case.replicas, row.case.overlap) == (case.replicas, case.overlap)
        and row.case.inner == case.inner
        and abs(math.log(row.case.parameters / case.parameters)) <= math.log(NEAR)
    ]
    sources = sorted({row.source for row in near})
    count = "one row" if len(near) == 1 else f"{len(near)} rows"
    return f"{count} ({', '.join(sources)})" if near else "no row"


# Fields of a case that rows have a range of, in words, and whether more of it costs loss.
_RANGES = (
    ("parameters", "{} parameters", False),
    ("replicas", "{} replicas", True),
    ("H", "H={}", True),
    ("tau", "tau={}", True),
    ("tokens", "{} tokens a parameter", False),
    ("rounds", "{} rounds", False),
)
# Fields that the rows of a range have to share with the case, and what stands in for a strange one.
_CLASSES = (("overlap", "none"), ("inner", "adamw"), ("wire", "float32"), ("layers", "dense"))


def _beyond(given: Sequence[Row], case: Case) -> tuple[Case, list[tuple[str, bool]]]:
    """The case as the law takes it; what of it lies beyond the rows, and whether that costs loss.

    More rounds than any row has are taken for as many.
    """
    beyond = []
    cases = [row.case._asdict() | {"rounds": row.case.rounds} for row in given]
    fields = case._asdict() | {"rounds": case.rounds}
    fields["wire"] = "float32" if case.wire in FREE_WIRES else case.wire
    for each in cases:
        each["wire"] = "float32" if each["wire"] in FREE_WIRES else each["wire"]
    for name, usual in _CLASSES:
        if not any(each[name] == fields[name] for each in cases):
            beyond.append((f"{fields[name]} (no row)", True))
            fields[name] = usual
    for name, words, more_costs in _RANGES:
        of_classes = [
            [each[name] for each in cases if each[class_] == fields[class_]]
            for class_, _ in (_CLASSES[:1] if name == "tau" else _CLASSES)  # it has no term
        ]
        least, most = max(map(min, of_classes)), min(map(max, of_classes))
        most = math.inf if name == "rounds" else most
        nearest = min(max(fields[name], least / SLACK), most * SLACK)
        if nearest != fields[name]:
            show = _size if name == "parameters" else "{:.3g}".format
            of = show(least) if least == most else f"{show(least)} to {show(most)}"
            of = f"{show(least)} or more" if most == math.inf else of
            text = f"{words.format(show(fields[name]))} ({of} measured)"
            beyond.append((text, more_costs == (fields[name] > nearest)))
    rounds = min(case.rounds, max(each["rounds"] for each in cases))
    return case._replace(**{name: fields[name] for name, _ in _CLASSES}, of_rounds=rounds), beyond
