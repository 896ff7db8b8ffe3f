"""Accuracy after fine-tuning of models that were trained in three modes to the same held-out loss.

    PYTHONPATH=. python benchmarks/downstream.py text=FILE [name=value ...] [key=value ...]

arXiv 2511.13761 reports that a model of DiLoCo is worse after fine-tuning than one of data
parallelism with the same loss. This benchmark asks the same of a model with 1.1M parameters.

The pretraining corpus has equal parts of `text`, words that repeat, and numbers that grow by a
constant. The last two make pretraining help with the tasks. For each seed, data parallelism trains
for `steps` steps. Streaming DiLoCo in 4 bits and eager updates then train for the number of steps
that they need for the same loss on held-out documents, within `tolerance` nats. The learning rate
is constant after the warm-up and decays linearly over the last steps (wsd). A search over the
number of steps therefore trains the constant part once, and repeats only the decay, from a
checkpoint.

Every model is then fine-tuned with data parallelism on the same examples in the same order. They
are strings to copy and to reverse, and sums. A model without pretraining is fine-tuned too. The
examples that are tested are not trained on. An answer is correct if every character is the
likeliest one, given those before it. The loss of the answers is the second measure.

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
from benchmarks.link.command import guarded, help_text, number, split_arguments
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
    "seeds": "5",
    "steps": "360",  # of data parallelism
    "finetune_steps": "40,60",  # of fine-tuning before each test
    "finetunings": "1",  # of a pretrained model, each with other examples
    "tolerance": "0.01",  # nats
    "tests": "200",  # examples of a level
    "out": "runs/downstream",
}
PERIOD = 6  # H; lengths are multiples of it
WARMUP, DECAY = 30, 30  # steps; the decay has up to SAVED more
SAVED = 30  # steps between two checkpoints of the constant part
SCHEDULE = 30_000  # steps of a schedule that no run reaches the end of
MODES = (DATA_PARALLEL, "streaming, tau=1, 4 bits", "eager")
NOTHING = "no pretraining"
RATE, FINETUNE_RATE = 0.006, 0.003  # inner learning rates after the warm-up
OUTER_LR = 0.7  # the best of these modes in results/loss_by_mode.md
BATCH, FINETUNE_BATCH = 4, 8  # sequences of a step
BRANCHES = 5  # most lengths that are tried for one row
# Nats that the loss falls when a run becomes e times as long: the first guess of the search.
SLOPE, FACTOR = 0.4, {"streaming, tau=1, 4 bits": 1.2, "eager": 1.6}
EXAMPLES = 40_000
DOCUMENT = 60  # characters
LONGEST = 24  # tokens of an example
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t, by number of seeds
SCALE = SCALES["cpu"]._replace(
    keys=SCALES["cpu"].keys | {
        "eval_steps": -1,
        "eval_fraction": 0.01,
        "grain_packing_type": "best_fit",
        "base_emb_dim": 128,
        "base_mlp_dim": 512,
        "head_dim": 32,
        "enable_checkpointing": True,
        "checkpoint_period": SAVED,
        "max_num_checkpoints_to_keep": "all",
        "lr_schedule_type": "wsd",
    },
    batch=BATCH,
)  # fmt: skip


class Example(NamedTuple):
    """A prompt and its answer."""

    prompt: str
    answer: str


class Options(NamedTuple):
    """The command line. keys: of the trainer."""

    text: str
    seeds: int
    steps: int
    finetune_steps: Sequence[int]
    finetunings: int
    tolerance: float
    tests: int
    out: pathlib.Path
    keys: Mapping[str, str]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    again = "Interrupted. The same command resumes at the first row that is missing."
    return guarded(_main, argv, usage=help_text(__doc__, OWN), interrupted=again)


def _main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    write_corpus(options.out / "corpus.jsonl", pathlib.Path(options.text))
    tests = write_examples(options.out / "finetune.jsonl", options.tests)
    rows = stored_rows(options)
    for seed in range(options.seeds):
        for mode in (*MODES, NOTHING):
            if any((row["mode"], row["seed"]) == (mode, seed) for row in rows):
                continue
            rows.append(run_row(mode, seed, options, rows, tests))
            save_rows(options, rows)
            (options.out / "table.md").write_text(tables(rows), encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)
    print(tables(rows))
    return 0


def arguments(argv: Sequence[str]) -> Options:
    """Read the command line. Raises ConfigError."""
    options, keys = split_arguments(argv, OWN)
    if not pathlib.Path(options["text"]).is_file():
        raise ConfigError(f"text={options['text']}: expected a file of text.")
    steps = number("steps", options, least=WARMUP + DECAY + PERIOD)
    return Options(
        text=str(pathlib.Path(options["text"]).resolve()),
        seeds=number("seeds", options),
        steps=steps // PERIOD * PERIOD,
        finetune_steps=sorted(
            number("finetune_steps", {"finetune_steps": steps})
            for steps in options["finetune_steps"].split(",")
        ),
        finetunings=number("finetunings", options),
        tolerance=number("tolerance", options, float, least=0),
        tests=number("tests", options),
        out=pathlib.Path(options["out"]).resolve(),
        keys=keys,
    )


def setup(options: Options) -> dict[str, Any]:
    """Return the settings that rows have to share."""
    shared = options._asdict()
    del shared["seeds"], shared["out"]
    return shared


def stored_rows(options: Options) -> list[dict[str, Any]]:
    """Return the rows in `out`. Raises ConfigError for rows of other settings."""
    path = options.out / "rows.json"
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["setup"] != setup(options):
        raise ConfigError(f"out={options.out} has rows of other settings. Name another folder.")
    return saved["rows"]


def save_rows(options: Options, rows: list[dict[str, Any]]) -> None:
    """Write the rows."""
    draft = options.out / "rows.json.new"
    draft.write_text(
        json.dumps({"setup": setup(options), "rows": rows}, indent=1), encoding="utf-8"
    )
    os.replace(draft, options.out / "rows.json")


# -- the corpus of pretraining


def write_corpus(path: pathlib.Path, text: pathlib.Path) -> None:
    """Write documents of equal length: text, a word that repeats, and numbers that grow."""
    rng = random.Random(0)
    whole = text.read_text(encoding="utf-8")
    lines = []
    for start in range(0, len(whole) - DOCUMENT, DOCUMENT):
        first, step, digits = rng.randrange(100), rng.randrange(1, 10), rng.choice((2, 3))
        numbers = (f"{first + step * i:0{digits}} " for i in range(DOCUMENT))
        documents = (
            whole[start : start + DOCUMENT],
            f"{_word(rng)} " * DOCUMENT,
            "".join(numbers),
        )
        lines += [json.dumps({"text": document[:DOCUMENT]}) for document in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _word(rng: random.Random, size: int = 0) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(size or rng.randint(2, 8)))


# -- the task


# A task, and the letters of a word or the digits of the first number.
LEVELS = ("copy 4", "copy 8", "reverse 2", "reverse 4", "add 1", "add 2")


def draw(level: str, rng: random.Random) -> Example:
    """Return a random example of a level."""
    task, size = level.split()
    if task == "add":
        a, b = rng.randrange(10 ** int(size)), rng.randrange(10)
        return Example(f"{a:0{size}}+{b}=", f"{a + b:0{int(size) + 1}}")
    word = _word(rng, int(size))
    return Example(f"{word}=", word) if task == "copy" else Example(f"{word}>", word[::-1])


def distinct(level: str) -> int:
    """Return how many examples a level has."""
    task, size = level.split()
    return 10 ** (int(size) + 1) if task == "add" else len(ALPHABET) ** int(size)


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
        while len(chosen) < min(tests, distinct(level) // 5):
            chosen[draw(level, rng)] = None
        held_out[level] = list(chosen)
    tested = {example for chosen in held_out.values() for example in chosen}
    lines: list[str] = []
    while len(lines) < EXAMPLES:
        example = draw(rng.choice(LEVELS), rng)
        if example not in tested:
            lines.append(json.dumps({"text": example.prompt + example.answer}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return held_out


def scores(
    run: pathlib.Path, step: int, tests: Mapping[str, Sequence[Example]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Test the model that a run had after a step.

    Returns:
      The percentage of correct answers, and the loss in nats per character of an answer, by level.
    """
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    found = stored.load(
        read.locate(str(run), base_output_directory="", step=step),
        lambda meta: (config.from_checkpoint(meta["config"]), mesh),
    )
    log_likelihoods = jax.jit(
        lambda params, tokens: jax.nn.log_softmax(
            found.model.logits(params, tokens, jnp.ones_like(tokens))
        )
    )
    tokenizer = ByteTokenizer()
    # One shape for all levels, so that one program is compiled.
    shape = max(map(len, tests.values())), LONGEST
    answers, losses = {}, {}
    for level, examples in tests.items():
        # All examples of a level are equally long.
        rows = np.array([tokenizer.prompt(e.prompt + e.answer) for e in examples], np.int32)
        size, (count, length) = len(examples[0].answer), rows.shape
        padded = np.zeros(shape, np.int32)
        padded[:count, :length] = rows
        said = np.asarray(log_likelihoods(found.params, padded))
        said = said[:count, length - size - 1 : length - 1]
        answer = rows[:, -size:]
        answers[level] = 100 * float(np.mean(np.all(said.argmax(axis=-1) == answer, axis=1)))
        losses[level] = -float(np.mean(np.take_along_axis(said, answer[..., None], axis=-1)))
    return answers, losses


# -- a row: pretraining to a loss, fine-tuning, test


def run_row(
    mode: str,
    seed: int,
    options: Options,
    rows: Sequence[Mapping[str, Any]],
    tests: Mapping[str, Sequence[Example]],
) -> dict[str, Any]:
    """Train, fine-tune and test a model; returns the row."""
    folder = options.out / f"{mode.replace(', ', '_').replace(' ', '_')}-{seed}"
    began = time.monotonic()
    steps, loss, weights = 0, None, None
    if mode != NOTHING:
        steps, loss, weights = pretrain(mode, seed, options, rows, folder)
    results = []
    for order in range(options.finetunings):
        tuned = finetune(weights, seed, order, options, folder / "finetuned")
        for step in options.finetune_steps:
            answers, losses = scores(tuned, step, tests)
            results.append({"steps": step, "answers": answers, "losses": losses})
        shutil.rmtree(tuned)
    for used in folder.iterdir():
        shutil.rmtree(used)
    return {
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "loss": loss,
        "tests": results,
        "seconds": time.monotonic() - began,
    }


def finetune(
    weights: pathlib.Path | None, seed: int, order: int, options: Options, folder: pathlib.Path
) -> pathlib.Path:
    """Fine-tune a model, or train one from scratch; returns the folder of the run."""
    keys: dict[str, Any] = {"load_parameters_path": weights} if weights else {}
    every = math.gcd(*options.finetune_steps)
    keys |= _keys(DATA_PARALLEL, seed, options) | {
        "dataset_path": options.out / "finetune.jsonl",
        "per_device_batch_size": FINETUNE_BATCH,
        "data_shuffle_seed": seed * options.finetunings + order,
        "eval_fraction": 0,
        "eval_interval": -1,
        "learning_rate": FINETUNE_RATE,
        "learning_rate_schedule_steps": SCHEDULE,
        "warmup_steps_fraction": every / SCHEDULE,
        "wsd_decay_steps_fraction": 0,
        "steps": options.finetune_steps[-1],
        "checkpoint_period": every,
    }
    return train(keys | dict(options.keys), folder)


def pretrain(
    mode: str,
    seed: int,
    options: Options,
    rows: Sequence[Mapping[str, Any]],
    folder: pathlib.Path,
) -> tuple[int, float, pathlib.Path]:
    """Train until the held-out loss equals the loss of data parallelism with the same seed.

    Returns:
      The steps, the loss and the folder of the run whose loss is closest.
    """
    found: dict[int, float] = {}
    if mode == DATA_PARALLEL:
        found[options.steps] = branch(mode, seed, options, options.steps, folder)
        return options.steps, found[options.steps], folder / str(options.steps)
    losses = {(row["mode"], row["seed"]): row["loss"] for row in rows}
    before = [row["steps"] for row in rows if row["mode"] == mode]
    target = losses[DATA_PARALLEL, seed]
    steps = _round(before[-1] if before else options.steps * FACTOR[mode])
    while steps not in found and len(found) < BRANCHES:
        found[steps] = branch(mode, seed, options, steps, folder)
        print(
            f"{mode}, seed {seed}: {steps} steps, loss {found[steps]:.4f} ({target:.4f})",
            flush=True,
        )
        if abs(found[steps] - target) <= options.tolerance:
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


def branch(mode: str, seed: int, options: Options, steps: int, folder: pathlib.Path) -> float:
    """Train `steps` steps, the last with a decaying rate, into folder/steps; returns the loss.

    The part with the constant rate is in folder/constant. Only its missing steps are trained.
    """
    start = (steps - DECAY) // SAVED * SAVED
    keys = _keys(mode, seed, options) | {
        "dataset_path": options.out / "corpus.jsonl",
        "learning_rate_schedule_steps": SCHEDULE,
        "warmup_steps_fraction": WARMUP / SCHEDULE,
        "wsd_decay_steps_fraction": 0,
        "steps": start,
        "eval_interval": -1,
    }
    constant = folder / "constant"
    saved = constant / "checkpoints" / str(start)
    if not saved.exists():
        train(keys | dict(options.keys), constant)
    keys |= {
        "load_full_state_path": saved,
        "learning_rate_schedule_steps": steps,
        "warmup_steps_fraction": 0,
        "wsd_decay_steps_fraction": (steps - start) / steps,
        "steps": steps,
        "eval_interval": SCHEDULE,  # after the last step
        "max_num_checkpoints_to_keep": 1,
    }
    run = train(keys | dict(options.keys), folder / str(steps))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["eval/loss"] for row in map(json.loads, lines) if "eval/loss" in row][-1]


def _keys(mode: str, seed: int, options: Options) -> dict[str, Any]:
    """Return the trainer's keys of a mode."""
    rate = 0.0 if mode == DATA_PARALLEL else OUTER_LR
    keys = keys_of(Row(mode, RATE, rate, seed), SCALE, {})
    return keys | {
        "diloco_sync_period": PERIOD,
        "log_period": PERIOD,
        "jax_cache_dir": options.out / "jax_cache",
        "data_cache_directory": options.out / "prepared",
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
    """Return the rows as Markdown: pretraining, correct answers, and the loss of the answers."""
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
        [
            _markdown(lines),
            _scores("correct answers, %", "answers", 1, by_mode, base),
            _scores("nats per character of the answer", "losses", 3, by_mode, base),
        ]
    )


def _scores(
    title: str,
    kind: str,
    digits: int,
    by_mode: Mapping[str, Sequence[Mapping[str, Any]]],
    base: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return the table of one kind of score, and of differences with intervals."""
    lines = [[title, *columns(base[0], kind)]]
    for mode, mine in by_mode.items():
        values = zip(*(columns(row, kind).values() for row in mine), strict=True)
        lines.append([mode, *(f"{statistics.fmean(each):.{digits}f}" for each in values)])
    for mode, mine in by_mode.items():
        if mode != DATA_PARALLEL:
            pairs = [(columns(row, kind), columns(base[row["seed"]], kind)) for row in mine]
            cells = [
                interval([row[column] - other[column] for row, other in pairs], digits)
                for column in lines[0][1:]
            ]
            lines.append([f"{mode}, difference to data parallel", *cells])
    return _markdown(lines)


def columns(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Return a row's means by level, by number of steps, and over both."""
    tests = row["tests"]
    means = {
        level: statistics.fmean(test[kind][level] for test in tests) for level in tests[0][kind]
    }
    whole = statistics.fmean(means.values())
    for steps in dict.fromkeys(test["steps"] for test in tests):
        chosen = [test[kind].values() for test in tests if test["steps"] == steps]
        means[f"{steps} steps"] = statistics.fmean(map(statistics.fmean, chosen))
    return means | {"mean": whole}


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(lines[0]) - 1)]
    rows = [lines[0], rule, *lines[1:]]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def interval(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean with the half width of its 95% interval by Student's t."""
    mean = f"{statistics.fmean(values):+.{digits}f}"
    if len(values) not in STUDENT:
        return mean
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
