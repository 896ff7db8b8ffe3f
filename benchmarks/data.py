"""Speed of preparing text and of reading it, beside Hugging Face datasets' map on the same file.

    PYTHONPATH=. python benchmarks/data.py [size_mb=500] [processes=0] [vocab_size=8000]
        [out=FOLDER]

Needs the extras data and text. Makes a file of JSON lines of words drawn at random, trains a
byte-level BPE on its first 5 MB, prepares it, opens and reads the shards in a random order, and
tokenises the same file with datasets.map. Each is a process of its own, whose peak memory, with
that of its children, is printed.
"""

import contextlib
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


class Options(NamedTuple):
    """What the command line says."""

    size_mb: int = 500
    processes: int = 0
    vocab_size: int = 8000
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
    for name in ("make", "prepare", "open", "read", "map"):
        found = _in_process(name, keys)
        keys |= found["facts"]
        seconds, tokens = found["seconds"], found["facts"].get("tokens", 0)
        rows.append(
            (
                name,
                f"{seconds:.2f}",
                f"{keys['bytes'] / 1e6 / seconds:.1f}" if name in ("prepare", "map") else "",
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
    steps = {"make": _make, "prepare": _prepare, "open": _open, "read": _read, "map": _map}
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
    size = sum(part[1] for part in found.manifest.parts)
    note = f"{int(found.lengths.sum()):,} tokens, {size / 1e6:.0f} MB on disk"
    return {"tokens": int(found.lengths.sum()), "seconds": seconds}, note


def _windows(keys):
    from maxdiloco.evaluation import run_texts, run_tokenizer
    from maxdiloco.flags import config

    keys = [
        *_arguments(keys)[1:3],
        "dataset_type=arrayrecord",
        f"dataset_path={keys['folder']}/shards",
        f"vocab_size={keys['vocab_size'] + 256}",
        f"max_target_length={LENGTH}",
    ]
    cfg = config.load(keys, {})
    return run_texts.open_dataset(cfg, run_tokenizer.open_tokenizer(cfg), split="train")


def _open(keys):
    begun = time.perf_counter()
    data = _windows(keys)
    return {"tokens": 0, "seconds": time.perf_counter() - begun}, f"{data.num_windows:,} windows"


def _read(keys):
    from maxdiloco.data import order, pipeline

    data = _windows(keys)
    steps = min(WINDOWS, data.num_windows) // 8
    position = order.first_position(1, 8)
    waited, begun = 0.0, time.perf_counter()
    with pipeline.batches(
        data, position, steps=range(1, steps + 1), replicas=[0], rows=range(8)
    ) as batches:
        for _ in range(steps):
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
    seconds = time.perf_counter() - begun
    return {"tokens": steps * 8 * LENGTH, "seconds": seconds}, _paced(data, position, steps)


def _paced(data, position, steps):
    """What a step that takes 8,192 tokens every 8.192 ms waits for its batch, of its time."""
    from maxdiloco.data import pipeline

    steps = min(steps, 400)
    waits = []
    with pipeline.batches(
        data, position, steps=range(1, steps + 1), replicas=[0], rows=range(8)
    ) as batches:
        for _ in range(steps):
            time.sleep(8 * LENGTH / 1e6)
            asked = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - asked)
    share = sum(waits[2:]) / ((steps - 2) * 8 * LENGTH / 1e6)
    return f"at 1M tokens/s a step waits {share:.1%} of its time"


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
