"""Loss of unequal islands and late messages, by rule for late messages.

    PYTHONPATH=. python benchmarks/islands_unequal.py texts=FOUR [name=value ...] [key=value ...]

One process trains four simulated islands, so the same command gives the same losses. In each period
an island takes as many inner steps as its speed allows, and sends one message. The message arrives
a random number of periods later. A record accepts the messages that have arrived. islands/rules.py
decides about messages, weights and scale, and islands/outer_step.py has the outer step. The model
of the quality table (learning/modes.py) is one fragment.

SETTINGS has the differences among the islands. RULES has candidates for the constants of each rule.
Each candidate trains with a seed of its own in the setting with the latest messages. The best one
then trains with the other seeds. The published rules are:

* Direction-aware correction (HeLoCo, arXiv 2606.00271). Each tensor of a message is compared with
  the outer momentum. A tensor that opposes the momentum is shortened along it. A tensor that is
  nearly orthogonal to the momentum is turned towards it. The outer step is the project's.
* Age-aware outer Adam (CGAD, arXiv 2605.09126). A message that is tau records late is multiplied by
  exp(-alpha tau) and by a cosine that reaches zero at a cutoff. The outer optimizer is Adam.

When all tokens are committed, the outer parameters are evaluated on held-out text. The loss is the
mean over the texts. Each result is appended to rows.jsonl in `out`; a result that is there is not
computed again. OWN has the names and their defaults; further keys are the trainer's.
"""

import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from benchmarks import simulated_islands
from benchmarks.bandwidth_model import markdown
from benchmarks.learning.modes import SCALES
from benchmarks.link.command import choices, guarded, help_text, number, split_arguments
from maxdiloco.config import config
from maxdiloco.config.keys import AXES, Config
from maxdiloco.data import corpus
from maxdiloco.errors import ConfigError
from maxdiloco.islands import outer_step, rules
from maxdiloco.islands.outer_step import Outer, Term
from maxdiloco.islands.records import Heartbeat, Leaf, LogState, Message, Record, Reject, Run
from maxdiloco.islands.rules import Peer, Timing
from maxdiloco.run import inner_step, optimizer
from maxdiloco.run import model as run_model
from maxdiloco.run import settings as run_settings

OWN = {
    "texts": "",  # four files, folders or globs with commas between, as dataset_path
    "settings": "all",  # names of SETTINGS, with semicolons between
    "rules": "all",  # names of RULES, with semicolons between
    "seeds": "3",
    "records": "16",  # of 60 inner steps each, without lateness
    "tuning_records": "25",  # records of a candidate
    "out": "runs/islands_unequal",
}
ISLANDS, STEPS, BATCH = 4, 60, 4  # STEPS: of all islands in a period; BATCH: sequences of a step
TEXT_BYTES, HELD_OUT, EVAL_SEQUENCES = 4 << 20, 0.05, 256  # of each text
TUNING_SEED = 1000
TIMING = Timing(period=1.0)  # the unit of time is a period
KEYS = {"learning_rate": 0.008, "per_device_batch_size": BATCH}  # the best rate of the model
OUTER_MOMENTUM = 0.6  # as in the quality table


class Setting(NamedTuple):
    """How the islands differ. max_late: most periods that a message is late."""

    steps: tuple[int, int, int, int]  # of each island in a period
    own_texts: bool = False  # whether each island reads its own text, or all read all texts
    max_late: int = 0


SETTINGS = {
    "unequal, own texts, up to 8 records late": Setting((4, 8, 16, 32), True, 8),
    "unequal, own texts": Setting((4, 8, 16, 32), True),
    "equal": Setting((15, 15, 15, 15)),
    # Each message has four times as many steps. Messages are then at most two records late.
    "as the first, period of four": Setting((16, 32, 64, 128), True, 2),
}


class Correction(NamedTuple):
    """Constants of the direction-aware correction, with the names of arXiv 2606.00271."""

    c_ok: float
    k_s: float = 1.0
    beta_max: float = 1.0
    k_d: float = 1.0
    kappa: float = 1.0


class AgeAwareAdam(NamedTuple):
    """Constants of the age-aware outer Adam, arXiv 2605.09126. cutoff: [records]."""

    alpha: float = 0.1
    cutoff: float = 16.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8


class Rule(NamedTuple):
    """A rule for late messages: constants of islands/rules.py, and the outer step."""

    max_staleness: int
    stale_weight: float
    outer_lr: float
    published: Correction | AgeAwareAdam | None = None  # None: the project's outer step

    def name(self) -> str:
        """Return the constants that differ among the candidates of a rule."""
        correction = isinstance(self.published, Correction)
        more = f", c_ok {self.published.c_ok:g}" if correction else ""
        return f"outer rate {self.outer_lr:g}{more}"


TODAY = "two records at most, weight 0.8 a record"
RULES = {
    TODAY: [Rule(2, 0.8, 0.7)],  # the default outer rate of an island
    "the same, outer rate tuned": [Rule(2, 0.8, lr) for lr in (0.1, 0.2, 0.4)],
    "eight records at most, weight 0.8": [Rule(8, 0.8, 0.7)],
    "eight records at most, outer rate tuned": [Rule(8, 0.8, lr) for lr in (0.2, 0.4, 0.6)],
    "direction-aware correction": [
        Rule(8, 1.0, lr, Correction(c_ok)) for lr in (0.2, 0.4) for c_ok in (0.0, 0.2)
    ],
    "age-aware outer Adam": [Rule(8, 1.0, lr, AgeAwareAdam()) for lr in (0.005, 0.01, 0.03)],
}


class Row(NamedTuple):
    """A run."""

    setting: str
    rule: Rule
    seed: int
    records: int


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    names = ["Settings:", *(f"  {name}" for name in SETTINGS), "Rules:", *(f"  {r}" for r in RULES)]
    return guarded(_main, argv, usage=help_text(__doc__, OWN, *names))


def _main(argv: Sequence[str]) -> int:
    options, keys = split_arguments(argv, OWN)
    names = choices("settings", options, list(SETTINGS), separator=";")
    chosen = choices("rules", options, list(RULES), separator=";")
    seeds, records = number("seeds", options), number("records", options)
    tuning_records = number("tuning_records", options)
    given = dict(SCALES["cpu"].keys) | KEYS | keys
    cfg = config.load([f"{name}={value}" for name, value in given.items()], {})
    texts = options["texts"].split(",")
    if len(texts) != ISLANDS:
        raise ConfigError(
            f"texts={options['texts']}: expected {ISLANDS} paths with commas between."
        )
    jax.config.update("jax_platforms", "cpu")
    learner, out = Learner(cfg, texts), pathlib.Path(options["out"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {row["run"]: row for row in map(json.loads, lines)}

    def result(setting: str, rule: Rule, seed: int, records: int = records) -> dict[str, Any]:
        row = Row(setting, rule, seed, records)
        if repr(row) not in found:
            found[repr(row)] = {"run": repr(row)} | run(row, learner)
            print(line := json.dumps(found[repr(row)]), flush=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        return found[repr(row)]

    latest = max(names, key=lambda name: SETTINGS[name].max_late)
    tuning, best = [["rule", "constants", "loss"]], {}
    for name in chosen:
        losses = {
            rule: result(latest, rule, TUNING_SEED, tuning_records)["loss"] for rule in RULES[name]
        }
        tuning += [[name, rule.name(), f"{loss:.4f}"] for rule, loss in losses.items()]
        best[name] = min(losses, key=lambda rule: losses[rule])
    for seed, setting, name in itertools.product(range(seeds), names, chosen):
        result(setting, best[name], seed)
    rows = {
        (setting, name): [result(setting, best[name], seed) for seed in range(seeds)]
        for setting, name in itertools.product(names, chosen)
    }
    text = f"{markdown(tuning)}\n{table(rows, best)}"
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def table(
    rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], best: Mapping[str, Rule]
) -> str:
    """Return the mean and standard deviation over seeds of losses, and of differences to TODAY."""
    lines = [["setting", "rule", "constants", "loss by seed", "mean", "deviation"]]
    lines[0] += ["minus today's rule", "deviation", "periods", "records late", "rejected"]
    for (setting, name), mine in rows.items():
        losses = [one["loss"] for one in mine]
        today = [one["loss"] for one in rows.get((setting, TODAY), mine)]
        differences = [loss - other for loss, other in zip(losses, today, strict=True)]
        cells = [setting, name, best[name].name(), ", ".join(f"{loss:.4f}" for loss in losses)]
        for values, sign in ((losses, ""), (differences, "+")):
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            cells += [f"{statistics.fmean(values):{sign}.4f}", f"{deviation:.4f}"]
        for key in ("periods", "late", "rejected"):
            cells.append(f"{statistics.fmean(one[key] for one in mine):.3g}")
        lines.append(cells)
    return markdown(lines)


# -- the model -------------------------------------------------------------------------------------


class Learner:
    """The model, its inner optimizer and the texts.

    Attributes:
      leaves: leaves of the fragment.
      step_tokens: tokens of an inner step.
    """

    def __init__(self, cfg: Config, paths: Sequence[str]):
        """Build the programs, and read the texts."""
        mesh = Mesh(np.reshape(jax.devices()[:1], (1,) * len(AXES)), AXES)
        model = run_model.build(run_settings.read_model(cfg, mesh), mesh)
        settings = run_settings.read_optimizer(cfg)
        inner = optimizer.build(settings, model=model)
        step = inner_step.make(model, inner, accumulation=1, nan_policy="stop")
        _, unravel = ravel_pytree(jax.tree.map(lambda s: jnp.zeros(s.shape), model.shapes))
        self._model, self._inner = model, inner
        axes = jax.tree.leaves(model.layer_axis, is_leaf=lambda x: not isinstance(x, dict))
        self.leaves = tuple(
            Leaf(math.prod(like.shape), like.shape[0] if axis == 0 else 1)
            for like, axis in zip(jax.tree.leaves(model.shapes), axes, strict=True)
        )
        self.step_tokens = BATCH * cfg.max_target_length
        self._settings = settings
        texts = [_windows(path, cfg.max_target_length) for path in paths]
        held = [max(1, int(HELD_OUT * len(windows))) for windows in texts]
        self._train = [each[:-n] for each, n in zip(texts, held, strict=True)]
        self._held_out = [
            each[-n:][:: max(1, n // EVAL_SEQUENCES)][:EVAL_SEQUENCES].astype(np.int32)
            for each, n in zip(texts, held, strict=True)
        ]

        @jax.jit
        def train(x_N, opt_state, tokens_SBL, rate, steps):
            def body(i, carry):
                ones = jnp.ones_like(tokens_SBL[i])
                batch = {"tokens": tokens_SBL[i], "segment_ids": ones, "learning_rate": rate[None]}
                params, opt_state, _ = step(unravel(carry[0]), carry[1], batch)
                return ravel_pytree(params)[0], opt_state

            return jax.lax.fori_loop(0, steps, body, (x_N, opt_state))

        @jax.jit
        def loss(x_N, tokens_BL):
            batch = {"tokens": tokens_BL, "segment_ids": jnp.ones_like(tokens_BL)}
            _, aux = model.loss(unravel(x_N), batch)
            return aux["cross_entropy"] / aux["tokens"]

        self._train_program, self._loss_program = train, loss

    def rates(self, records: int) -> Callable[[int], float]:
        """Return the schedule of the learning rate by the steps of an average island."""
        return optimizer.learning_rate_schedule(self._settings, records * STEPS // ISLANDS)

    def init(self, seed: int) -> tuple[np.ndarray, Any]:
        """Return the first values [N] and state of the inner optimizer."""
        params = self._model.init(jax.random.key(seed))
        return np.asarray(ravel_pytree(params)[0]), self._inner.init(params)

    def batches(self, setting: Setting, island: int, seed: int) -> Iterator[np.ndarray]:
        """Yield the batches [B, L] of an island, each window once before any is repeated."""
        all_texts = [each[island::ISLANDS] for each in self._train]
        windows = self._train[island] if setting.own_texts else np.concatenate(all_texts)
        rng = np.random.default_rng([seed, island])
        while True:
            order = rng.permutation(len(windows))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                yield windows[order[start : start + BATCH]].astype(np.int32)

    def train(
        self, x_N: np.ndarray, opt_state: Any, batches: Sequence[np.ndarray], rate: float
    ) -> tuple[np.ndarray, Any]:
        """Take an inner step for each batch. One program serves any number of them."""
        most = max(max(setting.steps) for setting in SETTINGS.values())
        tokens_SBL = np.zeros((most, *batches[0].shape), np.int32)
        tokens_SBL[: len(batches)] = batches
        x_N, state = self._train_program(x_N, opt_state, tokens_SBL, np.float32(rate), len(batches))
        return np.asarray(x_N), state

    def losses(self, x_N: np.ndarray) -> list[float]:
        """Return the loss on the held-out part of each text."""
        return [float(self._loss_program(x_N, each)) for each in self._held_out]


def _windows(path: str, length: int) -> np.ndarray:
    """Return the bytes of a text in windows [count, length]."""
    text = b"".join(pathlib.Path(file).read_bytes() for file in corpus.find(path, "texts"))
    count = min(len(text), TEXT_BYTES) // length
    return np.frombuffer(text, np.uint8)[: count * length].reshape(count, length)


# -- islands ---------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message on its way: its values [N], its last inner step, and the period of its arrival."""

    message: Message
    values_N: np.ndarray
    t: int
    arrives: int


class Island:
    """An island, whose values are outer parameters - undecided messages - unsent progress."""

    def __init__(self, index: int, row: Row, learner: Learner):
        """Start from the first outer parameters."""
        setting = SETTINGS[row.setting]
        self.name, self.steps, self._late = f"island{index}", setting.steps[index], setting.max_late
        self.x_N, self._opt_state = learner.init(row.seed)
        self.undecided: list[Sent] = []
        self.t, self.unsent_steps, self.steps_of_period = 0, 0, 0
        self._learner, self._batches = learner, learner.batches(setting, index, row.seed)
        self._delays = np.random.default_rng([row.seed, index, 1])
        self._seq, self._arrives, self._is_due = 0, 0, False

    def run_period(self, period: int, base: int, outer: Outer, rate: float) -> None:
        """Train and send a message. Rule 6: an island whose last message waits does not train.

        Args:
          period: number of the period.
          base: records so far.
          outer: the outer state after them.
          rate: learning rate.
        """
        self.steps_of_period = 0
        if self._is_due and not self._send(period, base, outer):
            return
        batches = [next(self._batches) for _ in range(self.steps)]
        self.x_N, self._opt_state = self._learner.train(self.x_N, self._opt_state, batches, rate)
        self.t, self.unsent_steps = self.t + self.steps, self.unsent_steps + self.steps
        self.steps_of_period = self.steps
        self._is_due = not self._send(period, base, outer)

    def _send(self, period: int, base: int, outer: Outer) -> bool:
        if not rules.may_send(self.undecided):
            return False
        values_N = rules.unsent(outer.theta, [one.values_N for one in self.undecided], self.x_N)
        self._seq += 1
        # Messages of an island arrive in order.
        self._arrives = max(self._arrives, period + int(self._delays.integers(self._late + 1)))
        message = Message(
            fragment=0,
            island=self.name,
            incarnation=1,
            seq=self._seq,
            base=base,
            steps=self.unsent_steps,
            tokens=self.unsent_steps * self._learner.step_tokens,
            read=self.t * self._learner.step_tokens,
            data=(),
            norm=outer_step.norm(values_N),
            finite=bool(np.isfinite(values_N).all()),
            sha256="",
        )
        self.undecided.append(Sent(message, values_N, self.t, self._arrives))
        self.unsent_steps = 0
        return True

    def apply(self, settings: Run, record: Record, before: Outer, after: Outer) -> None:
        """Rules 6 and 10: replace the island's values after a record."""
        taken = {rules.message_key(one) for one in record.members}
        refused = {rules.message_key(one) for one in record.rejected}
        committed = [one for one in self.undecided if rules.message_key(one.message) in taken]
        returned = [one for one in self.undecided if rules.message_key(one.message) in refused]
        self.undecided = self.undecided[len(committed) + len(returned) :]
        self.unsent_steps += sum(one.message.steps for one in returned)
        sent_at = max((one.t for one in committed), default=None)
        if rules.how_to_apply(settings, self.t, sent_at, len(self.undecided)) == "merge":
            self.x_N = outer_step.merged(self.x_N, after.theta, settings.alpha)
        else:
            values = [one.values_N for one in committed]
            self.x_N = rules.rebase(self.x_N, before.theta, after.theta, values)

    def peer(self, period: int) -> Peer:
        """Return the island as the author of a record observes it."""
        speed = self.steps_of_period * self._learner.step_tokens / TIMING.period
        heartbeat = Heartbeat(self.name, 1, self._seq, sent=(self._seq,), speed=speed, left=False)
        return Peer(heartbeat, changed_at=float(period), since=0.0)


def run(row: Row, learner: Learner) -> dict[str, Any]:
    """Train until the tokens are committed; return the loss and other figures."""
    staleness = row.rule.max_staleness
    constants = {"MAX_STALENESS": staleness, "STALE_WEIGHT": row.rule.stale_weight}
    if staleness > rules.MAX_STALENESS:
        constants["MAX_UNDECIDED"] = staleness + 1  # a message in each period
    with mock.patch.multiple(rules, **constants):
        return _run(row, learner)


def _run(row: Row, learner: Learner) -> dict[str, Any]:
    began, rate = time.monotonic(), learner.rates(row.records)
    islands = [Island(index, row, learner) for index in range(ISLANDS)]
    settings = simulated_islands.run_settings(sync_period=1, fragments=1, snapshot_every=64)
    settings = settings._replace(
        fragments=(learner.leaves,),
        outer_lr=row.rule.outer_lr,
        outer_momentum=OUTER_MOMENTUM,
        tokens=row.records * STEPS * learner.step_tokens,
    )
    outer = outer_step.fresh(islands[0].x_N)
    state = rules.genesis(settings, 0, outer.digest())
    adam, rejected, lateness, period = None, 0, [], 0
    while rules.progress(settings, state) < 1 and np.isfinite(outer.theta).all():
        period += 1
        # Steps of an average island in the middle of the period.
        done = sum(one.t + one.steps / 2 for one in islands) / ISLANDS
        for island in islands:
            island.run_period(period, state.number, outer, rate(round(done)))
        arrived = {
            rules.message_key(one.message): one
            for one in itertools.chain.from_iterable(island.undecided for island in islands)
            if one.arrives <= period
        }
        inbox = {key: one.message for key, one in arrived.items()}
        members, refused = rules.order_messages(settings, state, inbox, {})
        if not members and not refused:
            continue
        record = make_record(settings, state, members, refused, islands)
        messages = [(one, arrived[rules.message_key(one)].values_N) for one in members]
        after, adam = apply_record(row.rule, settings, outer, adam, record, messages)
        for island in islands:
            island.apply(settings, record, outer, after)
        rejected += len(refused)
        lateness += [state.number - one.base for one in members]
        outer, state = after, rules.next_state(settings, state, record, after.digest())
    loss = statistics.fmean(losses := learner.losses(outer.theta))
    return {
        "loss": loss if math.isfinite(loss) else math.inf,
        "losses": losses,
        "periods": period,
        "committed": state.tokens,
        "rejected": rejected,
        "late": statistics.fmean(lateness),
        "seconds": round(time.monotonic() - began),
    }


def make_record(
    settings: Run,
    state: LogState,
    members: Sequence[Message],
    rejected: Sequence[Reject],
    islands: Sequence[Island],
) -> Record:
    """Rule 5: return the next record, with weights and scale as StateMachine computes them."""
    number = state.number + 1
    weights = rules.weights(settings, number, members)
    came, present = sum(one.tokens for one in members), {one.island for one in members}
    mean = came / max(len(present), 1)
    missing = (
        rules.expected_tokens(state, island.peer(number), mean, float(number), TIMING)
        for island in islands
        if island.name not in present
    )
    return Record(
        fragment=0,
        number=number,
        author=islands[0].name,
        nonce="1",
        members=tuple(rules.member_of(one, weights) for one in members),
        rejected=tuple(rejected),
        dead=(),
        scale=rules.scale(came, came + sum(missing)),
        previous=state.record_hash,
        state=state.digest,
        gradient="",
    )


# -- the outer step --------------------------------------------------------------------------------


def apply_record(
    rule: Rule,
    settings: Run,
    outer: Outer,
    adam: Any,
    record: Record,
    messages: Sequence[tuple[Message, np.ndarray]],
) -> tuple[Outer, Any]:
    """Return the outer state and the state of the outer Adam after a record.

    Args:
      rule: the rule for late messages.
      settings: run.json of the log.
      outer: before the record.
      adam: state of the outer Adam before the record; None before the first one.
      record: the record.
      messages: its members and their values [N].
    """
    if not messages:
        return outer, adam
    ages = [record.number - 1 - one.base for one, _ in messages]
    values = [values_N for _, values_N in messages]
    match rule.published:
        case Correction() as constants:
            # A mean of gradients, as long as a message.
            momentum_N = outer.trace * np.float32(1 - settings.outer_momentum)
            values = [corrected(constants, settings.fragments[0], x, momentum_N) for x in values]
        case AgeAwareAdam() as constants:
            gates = [np.float32(gate(constants, age)) for age in ages]
            values = [x * factor for x, factor in zip(values, gates, strict=True)]
    terms = [
        Term((one.island, one.incarnation), one.weight, values_N)
        for one, values_N in zip(record.members, values, strict=True)
    ]
    gradient_N = outer_step.aggregate(settings, 0, terms)
    if not isinstance(rule.published, AgeAwareAdam):
        return outer_step.stepped(settings, outer, record, gradient_N), adam
    beta1, beta2, epsilon = rule.published[2:]
    transform = optax.scale_by_adam(beta1, beta2, epsilon)
    state = transform.init(outer.theta) if adam is None else adam
    update_N, adam = transform.update(gradient_N * np.float32(record.scale), state)
    theta_N = outer.theta - np.float32(settings.outer_lr) * np.asarray(update_N)
    return Outer(theta_N, outer.trace), adam


def corrected(
    constants: Correction, leaves: Sequence[Leaf], values_N: np.ndarray, momentum_N: np.ndarray
) -> np.ndarray:
    """Return a message after the direction-aware correction, tensor by tensor."""
    sizes = [leaf.size // leaf.tensors for leaf in leaves for _ in range(leaf.tensors)]
    stops = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(values_N, stops), np.split(momentum_N, stops), strict=True)
    return np.concatenate([_corrected_tensor(constants, x, m) for x, m in pairs])


def _corrected_tensor(constants: Correction, x: np.ndarray, m: np.ndarray) -> np.ndarray:
    x_norm, m_norm = np.linalg.norm(x), np.linalg.norm(m)
    if not x_norm or not m_norm:
        return x
    u, v = x / x_norm, m / m_norm
    cosine = float(u @ v)
    confidence = float(x_norm / (x_norm + constants.kappa * m_norm))
    if cosine >= constants.c_ok:
        return x
    if cosine < 0:
        part = min(constants.k_s * -cosine * confidence, constants.beta_max)
        return x - np.float32(part * cosine) * x_norm * v
    turn = min(constants.k_d * (1 - cosine) * confidence, 1.0)
    turned = np.float32(1 - turn) * u + np.float32(turn) * v
    return x_norm * turned / np.linalg.norm(turned)


def gate(constants: AgeAwareAdam, age: int) -> float:
    """Return the factor of a message that is `age` records late; 1 without lateness."""
    if age >= constants.cutoff:
        return 0.0
    cosine = (1 + math.cos(math.pi * age / constants.cutoff)) / 2
    return cosine * math.exp(-constants.alpha * age)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
