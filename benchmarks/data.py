"""Speed of preparing and reading text, compared with Hugging Face datasets' map on the same file.

    PYTHONPATH=. python benchmarks/data.py [size_mb=500] [processes=0] [vocab_size=8000]
        [latency_ms=20] [out=FOLDER]

Needs the extras data and text, and buckets unless latency_ms=0. Makes a file of JSON lines of words
drawn at random, trains a byte-level BPE on its first 5 MB, prepares it, opens and reads the shards
in a random order, and tokenises the same file with datasets.map. Then it reads the shards from a
bucket: tests/fake_gcs.py, a server in a process of its own on this machine, which waits latency_ms
before each answer. Each row is a process of its own, whose peak memory is
printed, including its children.
"""

import contextlib
import glob
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

from maxdiloco.output import aligned

WORDS = 50_000  # distinct ones, of Zipf's frequencies: our choice
LENGTH = 1024  # tokens of a window that is read
WINDOWS = 20_000  # most that are read
ROWS = 8  # windows of a batch
PACED = 400  # steps that are read at a rate, at most; the first two do not count
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUCKET = "gs://fake-bucket"


class Options(NamedTuple):
    """The arguments of the command line."""

    size_mb: int = 500
    processes: int = 0
    vocab_size: int = 8000
    latency_ms: int = 20  # 0: no bucket
    out: str = ""


def main(argv: list[str]) -> int:
    """The benchmark, or with one JSON argument a step of it in a process of its own."""
    if argv and argv[0] == "step":
        print(json.dumps(_measured(argv[1], json.loads(argv[2]))))
        return 0
    given = dict(argument.split("=", 1) for argument in argv)
    options = Options(**{k: v if k == "out" else int(v) for k, v in given.items()})
    if options.out:
        os.makedirs(options.out, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out or None) as folder:
        return _run(options, folder)


def _run(options: Options, folder: str) -> int:
    keys = options._asdict() | {"folder": folder}
    rows = [("what", "seconds", "MB/s", "tokens/s", "peak MB", "of it")]
    names = ["make", "prepare", "open", "read", "map"]
    for name in names + (["bucket"] if options.latency_ms else []):
        found = _in_process(name, keys)
        keys |= found["facts"]
        seconds, tokens = found["seconds"], found["facts"].get("tokens", 0)
        rows.append(
            (
                name,
                f"{seconds:.2f}",
                f"{keys['bytes'] / 1e6 / seconds:.2f}" if name in ("prepare", "map") else "",
                f"{tokens / seconds:,.0f}" if tokens else "",
                f"{found['peak_mb']:.0f}",
                found["note"],
            )
        )
    print("\n".join(aligned(rows)))
    return 0


def _in_process(name: str, keys: dict) -> dict:
    line = [sys.executable, __file__, "step", name, json.dumps(keys)]
    cache = os.path.join(keys["folder"], "hf")
    environ = os.environ | {"HF_HOME": cache}
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(name: str, keys: dict) -> dict:
    begun = time.perf_counter()
    steps = {
        "make": _make,
        "prepare": _prepare,
        "open": _open,
        "read": _read,
        "map": _map,
        "bucket": _bucket,
    }
    facts, note = steps[name](keys)
    peak = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    seconds = facts.pop("seconds", time.perf_counter() - begun)
    return {"seconds": seconds, "facts": facts, "peak_mb": peak / 1e3, "note": note}


def _make(keys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(
        ["".join(draw.choice(letters, size)) for size in draw.integers(2, 11, WORDS)], object
    )
    chances = 1 / np.arange(1, WORDS + 1)
    limits = np.cumsum(chances / chances.sum())
    path, size, count = os.path.join(keys["folder"], "text.jsonl"), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while size < keys["size_mb"] * 1_000_000:
            places = np.searchsorted(limits, draw.random(int(draw.integers(20, 800))))
            text = " ".join(words[np.minimum(places, WORDS - 1)])
            size += file.write(json.dumps({"text": text}) + "\n")
            count += 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file.readlines(5_000_000)]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=keys["vocab_size"],
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(os.path.join(keys["folder"], "tokenizer.json"))
    return {"bytes": size, "path": path}, f"{count:,} documents"


def _arguments(keys):
    return [
        f"out={keys['folder']}/shards",
        "tokenizer_type=huggingface",
        f"tokenizer_path={keys['folder']}/tokenizer.json",
        f"processes={keys['processes']}",
    ]


def _prepare(keys):
    from maxdiloco import prepare
    from maxdiloco.data import shards

    begun = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        code = prepare.main([keys["path"], *_arguments(keys)])
    assert code == 0
    seconds = time.perf_counter() - begun
    found = shards.open_shards(os.path.join(keys["folder"], "shards"), "out")
    folder = os.scandir(os.path.join(keys["folder"], "shards"))
    size = sum(entry.stat().st_size for entry in folder)
    note = f"{int(found.lengths.sum()):,} tokens, {size / 1e6:.0f} MB on disk"
    return {"tokens": int(found.lengths.sum()), "seconds": seconds}, note


def _windows(keys, path=""):
    from maxdiloco.config import config
    from maxdiloco.run import data as run_data
    from maxdiloco.run import settings
    from maxdiloco.run import tokenizer as run_tokenizer

    keys = [
        *_arguments(keys)[1:3],
        f"dataset_path={path or os.path.join(keys['folder'], 'shards')}",
        f"vocab_size={keys['vocab_size'] + 256}",
        f"max_target_length={LENGTH}",
    ]
    cfg = config.load(keys, {})
    return run_data.open_dataset(
        settings.read_data(cfg), run_tokenizer.open_tokenizer(cfg), split="train"
    )


def _open(keys):
    begun = time.perf_counter()
    data = _windows(keys)
    return {"tokens": 0, "seconds": time.perf_counter() - begun}, f"{data.num_windows:,} windows"


def _read(keys):
    return _rate(_windows(keys), WINDOWS, rates=(1_000_000,))


def _rate(data, windows, rates):
    """Read windows as fast as possible, then at rates of tokens a second."""
    from maxdiloco.data import order, pipeline

    steps = min(windows, data.num_windows) // ROWS
    position = order.first_position(1, ROWS)
    mine = dict(replicas=[0], rows=range(ROWS))
    begun = time.perf_counter()
    with pipeline.batches(data, position, steps=range(1, steps + 1), **mine) as batches:
        for _ in batches:
            pass
    seconds = time.perf_counter() - begun
    waits = []
    for rate in rates:
        count, waited = min(steps, PACED), 0.0
        with pipeline.batches(data, position, steps=range(1, count + 1), **mine) as batches:
            for number in range(count):
                time.sleep(ROWS * LENGTH / rate)
                asked = time.perf_counter()
                next(batches)
                waited += (time.perf_counter() - asked) * (number >= 2)
        share = waited / ((count - 2) * ROWS * LENGTH / rate)
        waits.append(f"at {rate:,} tokens/s a step waits {share:.1%} of its time")
    return {"tokens": steps * ROWS * LENGTH, "seconds": seconds}, "; ".join(waits)


def _bucket(keys):
    with _server(keys["latency_ms"]):
        from maxdiloco.storage import store

        bucket, folder = store.connect("gs", BUCKET.partition("://")[2]), keys["folder"]
        for path in filter(os.path.isfile, glob.glob(f"{folder}/shards/**", recursive=True)):
            with open(path, "rb") as file:
                bucket.put(os.path.relpath(path, folder), file.read())
        data = _windows(keys, f"{BUCKET}/shards")
        found, note = _rate(data, WINDOWS // 10, rates=(100_000, 300_000))
    return found, f"{keys['latency_ms']} ms a request; {note}"


@contextlib.contextmanager
def _server(latency_ms):
    """A bucket in a process of its own, on the last core if there are several."""
    program = ["tests/fake_gcs.py", "--port", "0", "--latency", str(latency_ms / 1000)]
    environ = os.environ | {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, *program], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    *others, last = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(server.pid, {last})
        os.sched_setaffinity(0, others)
    try:
        for _ in range(3):
            key, _, value = server.stdout.readline().removeprefix("export ").strip().partition("=")
            os.environ[key] = value
        yield
    finally:
        server.kill()
        server.wait()


def _map(keys):
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(keys["folder"], "tokenizer.json"))
    datasets.disable_progress_bars()
    begun = time.perf_counter()
    data = datasets.load_dataset("json", data_files=keys["path"], split="train")
    mapped = data.map(
        lambda rows: {"ids": [each.ids for each in tokenizer.encode_batch_fast(rows["text"])]},
        batched=True,
        remove_columns=["text"],
        num_proc=keys["processes"] or len(os.sched_getaffinity(0)),
    )
    seconds = time.perf_counter() - begun
    tokens = sum(len(row) for row in mapped.with_format("numpy")[:1000]["ids"])
    tokens = int(tokens / min(1000, len(mapped)) * len(mapped))
    return {"tokens": tokens, "seconds": seconds}, "datasets.map, tokens estimated of 1,000 rows"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
