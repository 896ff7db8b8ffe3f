"""Runs without a training: folders with their files, and what the report would read of them."""

import json
import math
import re

import numpy as np
from etils import epath

from maxdiloco.report import run_data

ROWS = 100

CONFIG = {
    "run_name": "a",
    "diloco_sync_period": 20,
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 4,
    "num_communication_overlapping_steps": 3,
    "steps": 100,
}


def row(t, replicas):
    """The metrics of step t of a DiLoCo run; no training, only shapes that look like one."""
    loss = 2 + 6 * math.exp(-t / 300)
    found = {"step": t, "learning/loss": loss, "learning/lr": 1e-3, "learning/grad_norm": 0.5}
    if replicas > 1:
        found |= {f"learning/loss_replica_{m}": loss + 0.02 * m for m in range(replicas)}
    for name in ("outer_grad_norm", "outer_grad_cosine", "outer_update_ratio", "drift"):
        found[f"diloco/{name}"] = 0.4
    found |= {"perf/step_time": 0.8, "perf/tokens_per_second": 5e5, "perf/tflops_per_device": 80.0}
    found |= {"dcn/bytes_sent": 1.5e6, "learning/tokens": t * 4e5}
    return found | ({"eval/loss": loss, "eval/perplexity": 9.0} if t % 10 == 0 else {})


def write(folder, *, steps=100, config=CONFIG, history=()):
    """A run of `steps` steps in a folder; config: None for a run that does not say."""
    folder.mkdir(parents=True)
    append(folder / "metrics.jsonl", *(row(t, replicas=2) for t in range(1, steps + 1)))
    if config is not None:
        lines = [f"{name}: {value}\n" for name, value in config.items()]
        (folder / "config.yml").write_text("".join(lines))
    if history:
        append(folder / "history.jsonl", *history)
    return folder


def append(path, *rows):
    """Lines of JSON at the end of a file."""
    with open(path, "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def start(step, *, until=100, time=1.7e9, bytes_sent=()):
    facts = {"processes": 2, "devices": 8, "replicas": 2, "bytes_sent": list(bytes_sent)}
    return {"event": "start", "time": time, "step": step, "until": until, **facts}


def end(why="", *, time=1.7e9 + 60):
    return {"event": "end", "time": time, "why": why}


def checkpoint(folder, step):
    """A folder that looks like a complete checkpoint from its names."""
    path = folder / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (path / "seal.json").write_text("{}")
    return path


# {key: value} of base.yml; a run's config has no -1.
DEFAULTS = run_data.default_config()
DEFAULTS["diloco_outer_lr"] = 0.7


def run_of(*, name="a", columns=None, history=(), rows=ROWS, **keys):
    steps = np.arange(1, rows + 1)
    columns = {"learning/loss": 10.0 / steps} if columns is None else columns
    folder = epath.Path("/runs") / name
    return run_data.RunData(name, folder, steps, columns, DEFAULTS | keys, list(history), {}, [])


def evaluated(name, theta, *, tokens=10.0, sent=1e6, step_s=2.0, **keys):
    """A row each step, of so many tokens, bytes and seconds, with theta's loss, which moves from
    the first step on unless keys have another period."""
    steps = np.arange(1, ROWS + 1)
    columns = {"learning/loss": 10.0 / steps, "eval/loss": np.array(theta)}
    columns |= {"learning/tokens": tokens * steps, "dcn/bytes_sent": np.full(ROWS, sent)}
    columns |= {"perf/wall_time_s": step_s * steps}
    return run_of(name=name, columns=columns, **{"diloco_sync_period": 1} | keys)


def panels(page):
    """The panels of a page by title, as its script reads them."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    found = json.loads(text)["panels"]
    by_title = {panel["title"]: panel for panel in found}
    assert len(by_title) == len(found)
    return by_title


def long_run(replicas):
    """100,000 rows as noisy as they come: nothing repeats, so nothing is short."""
    noise = np.random.default_rng(0)
    names = ["learning/loss", *(f"learning/loss_replica_{m}" for m in range(replicas))]
    names += ["learning/lr", "learning/grad_norm", "diloco/drift", "perf/step_time"]
    columns = {name: noise.standard_normal(100_000) for name in names}
    columns["eval/loss"] = np.where(np.arange(100_000) % 1000 == 999, 1.0, np.nan)
    return run_of(columns=columns, rows=100_000)
