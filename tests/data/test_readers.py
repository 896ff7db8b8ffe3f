"""Reader processes end with the trainer, and only with it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
WAIT_S = 120  # far above what a process takes to end

TRAINER = """
import multiprocessing, sys, types
from multiprocessing import resource_tracker
from maxdiloco.data import order, pipeline

cfg = types.SimpleNamespace(
    dataset_type="text", dataset_path=sys.argv[1], eval_dataset_path="", eval_fraction=0.05,
    text_column="text",
    max_corrupted_records=0,
    tokenizer_type="byte", packing=True, grain_packing_type="concat_then_split",
    enable_data_shuffling=True, data_shuffle_seed=0, max_target_length=4, vocab_size=257,
)
data = pipeline.open_dataset(cfg, split="train")
with pipeline.batches(
    data, order.first_position(1, 1), steps=range(1, 200), replicas=[0], rows=[0], worker_count=2
) as batches:
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()))
    print(resource_tracker._resource_tracker._pid, flush=True)
    for line in sys.stdin:
        print(next(batches)["tokens"].shape, flush=True)
"""


def lives(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def test_readers_outlive_ctrl_c_and_not_the_trainer(tmp_path):
    """Ctrl-C reaches the whole group of a terminal: a last step may still need them, and they
    would print tracebacks. kill -9 reaches the trainer alone."""
    (tmp_path / "text.txt").write_text("0123456789" * 100)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with trainer:
        readers = [int(pid) for pid in trainer.stdout.readline().split()]
        started = [*readers, int(trainer.stdout.readline())]
        assert len(readers) == 2
        for pid in readers:
            os.kill(pid, signal.SIGINT)
        for _ in range(20):  # more than are read ahead
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "(1, 4)\n"
        assert all(lives(pid) for pid in started)

        trainer.kill()
        trainer.wait()
        limit = time.monotonic() + WAIT_S
        while any(lives(pid) for pid in started) and time.monotonic() < limit:
            time.sleep(0.02)
        left = [pid for pid in started if lives(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []
        assert "Traceback" not in trainer.stderr.read()
