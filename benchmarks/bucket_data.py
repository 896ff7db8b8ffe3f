"""Data in a bucket whose requests take 20 ms, beside the same files on a disk, in turns.

    PYTHONPATH=. python benchmarks/bucket_data.py [latency_ms=20] [turns=2] [mb=64] [seconds=5]
        [key=value ...]

One bucket is tests/fake_gcs.py, a server in a process of its own on this machine, which waits so
long before each answer; of two or more cores it has one for itself in every row, as a store has.
Another is obstore's memory, where the caller waits. Text drawn at random is read as bytes from
where it is, and out of the shards that maxdiloco.prepare makes of it. First the pipeline alone:
tokens a second, and how long a step that takes a batch every so often waits for it. Then runs of
maxdiloco.train on the disk and on the server: tokens a second after the first logged step. Other
keys are the trainer's.
"""

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.link.command import choices, divided, guarded, help_text, number
from benchmarks.link.rows import ROOT
from benchmarks.replica_cost import measure
from maxdiloco.output import aligned

OWN = {
    "latency_ms": "20",
    "turns": "2",
    "mb": "64",
    "seconds": "5",  # that the pipeline alone is read at each rate
    "runs": "bytes of text;shards",  # of KINDS, with semicolons between; empty: the pipeline alone
    "out": "runs/bucket_data",
}
KINDS = ("bytes of text", "shards")
DEFAULTS = {
    "hardware": "cpu",
    "model_name": "peer25m",
    "max_target_length": "512",
    "per_device_batch_size": "4",
    "dtype": "bfloat16",
    "steps": "12",
    "log_period": "4",
}
FIXED = {"enable_checkpointing": "false", "enable_tensorboard": "false", "enable_diloco": "false"}
LEAST = 4  # batches that are read whatever the seconds; two do not count
LENGTH, ROWS = 1024, 8  # of the batches of the pipeline alone
RATES = (100_000, 1_000_000)  # tokens a second of a step that waits for it


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN | DEFAULTS))


def _main(argv: Sequence[str]) -> int:
    own, given = divided(argv, OWN)
    latency_ms, turns, mb = (number(name, own) for name in ("latency_ms", "turns", "mb"))
    seconds = number("seconds", own, float, least=0)
    kinds = choices("runs", own, KINDS, separator=";") if own["runs"] else []
    keys = DEFAULTS | given | FIXED
    out = pathlib.Path(own["out"]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder, _server(latency_ms):
        places = _places(pathlib.Path(folder), mb, latency_ms / 1000)
        waits = [name for rate in RATES for name in (f"waits at {rate:,}/s", "CPU a window")]
        rows = [("tokens", "place", "tokens/s", *waits)]
        for (kind, place), path in places.items():
            rows.append((kind, place, *_pipeline(path, seconds)))
        print("\n".join(aligned(rows)), flush=True)
        return _runs(kinds, places, keys, out, turns)


def _runs(kinds, places, keys: Mapping[str, str], out: pathlib.Path, turns: int) -> int:
    for kind in kinds:
        speeds: dict[str, list[float]] = {"disk": [], "bucket": []}
        for turn in range(turns):
            for place in list(speeds)[:: 1 if turn % 2 else -1]:
                case = keys | {"dataset_path": places[kind, place]}
                name = f"{kind}-{place}-{turn}-{os.getpid()}"
                speeds[place].append(measure(case, out, name))
                print(f"{kind}, {place}: {speeds[place][-1]:,.1f} tokens/s", flush=True)
        disk, bucket = map(statistics.median, speeds.values())
        print(f"a run on {kind}, bucket / disk: tokens/s {bucket / disk:.4f}", flush=True)
    return 0


@contextlib.contextmanager
def _server(latency_ms: int) -> Iterator[None]:
    """The bucket, and the variables that lead to it."""
    program = ["tests/fake_gcs.py", "--port", "0", "--latency", str(latency_ms / 1000)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, *program], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    *others, last = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(server.pid, {last})
        os.sched_setaffinity(0, others)  # and of the processes that this one starts
    try:
        for _ in range(3):
            key, _, value = server.stdout.readline().removeprefix("export ").strip().partition("=")
            os.environ[key] = value
        yield
    finally:
        os.sched_setaffinity(0, [*others, last])
        server.kill()
        server.wait()


def _in_memory(latency_s: float):
    """A bucket of obstore's memory whose requests take that long."""
    import obstore
    from obstore.store import MemoryStore

    from maxdiloco.storage import store

    def slow(function):
        def call(*arguments, **options):
            time.sleep(latency_s)
            return function(*arguments, **options)

        return call

    names = ("get", "put", "head", "list")
    api = types.SimpleNamespace(**{name: slow(vars(obstore)[name]) for name in names})
    return store.Bucket(MemoryStore(), api)


def _places(folder: pathlib.Path, mb: int, latency_s: float) -> dict[tuple[str, str], str]:
    """{(kind, place): path}, made and uploaded."""
    from maxdiloco import prepare
    from maxdiloco.storage import object_store, store

    text, shards = folder / "text", folder / "shards"
    text.mkdir()
    draw = np.random.default_rng(0)
    for part in range(20):
        letters = draw.choice(np.frombuffer(b"etaoin shrdlu\n", np.uint8), mb * 50_000)
        (text / f"{part:02}.txt").write_bytes(letters.tobytes())
    with contextlib.redirect_stdout(sys.stderr):
        assert prepare.main([str(text), f"out={shards}"]) == 0
    buckets = [store.connect("gs", "fake-bucket"), _in_memory(latency_s)]
    object_store.BucketPath._buckets["s3", "memory"] = buckets[1]
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        for bucket in buckets:
            bucket.put(str(path.relative_to(folder)), path.read_bytes())
    found = {}
    for kind, path in zip(KINDS, (text, shards), strict=True):
        found[kind, "disk"] = str(path)
        found[kind, "bucket"] = f"gs://fake-bucket/{path.name}"
        found[kind, "memory"] = f"s3://memory/{path.name}"
    return found


def _pipeline(path: str, seconds: float) -> Iterator[str]:
    """Tokens a second of the pipeline alone; what a step of a rate waits, of its time, and the CPU
    time of this process for a window.
    """
    from maxdiloco.data import order, pipeline
    from maxdiloco.evaluation import run_texts, run_tokenizer
    from maxdiloco.flags import config

    cfg = config.load([f"dataset_path={path}", f"max_target_length={LENGTH}"], {})
    data = run_texts.open_dataset(cfg, run_tokenizer.open_tokenizer(cfg), split="train")
    position = order.first_position(1, ROWS)
    tokens = ROWS * LENGTH
    for rate in (None, *RATES):
        waits, begun, used = [], time.perf_counter(), time.process_time()
        steps = range(1, 1_000_000)
        mine = dict(steps=steps, replicas=[0], rows=range(ROWS))
        with pipeline.batches(data, position, **mine) as batches:
            while len(waits) < LEAST or time.perf_counter() - begun < seconds:
                time.sleep(tokens / rate if rate else 0)
                asked = time.perf_counter()
                next(batches)
                waits.append(time.perf_counter() - asked)
        if rate is None:
            yield f"{len(waits) * tokens / (time.perf_counter() - begun):,.0f}"
        else:
            yield f"{statistics.mean(waits[2:]) * rate / tokens:.1%}"
            yield f"{(time.process_time() - used) / len(waits) / ROWS * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
