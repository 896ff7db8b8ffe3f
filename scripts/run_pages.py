"""Run the commands of the documentation as they are written.

    python scripts/run_pages.py                   # every page below; half an hour on two cores
    python scripts/run_pages.py docs/faq.md ...   # some pages
    python scripts/run_pages.py --show PAGE ...   # print the outputs, too

Works in a temporary folder with a copy of the repository's tracked and new files, and with the
environment of the Python that runs it. `/data` and `/shared` are folders in there. The
environment sets small values for keys that a command does not set: four steps, short sequences. The
needs of a command decide how it is run:

    run      as written
    dry      GPUs, TPUs or a model too large for a CPU: with hardware=cpu show_fragments=true, which
             checks every key, builds the fragments and exits
    keys     compiles for minutes: only its keys are read
    skipped  needs an address, a cluster, a bucket or gigabytes of packages

Prints a line for each command. After a tutorial it searches the outputs of the commands for
each line that the page shows, and prints the missing ones. Numbers are not compared. The exit code
is 1 if a command failed or a line is missing.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md", "docs/get-started/installation.md", "docs/howto/run-on-gpus.md",
    "docs/howto/run-on-tpus.md", "docs/howto/clusters.md", "docs/howto/plan-bandwidth.md",
    "docs/howto/choose-a-mode.md", "docs/howto/checkpoint-and-resume.md",
    "docs/howto/your-data.md", "docs/howto/use-as-a-library.md", "docs/tutorials/laptop.md",
    "docs/tutorials/two-machines.md", "docs/tutorials/tpu-slices.md",
    "docs/tutorials/own-loop.md", "docs/howto/evaluate-and-sample.md",
    "docs/howto/monitor-a-run.md", "docs/tutorials/islands.md",
    "docs/development/add-a-wire-format.md", "docs/reference/compile-report.md",
    "docs/reference/results.md",
)  # fmt: skip
SKIPPED = (
    r"^git clone ",  # the address of the repository is not known here
    r"^bash scripts/(quickstart|test)\.sh",  # CI runs them from a fresh clone
    r"^bash scripts/make_venv\.sh|^source ",  # gigabytes of packages; this environment is used
    r"^bash scripts/xpk_run\.sh",  # starts a workload; its dry run is run
    r" s3://",
    r"python benchmarks/",  # minutes to hours
)
KEYS = (r"maxdiloco\.train_compile ", r"maxdiloco\.plan .*compile_topology=")
DRY = (r"hardware=(gpu|tpu)", r"model_name=(35m|90m|180m|1b)")
NO_CHECK = "import os, sys\nfrom maxdiloco.config import config\nconfig.load(sys.argv[1:], {})"
OPTIONS = r"^(step_time|\w+_bandwidth_gbps|latency_ms|tokens|details|report|max_exposed_fraction)="


def commands(text: str) -> list[str]:
    """Return the commands of a page's blocks. Lines are joined where they end with a backslash."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        if language == "python" and block.startswith("import"):
            found.append("python - <<'PYTHON'\n" + block + "PYTHON")
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#\s.*$", "", line).strip()
            if re.match(r"python |bash |export |[A-Z_]+=\S+ |tail |git |source |maxdiloco-", line):
                found.append(line)
    return found


def mode(command: str) -> str:
    """Return how a command is run; see the top of this file."""
    if command.startswith(("export ", "python - ")) or "DRY_RUN=1" in command:
        return "run"
    for name, patterns in (("skipped", SKIPPED), ("keys", KEYS)):
        if any(re.search(pattern, command) for pattern in patterns):
            return name
    if "maxdiloco.train " in command and any(re.search(each, command) for each in DRY):
        return "dry"
    return "run"


def adapted(command: str, how: str, folder: pathlib.Path) -> str:
    """Return the command that is executed instead of the written one."""
    command = re.sub(r"(?<=[=\s{])/(data|shared)/", rf"{folder}/\1/", command)
    command = re.sub(r"(path: |=)/(data|shared)/", rf"\1{folder}/\2/", command)
    if how == "dry":
        command = re.sub(r"\bJAX_\w+=\S+ ", "", command)
        command = re.sub(r"hardware=(gpu|tpu) ", "", command) + " hardware=cpu show_fragments=true"
        command = command.replace("diloco_parallelism=-1", "diloco_parallelism=2")
        command = re.sub(r"gs://\S+", f"{folder}/runs", command)
        return command.replace("fsdp_parallelism=-1", "fsdp_parallelism=1")
    if how == "keys":
        keys = [word for word in shlex.split(command)[3:] if not re.search(OPTIONS, word)]
        return shlex.join(["python", "-c", NO_CHECK, *keys])
    return command


def copy(folder: pathlib.Path) -> None:
    """Copy the repository, and make the texts that the pages name."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    words = {"text": "the cat and the hat ", "code": "def f(x): return x ", "shared": "a text "}
    for name, text in words.items():
        place = folder / ("shared/text" if name == "shared" else f"data/{name}")
        place.mkdir(parents=True)
        for k in range(3):
            (place / f"{k}.txt").write_text(text * 20_000, encoding="utf-8")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return
    (folder / "data/parquet").mkdir()
    table = pyarrow.table({"body": ["a document of its own " * 200] * 200})
    parquet.write_table(table, folder / "data/parquet/0.parquet")


def outputs(text: str) -> list[str]:
    """Return the lines of a page's blocks of output: those without a command."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        if language in ("", "text") and not commands(f"```\n{block}```"):
            found += filter(None, map(str.strip, block.splitlines()))
    return found


def without_numbers(text: str) -> str:
    """Replace the parts that differ between runs: numbers, digests, units of time, and spaces."""
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "#", text)
    text = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?[kM]?", "#", text)
    text = re.sub(r"# ?(ms|s|min|h)\b", "# s", text)
    return " ".join(text.split())


def differing(page: str, printed: str) -> list[str]:
    """Return the lines of a page's outputs that the commands did not print. `...` is any text."""
    printed = without_numbers(printed)
    return [
        line
        for line in outputs(page)
        if not all(part.strip() in printed for part in without_numbers(line).split("..."))
    ]


def run(page: str, folder: pathlib.Path, *, show: bool = False) -> bool:
    """Run a page's commands in order; returns whether all succeeded, with the outputs it shows."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("M_")}
    environ["PATH"] = f"{sys.prefix}/bin:{environ['PATH']}"
    environ |= {"PYTHONPATH": str(folder), "M_JAX_CACHE_DIR": str(folder / "cache")}
    environ |= {"MAXDILOCO_VENV": sys.prefix}
    all_good, printed = True, ""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = commands(text)
    apart = [line for line in found if "enable_islands=true" in line]  # they run at once
    for command in found:
        how = mode(command)
        shown = command.splitlines()[0][:150] if "\n" not in command else "python example"
        if command.startswith("export "):
            if "JAX_" not in command:
                environ |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
            continue
        if how == "skipped" or (command in apart and command != apart[0]):
            print(f"{how if how == 'skipped' else 'with it':8}      {page}: {shown}", flush=True)
            continue
        extra = {"M_MAX_TARGET_LENGTH": "64", "M_PER_DEVICE_BATCH_SIZE": "1", "M_EVAL_STEPS": "1"}
        extra |= {} if "steps=" in command else {"M_STEPS": "4", "M_LOG_PERIOD": "2"}
        if "maxdiloco.plan " in command:  # arithmetic, which takes seconds at any size
            extra = {}
        line = adapted(command, how, folder)
        if command in apart:
            line = " & ".join(f"{{ {adapted(each, how, folder)}; }}" for each in apart)
            line += " & " + " && ".join(["wait -n"] * len(apart))
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environ | extra, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        printed += done.stdout.replace(f"{folder}/", "")
        good = done.returncode == 0
        all_good &= good
        took = f"{time.monotonic() - begun:4.0f} s"
        print(f"{how if good else 'FAILED':8}{took}  {page}: {shown}", flush=True)
        if show or not good:
            print(f"exit code {done.returncode}\n{done.stdout[-3000:]}", flush=True)
    if page.startswith("docs/tutorials/"):
        for line in differing(text, printed):
            all_good = False
            print(f"DIFFERS      {page}: {line}", flush=True)
    return all_good


def main(arguments: list[str]) -> int:
    """Run the named pages, or all."""
    pages = [name for name in arguments if name != "--show"]
    with tempfile.TemporaryDirectory(prefix="maxdiloco-pages-") as name:
        folder = pathlib.Path(name)
        copy(folder)
        results = [run(page, folder, show="--show" in arguments) for page in pages or PAGES]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
