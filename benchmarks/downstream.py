"""Accuracy after fine-tuning of models that were trained in three modes to the same held-out loss.

    PYTHONPATH=. python benchmarks/downstream.py text=FILE [name=value ...] [key=value ...]

arXiv 2511.13761 reports that a model of DiLoCo is worse after fine-tuning than one of data
parallelism with the same loss. This benchmark asks the same of the model of quality.py, with
279,296 parameters; keys of the trainer make it larger.

For each seed, data parallelism trains for `steps` steps on `text`. Streaming DiLoCo in 4 bits and
eager updates then train for the number of steps that they need for the same loss on held-out text,
within `tolerance` nats. The learning rate is constant after the warm-up and decays linearly over
the last steps (wsd). A search over the number of steps therefore trains the constant part once, and
repeats only the decay, from a checkpoint.

Every model is then fine-tuned with data parallelism, on the same examples in the same order, on
strings to copy and to reverse and on sums. A model without pretraining is fine-tuned too. An answer
is correct if every character is the likeliest one, given those before it. The examples that are
tested are not trained on.

Writes rows.json and table.md into `out`. The same command resumes at the first row that is missing.
OWN has the names and defaults; further keys are the trainer's, for pretraining and fine-tuning.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.learning.modes import DATA_PARALLEL, SCALES
from benchmarks.learning.plan import Row
from benchmarks.learning.rows import TAIL, keys_of
from benchmarks.link.command import divided, guarded, help_text, number
from benchmarks.link.rows import RowError
from maxdiloco import train as train_program
from maxdiloco.checkpoint import read
from maxdiloco.config import config
from maxdiloco.config.keys import AXES
from maxdiloco.data.tokenizer_base import ByteTokenizer
from maxdiloco.errors import ConfigError
from maxdiloco.run import stored

OWN = {
    "text": "",
    "seeds": "3",
    "steps": "360",  # of data parallelism
    "finetune_steps": "300",
    "rate": "0.008",  # peak of pretraining: the best one of this model in results/loss_by_mode.md
    "finetune_rate": "0.004",
    "tolerance": "0.01",  # nats
    "tests": "500",  # examples of a level
    "out": "runs/downstream",
}
PERIOD = 15  # H; lengths are multiples of it
WARMUP, DECAY = 30, 60  # steps
SCHEDULE = 30_000  # steps of a schedule that no run reaches the end of
MODES = (DATA_PARALLEL, "streaming, tau=1, 4 bits", "eager")
NOTHING = "no pretraining"
OUTER_LR = 0.7  # the best of these modes in results/loss_by_mode.md
BATCH = 8  # sequences of a step
BRANCHES = 5  # most lengths that are tried for one row
# Nats that the loss falls when a run becomes e times as long: the first guess of the search.
SLOPE, FACTOR = 0.4, {"streaming, tau=1, 4 bits": 1.2, "eager": 1.6}
EXAMPLES = 40_000
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t, by number of seeds
SCALE = SCALES["cpu"]._replace(
    keys=SCALES["cpu"].keys | {
        "eval_steps": -1,
        "enable_checkpointing": True,
        "checkpoint_period": PERIOD,
        "max_num_checkpoints_to_keep": "all",
        "lr_schedule_type": "wsd",
    },
    batch=BATCH,
)  # fmt: skip


class Example(NamedTuple):
    """A prompt and its answer."""

    prompt: str
    answer: str


class Asked(NamedTuple):
    """The command line. keys: of the trainer."""

    text: str
    seeds: int
    steps: int
    finetune_steps: int
    rate: float
    finetune_rate: float
    tolerance: float
    tests: int
    out: pathlib.Path
    keys: Mapping[str, str]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    again = "Interrupted. The same command resumes at the first row that is missing."
    return guarded(_main, argv, usage=help_text(__doc__, OWN), interrupted=again)


def _main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    asked.out.mkdir(parents=True, exist_ok=True)
    tests = write_examples(asked.out / "finetune.jsonl", asked.tests)
    rows = stored_rows(asked)
    for seed in range(asked.seeds):
        for mode in (*MODES, NOTHING):
            if any((row["mode"], row["seed"]) == (mode, seed) for row in rows):
                continue
            rows.append(run_row(mode, seed, asked, rows, tests))
            save_rows(asked, rows)
            (asked.out / "table.md").write_text(tables(rows), encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)
    print(tables(rows))
    return 0


def arguments(argv: Sequence[str]) -> Asked:
    """Read the command line. Raises ConfigError."""
    own, keys = divided(argv, OWN)
    if not pathlib.Path(own["text"]).is_file():
        raise ConfigError(f"text={own['text']}: expected a file of text.")
    steps = number("steps", own, least=WARMUP + DECAY + PERIOD)
    return Asked(
        text=str(pathlib.Path(own["text"]).resolve()),
        seeds=number("seeds", own),
        steps=steps // PERIOD * PERIOD,
        finetune_steps=number("finetune_steps", own),
        rate=number("rate", own, float, least=0),
        finetune_rate=number("finetune_rate", own, float, least=0),
        tolerance=number("tolerance", own, float, least=0),
        tests=number("tests", own),
        out=pathlib.Path(own["out"]).resolve(),
        keys=keys,
    )


def setup(asked: Asked) -> dict[str, Any]:
    """Return the settings that rows have to share."""
    shared = asked._asdict()
    del shared["seeds"], shared["out"]
    return shared


def stored_rows(asked: Asked) -> list[dict[str, Any]]:
    """Return the rows in `out`. Raises ConfigError for rows of other settings."""
    path = asked.out / "rows.json"
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["setup"] != setup(asked):
        raise ConfigError(f"out={asked.out} has rows of other settings. Name another folder.")
    return saved["rows"]


def save_rows(asked: Asked, rows: list[dict[str, Any]]) -> None:
    """Write the rows."""
    draft = asked.out / "rows.json.new"
    draft.write_text(json.dumps({"setup": setup(asked), "rows": rows}, indent=1), encoding="utf-8")
    os.replace(draft, asked.out / "rows.json")


# -- the task


class Level(NamedTuple):
    """A task at one size: letters of a word, or digits of a number."""

    task: str  # copy, reverse or add
    size: int

    def name(self) -> str:
        """Return the heading of the level's column."""
        return f"{self.task} {self.size}"

    def distinct(self) -> int:
        """Return how many examples there are."""
        return 100**self.size if self.task == "add" else len(ALPHABET) ** self.size

    def draw(self, rng: random.Random) -> Example:
        """Return a random example."""
        if self.task == "add":
            a, b = (rng.randrange(10**self.size) for _ in range(2))
            return Example(f"{a:0{self.size}}+{b:0{self.size}}=", f"{a + b:0{self.size + 1}}")
        word = "".join(rng.choice(ALPHABET) for _ in range(self.size))
        if self.task == "copy":
            return Example(f"{word}=", word)
        return Example(f"{word}>", word[::-1])


LEVELS = (
    Level("copy", 2),
    Level("copy", 4),
    Level("copy", 8),
    Level("reverse", 2),
    Level("reverse", 4),
    Level("add", 1),
    Level("add", 2),
)


def write_examples(path: pathlib.Path, tests: int) -> dict[str, list[Example]]:
    """Write the examples to train on, a document each.

    Args:
      path: the file.
      tests: examples of a level that are tested; at most a fifth of all that exist.

    Returns:
      The examples to test on, which the file does not have, by level.
    """
    rng = random.Random(1)
    held_out: dict[str, list[Example]] = {}
    for level in LEVELS:
        chosen: dict[Example, None] = {}
        while len(chosen) < min(tests, level.distinct() // 5):
            chosen[level.draw(rng)] = None
        held_out[level.name()] = list(chosen)
    tested = {example for chosen in held_out.values() for example in chosen}
    lines: list[str] = []
    while len(lines) < EXAMPLES:
        example = rng.choice(LEVELS).draw(rng)
        if example not in tested:
            lines.append(json.dumps({"text": example.prompt + example.answer}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return held_out


def accuracies(
    folder: pathlib.Path, tests: Mapping[str, Sequence[Example]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Test the model of a run.

    Returns:
      The share of correct answers, and the share of correct characters of answers, by level.
    """
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    found = stored.load(
        read.locate(str(folder), base_output_directory=""),
        lambda meta: (config.from_checkpoint(meta["config"]), mesh),
    )
    likeliest = jax.jit(
        lambda params, tokens: jnp.argmax(
            found.model.logits(params, tokens, jnp.ones_like(tokens)), axis=-1
        )
    )
    tokenizer = ByteTokenizer()
    answers, characters = {}, {}
    for level, examples in tests.items():
        # All examples of a level are equally long.
        tokens = np.array([tokenizer.prompt(e.prompt + e.answer) for e in examples], np.int32)
        size = len(examples[0].answer)
        said = np.asarray(likeliest(found.params, tokens))[:, -size - 1 : -1]
        correct = said == tokens[:, -size:]
        answers[level] = float(np.mean(np.all(correct, axis=1)))
        characters[level] = float(np.mean(correct))
    return answers, characters


# -- a row: pretraining to a loss, fine-tuning, test


def run_row(
    mode: str,
    seed: int,
    asked: Asked,
    rows: Sequence[Mapping[str, Any]],
    tests: Mapping[str, Sequence[Example]],
) -> dict[str, Any]:
    """Train, fine-tune and test a model; returns the row."""
    folder = asked.out / f"{mode.replace(', ', '_').replace(' ', '_')}-{seed}"
    began = time.monotonic()
    steps, loss, weights = 0, None, None
    if mode != NOTHING:
        steps, loss, weights = pretrain(mode, seed, asked, rows, folder)
    keys: dict[str, Any] = {"load_parameters_path": weights} if weights else {}
    keys |= _keys(DATA_PARALLEL, seed, asked) | {
        "per_device_batch_size": BATCH,
        "dataset_path": asked.out / "finetune.jsonl",
        "grain_packing_type": "best_fit",
        "eval_fraction": 0,
        "eval_interval": -1,
        "learning_rate": asked.finetune_rate,
        "lr_schedule_type": "cosine",
        "steps": asked.finetune_steps,
        "max_num_checkpoints_to_keep": 1,
    }
    tuned = train(keys | dict(asked.keys), folder / "finetuned")
    answers, characters = accuracies(tuned, tests)
    for used in folder.iterdir():
        shutil.rmtree(used)
    return {
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "loss": loss,
        "answers": answers,
        "characters": characters,
        "seconds": time.monotonic() - began,
    }


def pretrain(
    mode: str,
    seed: int,
    asked: Asked,
    rows: Sequence[Mapping[str, Any]],
    folder: pathlib.Path,
) -> tuple[int, float, pathlib.Path]:
    """Train until the held-out loss equals the loss of data parallelism with the same seed.

    Returns:
      The steps, the loss and the folder of the run whose loss is closest.
    """
    found: dict[int, float] = {}
    if mode == DATA_PARALLEL:
        found[asked.steps] = branch(mode, seed, asked, asked.steps, folder)
        return asked.steps, found[asked.steps], folder / str(asked.steps)
    losses = {(row["mode"], row["seed"]): row["loss"] for row in rows}
    before = [row["steps"] for row in rows if row["mode"] == mode]
    target = losses[DATA_PARALLEL, seed]
    steps = _round(before[-1] if before else asked.steps * FACTOR[mode])
    while steps not in found and len(found) < BRANCHES:
        found[steps] = branch(mode, seed, asked, steps, folder)
        print(
            f"{mode}, seed {seed}: {steps} steps, loss {found[steps]:.4f} ({target:.4f})",
            flush=True,
        )
        if abs(found[steps] - target) <= asked.tolerance:
            break
        steps = next_length(found, target)
    best = min(found, key=lambda length: abs(found[length] - target))
    return best, found[best], folder / str(best)


def next_length(found: Mapping[int, float], target: float) -> int:
    """Return the length that should have a loss, by the losses at other lengths.

    The loss is linear in the logarithm of the length, with the slope of the two closest losses.
    """
    first, *others = sorted(found, key=lambda length: abs(found[length] - target))
    slope = -SLOPE
    if others:
        slope = (found[others[0]] - found[first]) / math.log(others[0] / first)
        slope = min(slope, -SLOPE / 4)  # noise can make it flat
    return _round(first * math.exp((target - found[first]) / slope))


def _round(steps: float) -> int:
    return max(WARMUP + DECAY + PERIOD, round(steps / PERIOD) * PERIOD)


def branch(mode: str, seed: int, asked: Asked, steps: int, folder: pathlib.Path) -> float:
    """Train `steps` steps, the last with a decaying rate, into folder/steps; returns the loss.

    The part with the constant rate is in folder/constant. Only its missing steps are trained.
    """
    keys = _keys(mode, seed, asked) | {
        "dataset_path": asked.text,
        "learning_rate_schedule_steps": SCHEDULE,
        "warmup_steps_fraction": WARMUP / SCHEDULE,
        "wsd_decay_steps_fraction": 0,
        "steps": steps - DECAY,
        "eval_interval": -1,
    }
    constant = folder / "constant"
    start = constant / "checkpoints" / str(steps - DECAY)
    if not start.exists():
        train(keys | dict(asked.keys), constant)
    keys |= {
        "load_full_state_path": start,
        "learning_rate_schedule_steps": steps,
        "warmup_steps_fraction": 0,
        "wsd_decay_steps_fraction": DECAY / steps,
        "steps": steps,
        "eval_interval": SCHEDULE,  # after the last step
        "max_num_checkpoints_to_keep": 1,
    }
    run = train(keys | dict(asked.keys), folder / str(steps))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["eval/loss"] for row in map(json.loads, lines) if "eval/loss" in row][-1]


def _keys(mode: str, seed: int, asked: Asked) -> dict[str, Any]:
    """Return the trainer's keys of a mode."""
    rate = 0.0 if mode == DATA_PARALLEL else OUTER_LR
    keys = keys_of(Row(mode, asked.rate, rate, seed), SCALE, {})
    return keys | {
        "diloco_sync_period": PERIOD,
        "log_period": PERIOD,
        "jax_cache_dir": asked.out / "jax_cache",
        "data_cache_directory": asked.out / "prepared",
    }


def train(keys: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Run the trainer, or resume its run; returns the folder of the run. Raises RowError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    names = {"run_name": folder.name, "base_output_directory": folder.parent}
    arguments = [f"{name}={value}" for name, value in (names | dict(keys)).items()]
    said = io.StringIO()
    # In this process: most runs are shorter than the start of a program.
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = train_program.main(arguments)
    if code:
        tail = "\n  ".join(said.getvalue().splitlines()[-TAIL:])
        raise RowError(f"{folder}: exit code {code}. End of its log:\n  {tail}")
    return folder


# -- the tables


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown: pretraining, answers, and characters of answers."""
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in (*MODES, NOTHING)}
    by_mode = {mode: mine for mode, mine in by_mode.items() if mine}
    base = {row["seed"]: row for row in by_mode[DATA_PARALLEL]}
    lines = [["mode", "seeds", "steps", "held-out loss", "difference to data parallel"]]
    for mode, mine in by_mode.items():
        if mode == NOTHING:
            continue
        gaps = [row["loss"] - base[row["seed"]]["loss"] for row in mine]
        lines.append([
            mode,
            str(len(mine)),
            ", ".join(str(row["steps"]) for row in mine),
            ", ".join(f"{row['loss']:.4f}" for row in mine),
            "" if mode == DATA_PARALLEL else ", ".join(f"{gap:+.4f}" for gap in gaps),
        ])  # fmt: skip
    # An empty line between two tables.
    return "\n".join(
        [_markdown(lines), *(_accuracies(by_mode, base, of) for of in ("answers", "characters"))]
    )


def _accuracies(
    by_mode: Mapping[str, Sequence[Mapping[str, Any]]],
    base: Mapping[int, Mapping[str, Any]],
    kind: str,
) -> str:
    """Return the table of one kind of accuracy in percent, and of differences with intervals."""
    levels = [level.name() for level in LEVELS]

    def of(row: Mapping[str, Any]) -> list[float]:
        values = [100 * row[kind][level] for level in levels]
        return [*values, statistics.fmean(values)]

    lines = [[f"correct {kind}, %", *levels, "mean"]]
    for mode, mine in by_mode.items():
        columns = zip(*map(of, mine), strict=True)
        lines.append([mode, *(f"{statistics.fmean(values):.1f}" for values in columns)])
    for mode, mine in by_mode.items():
        if mode != DATA_PARALLEL:
            pairs = [zip(of(row), of(base[row["seed"]]), strict=True) for row in mine]
            each = [[value - other for value, other in pair] for pair in pairs]
            cells = map(interval, zip(*each, strict=True))
            lines.append([f"{mode}, difference to data parallel", *cells])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(lines[0]) - 1)]
    rows = [lines[0], rule, *lines[1:]]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def interval(values: Sequence[float]) -> str:
    """Return a mean with the half width of its 95% interval by Student's t."""
    mean = f"{statistics.fmean(values):+.1f}"
    if len(values) not in STUDENT:
        return mean
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
