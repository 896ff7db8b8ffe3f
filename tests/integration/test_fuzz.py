"""Programs read mutated files of a run, an islands store, shards and a Hugging Face model.

Each case changes one file by a fixed seed, and runs a program that reads it. The program ends with
a documented exit code and one line, deletes nothing, and opens no file that a value names.
"""

import os
import pathlib
import shutil
import sys

import pytest
from etils import epath
from mutated_files import HOSTILE, OUTSIDE, mutate, rng_of
from run import refused, run_program, train, train_arguments
from run_files import saved_steps
from tiers import corner

from maxdiloco import evaluate, generate, hf, prepare
from maxdiloco import train as train_program
from maxdiloco.checkpoint import seal
from maxdiloco.config.keys import KEYS
from maxdiloco.islands import __main__ as islands
from maxdiloco.report import __main__ as report

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.timeout(120)]

OPENED = []  # paths that this process has opened since a test cleared it
sys.addaudithook(lambda event, args: OPENED.append(args[0]) if event == "open" else None)


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory, finished):
    """A folder with a run, an islands store, prepared shards and a Hugging Face model."""
    root = tmp_path_factory.mktemp("artefacts")
    shutil.copytree(finished, root / "run")
    step = saved_steps(root / "run")[0]
    for other in saved_steps(root / "run")[1:]:  # the newest one is the only one
        shutil.rmtree(root / "run" / "checkpoints" / str(other))
    assert step == 40
    assert hf.main(["export", str(root / "run"), str(root / "model")]) == 0
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("in the beginning there was a byte. " * 400)
    assert prepare.main([f"{root}/text", f"out={root}/shards"]) == 0
    keys = dict(enable_islands="true", islands_store=root / "store", island_name="a", steps=40,
                dcn_diloco_parallelism=1, islands_period_seconds=0.1)  # fmt: skip
    assert train(root / "islands" / "a", **keys).code == 0
    return root


# {name: (folder of `artefacts`, glob of files, whether to seal again, [program, arguments])}
def commands(root):
    small = train_arguments(root / "runs" / "new", steps=1)
    once = ["eval_steps=1"]
    shards = [f"dataset_path={root}/shards", "dataset_type=arrayrecord", "vocab_size=257"]
    return {
        "report of META": ("run", "checkpoints/*/meta/metadata", False, report, ["run"]),
        "evaluate of META": ("run", "checkpoints/*/meta/metadata", False, evaluate, ["run", *once]),
        "evaluate of sealed META": ("run", "checkpoints/*/meta/metadata", True, evaluate,
                                    ["run", *once]),
        "export of sealed META": ("run", "checkpoints/*/meta/metadata", True, hf,
                                  ["export", "run", "exported"]),
        "generate of sealed META": ("run", "checkpoints/*/meta/metadata", True, generate,
                                    ["run", "prompt=a"]),
        "resume of sealed META": ("run", "checkpoints/*/meta/metadata", True, train_program,
                                  train_arguments(root / "run", steps=41)),
        "evaluate of seal": ("run", f"checkpoints/*/{seal.FILE}", False, evaluate, ["run", *once]),
        "resume of seal": ("run", f"checkpoints/*/{seal.FILE}", False, train_program,
                           train_arguments(root / "run", steps=41)),
        "report of files": ("run", "*.*", False, report, ["run"]),
        "train of config": ("run", "config.yml", False, train_program, ["config.yml", *small]),
        "status of islands": ("store", "**/*", False, islands, ["status", "store"]),
        "audit of islands": ("store", "**/*", False, islands, ["audit", "store"]),
        "train on shards": ("shards", "*", False, train_program, [*small, *shards]),
        "import of model": ("model", "*", False, hf, ["import", "model", "imported"]),
    }  # fmt: skip


NAMES = list(commands(pathlib.Path("a")))
SEEDS = range(16)
# One of each kind by default, of a seed that reaches far.
DEFAULT = [(name, 0) for name in NAMES if name != "generate of sealed META"]
# A log that is damaged ends these with 1, as their help says.
CODES = dict.fromkeys(["audit of islands", "status of islands"], (0, 1, 2, 3))


def check(run, before, root, outside, allowed=(0, 2, 3)):
    """Assert what holds for every program, whatever it has read."""
    assert run.code in allowed, run.errors
    assert "Traceback" not in run.output + run.errors
    lines = [x for x in run.errors.splitlines() if not x.startswith(("warning:", "note:"))]
    assert len(lines) <= 1 and (run.code in (0, 1) or len(lines) == 1), run.errors
    assert not before - files(root), "deleted"
    assert str(outside) not in map(str, OPENED), "opened a file outside of the run"


def files(root):
    # A report, a run that resumes and an export may replace these.
    return {path for path in root.rglob("*") if path.is_file() and path.suffix != ".part"}


@pytest.mark.parametrize(
    ("name", "seed"), corner([(name, seed) for name in NAMES for seed in SEEDS], DEFAULT)
)
def test_a_mutated_file_ends_no_program_in_a_traceback(
    name, seed, artefacts, tmp_path, monkeypatch
):
    part, pattern, seals, program, argv = commands(tmp_path)[name]
    root, outside = tmp_path, tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text("a secret")
    for kept in {part, "shards", "run"} if part == "shards" else {part}:
        shutil.copytree(artefacts / kept, root / kept)
    rng = rng_of(name, seed)
    found = sorted(path for path in (root / part).glob(pattern) if path.is_file())
    path = rng.choice(found)
    print(mutate(path, rng, outside))
    if seals and path.is_file():
        seal.write(epath.Path(path.parents[1]))
    if part == "run" and argv[0] == "config.yml":
        argv = [str(path), *argv[1:]]
    monkeypatch.chdir(root)
    argv = [str(root / word) if word == part and program is not hf else word for word in argv]
    before = files(root)
    OPENED.clear()
    run = run_program(program.main, *argv)
    check(run, before, root, outside, CODES.get(name, (0, 2, 3)))


LINES = range(40)


@pytest.mark.parametrize("seed", corner(LINES, [0, 1]))
def test_a_hostile_command_line_is_refused_in_one_line(seed, tmp_path, monkeypatch):
    rng, outside = rng_of("command line", seed), tmp_path / "outside"
    outside.write_text("a: b")
    monkeypatch.chdir(tmp_path)
    keys = rng.sample(sorted(KEYS), 3)
    values = [rng.choice(HOSTILE) for _ in keys]
    pairs = [
        f"{key}={outside if value is OUTSIDE else value}"
        for key, value in zip(keys, values, strict=True)
    ]
    # steps=abc comes last, so that no line is accepted and trains.
    arguments = train_arguments(tmp_path / "runs" / "new")
    code, _ = refused(train_program.main, *arguments, *pairs, "steps=abc")
    assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]


def test_an_opened_file_is_seen(tmp_path):
    """The positive control of the check."""
    (tmp_path / "a").write_text("a")
    OPENED.clear()
    os.close(os.open(tmp_path / "a", os.O_RDONLY))
    assert str(tmp_path / "a") in map(str, OPENED)
