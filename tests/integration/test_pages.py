"""The commands of your-data.md, huggingface.md and two tutorials run as they stand, except for
their paths and their size; so do the examples of the library class.
"""

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from data.tokenizers_on_disk import byte_level_bpe
from huggingface import small_models as small
from run import ROOT, output_of
from run_files import metrics_rows

import maxdiloco
from maxdiloco import evaluate, generate, prepare, train_compile
from maxdiloco.command_line import read_options
from maxdiloco.config import config
from maxdiloco.planning.job import EXACT

# A tiny model, a few steps; the command line wins over these.
TINY = dict(
    max_target_length=16, base_emb_dim=16, base_mlp_dim=16, base_num_query_heads=2,
    base_num_kv_heads=1, head_dim=8, per_device_batch_size=2, dtype="float32", eval_steps=1,
    enable_tensorboard="false",
)  # fmt: skip


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text):
    """Every line of every block without a language: outputs are `text`."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    return [line for language, block in found if not language for line in block.splitlines()]


def as_variables(keys):
    return {f"M_{name.upper()}": str(value) for name, value in keys.items()}


def output_of_command(line, *more):
    """Run a command in this process with more arguments, and return what it prints."""
    python, flag, module, *arguments = shlex.split(line)
    assert (python, flag) == ("python", "-m")
    program = importlib.import_module(module)
    if "__path__" in vars(program):  # a package, such as maxdiloco.report
        program = importlib.import_module(f"{module}.__main__")
    return output_of(program.main, *arguments, *more)


@pytest.mark.usefixtures("programs")
def test_the_commands_of_your_own_text_run(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = tmp_path / "data"
    for name, words in (("text", "the cat and the hat "), ("code", "def f(x): return x ")):
        (data / name).mkdir(parents=True)
        for i in range(3):
            (data / name / f"{i}.txt").write_text(words * 80)
    (data / "parquet").mkdir()
    table = pyarrow.table({"body": ["a document of its own " * 20] * 20})
    parquet.write_table(table, data / "parquet" / "0.parquet")
    monkeypatch.chdir(tmp_path)
    keys = TINY | dict(hardware="cpu", steps=2, log_period=1, base_num_decoder_layers=1)
    keys |= dict(diloco_sync_period=2, ici_fsdp_parallelism=1, jax_cache_dir="", opt_type="sgd")
    for name, value in as_variables(keys).items():
        monkeypatch.setenv(name, value)
    more = {"generate": "max_new_tokens=3", "eval_interval": "steps=100"}
    lines = blocks(page("docs/howto/your-data.md"))
    for line in lines:
        words = [value for key, value in more.items() if key in line]
        line = line.replace("/data/", f"{data}/").replace("=32000", "=300")
        said = output_of_command(line, *words)
        assert ("Once upon" in said) == ("Once upon" in line)
    programs = "tokenizer prepare prepare train evaluate evaluate generate train train train"
    assert [line.split()[2].partition(".")[2] for line in lines] == programs.split()
    (text,) = json.loads((tmp_path / "a.json").read_text())["texts"]
    assert text["tokens"] > 0 and text["bytes"] > text["tokens"]  # a subword has several
    last = metrics_rows(tmp_path / "runs/c")[-1]
    assert last["data/tokens_web"] == 3 * last["data/tokens_code"] > 0
    names = {"eval/loss", "eval/code/loss", "eval/code/bits_per_byte"}
    assert names <= set(metrics_rows(tmp_path / "runs/d")[-1])


@pytest.mark.parametrize(
    "main, usage, words",
    [
        (prepare.main, "prepare SOURCE out=FOLDER", prepare.OPTIONS),
        (evaluate.main, "evaluate RUN", ["ici_fsdp_parallelism", "eval_steps"]),
        (generate.main, "generate RUN [key=value ...]", generate.OPTIONS),
    ],
)
def test_help_lists_the_options(main, usage, words):
    """Without arguments, too."""
    for arguments in ([], ["--help"]):
        text = output_of(main, *arguments)
        assert f"usage: python -m maxdiloco.{usage}" in text
        assert all(word in text for word in words)


@pytest.mark.full
@pytest.mark.usefixtures("programs")
def test_the_commands_of_the_huggingface_page_run(tmp_path, monkeypatch):
    """The test's model has 31 rows."""
    monkeypatch.chdir(tmp_path)
    source = small.save(tmp_path / "Qwen3-0.6B", small.weights())
    byte_level_bpe(source, vocab_size=300)
    (tmp_path / "text.txt").write_text("one two three four\n" * 200)
    lines = re.findall(r"^python -m .+$", page("docs/howto/huggingface.md"), re.M)
    names = [line.split()[2].partition(".")[2] for line in lines]
    assert names == ["hf", "train", "prepare", "train", "hf"]
    smaller = (
        "hardware=cpu dcn_diloco_parallelism=2 ici_fsdp_parallelism=1 max_target_length=16 steps=1 "
        "per_device_batch_size=1 remat_policy=none enable_tensorboard=false opt_type=sgd"
    ).split()
    for name, line in zip(names, lines, strict=True):
        line = line.replace("/data/text", f"{tmp_path}/text.txt").replace("/data/", f"{tmp_path}/")
        more = ["vocab_multiple=300"] if " import " in line else []
        output_of_command(line, *(smaller if name == "train" else more))
    assert (tmp_path / "qwen3-more/tokenizer.json").is_file()


SLICES = blocks(page("docs/tutorials/laptop.md")) + blocks(page("docs/tutorials/tpu-slices.md"))
# A command that is not run; its keys are read all the same.
NOT_RUN = (
    "bash scripts/xpk_run.sh",  # needs a cluster; its dry run is run
    "python -m maxdiloco.train_compile",  # minutes of compiling; test_train_compile.py
)


def shortened(line):
    """100 steps are 6, 150 are 8; H follows."""
    line = line.replace("steps=100", "steps=6").replace("steps=150", "steps=8")
    return line.replace("diloco_sync_period=30", "diloco_sync_period=4")


def in_a_shell(line, folder, environ):
    """export lines are kept in `environ` for those that follow."""
    if line.startswith("export "):
        environ |= dict(word.split("=", 1) for word in shlex.split(line)[1:])
        return ""
    words = line if "DRY_RUN" in line else shortened(line)
    words = words.replace("scripts/", f"{ROOT}/scripts/")
    done = subprocess.run(
        ["bash", "-c", words], cwd=folder, env=environ, text=True, capture_output=True, timeout=500
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.full
@pytest.mark.usefixtures("few_compiler_passes")
def test_the_commands_of_the_pages_on_slices_run(tmp_path, monkeypatch):
    """Those that can run here. The runs of the page have the keys that its plans print."""
    monkeypatch.chdir(tmp_path)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("M_")}
    dry = clean | {"MAXDILOCO_VENV": sys.prefix}
    keys = dict(override_model_config="true", log_period=2, base_num_decoder_layers=2)
    small = as_variables(TINY | keys | dict(opt_type="sgd"))
    local = os.environ | small | {"MAXDILOCO_VENV": sys.prefix}
    local |= {"M_ENABLE_CHECKPOINTING": "false"}  # what it writes is only watched
    local |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    said = {}
    for line in SLICES:
        if line.startswith(NOT_RUN):
            continue
        if ".plan " in line:  # of the real models; what compiling 1b for v5e-16 gives
            more = [] if "step_time" in line else ["step_time=0.86"]
            said[line] = output_of_command(line, *more)
        elif line.startswith("python"):
            with monkeypatch.context() as patch:
                for name, value in small.items():
                    patch.setenv(name, value)
                more = ["max_new_tokens=3"] if ".generate " in line else []
                said[line] = output_of_command(shortened(line), *more)
        else:
            environ = dry if "xpk" in line or "export" in line else local
            said[line] = in_a_shell(line, tmp_path, environ)
    last = [json.loads(text.splitlines()[-1]) for line, text in said.items() if "tail" in line]
    assert [row["step"] for row in last] == [6, 6] and all(row["perf/step_time"] for row in last)
    (dry_run,) = [text for line, text in said.items() if line.startswith("DRY_RUN")]
    assert dry_run.startswith("xpk workload create") and "two-slices" in dry_run
    programs = {line.split()[2].partition(".")[2] for line in said if line.startswith("python")}
    assert programs == {"train", "plan", "evaluate", "generate", "report"}
    assert (tmp_path / "runs/laptop/checkpoints/8").is_dir()

    laptop, slices = [text for line, text in said.items() if ".plan" in line]
    for text, start in (
        (laptop, "bash scripts/run_local_slices.sh 2 model_name=tiny"),
        (slices, "DRY_RUN=1 bash"),
        *((slices, start) for start in NOT_RUN),
    ):
        (line,) = [line for line in SLICES if line.startswith(start)]
        (command,) = [each for each in text.splitlines() if "-m maxdiloco.train " in each]
        chosen = [word for word in command.split() if word.partition("=")[0] in EXACT.keys()]
        assert len(chosen) == 5 and set(chosen) <= set(line.split()), (line, command)


def test_the_keys_of_commands_that_are_not_run_are_valid():
    found = [line for line in SLICES if line.startswith(NOT_RUN)]
    assert len(found) == len(NOT_RUN)
    for line in found:
        words = [word for word in shlex.split(line) if "=" in word]
        _, keys = read_options(words, train_compile.OPTIONS, "train_compile", keys=True)
        cfg = config.load(keys, {})
        assert cfg.model_name == "1b"


@pytest.fixture
def built(monkeypatch):
    """The instances of maxdiloco.DiLoCo that a test builds."""
    found = []

    class Recorded(maxdiloco.DiLoCo):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setattr(maxdiloco, "DiLoCo", Recorded)
    return found


@pytest.mark.usefixtures("programs")
def test_the_library_example_learns_and_resumes_to_the_bit(tmp_path, built):
    """Three rounds in one call, and two and a third from the checkpoint. The loss always falls."""
    main = runpy.run_path(ROOT / "scripts" / "library_example.py")["main"]
    losses = main(steps=30)
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert main(str(tmp_path / "saved"), steps=20) == losses[:2]
    assert main(str(tmp_path / "saved"), steps=30) == losses[2:]

    settings, layout = built[0].settings, built[0].layout
    assert (settings.exchange_dtype, settings.overlap_steps) == ("float4_e3m0", 2)
    assert [plan.fragment.layers for plan in layout.plans] == [(), (0, 2), (1, 3)]
    kernel = layout.state.params["blocks"]["up"]["kernel"]
    assert kernel.shape == (4, 4, 32, 128)  # replicas, layers, inputs, outputs
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 4, 16, 128)


def test_the_program_of_the_own_loop_tutorial_prints_what_the_page_shows(capsys):
    """Its losses to a tenth: a sum may have another order on another machine."""
    text = page("docs/tutorials/own-loop.md")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (shown,) = re.findall(r"It prints:\n\n```\n(.*?)```", text, re.S)
    exec(program, {})
    printed = capsys.readouterr().out
    numbers = [[float(x) for x in re.findall(r"\d+(?:\.\d+)?", each)] for each in (printed, shown)]
    assert len(numbers[0]) == 7 and numbers[0] == pytest.approx(numbers[1], rel=0.1)
