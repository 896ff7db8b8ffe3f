"""Peak memory of an import and of an export, beside the sizes of a model and of its largest tensor.

    PYTHONPATH=. python benchmarks/hf_memory.py [layers=8] [width=1024]

A model of random weights in Hugging Face's layout is imported, the import is exported, a run of one
step goes on from it, and the run is exported. Each command is a process of its own. A model of
almost nothing gives what a process takes without a model.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

VOCABULARY = 8192
STEP = (
    "hardware=cpu dcn_diloco_parallelism=1 steps=1 per_device_batch_size=1 max_target_length=16 "
    "remat_policy=none enable_tensorboard=false run_name=run dataset_type=synthetic"
)


class Sizes(NamedTuple):
    """Bytes of a model: of all tensors, of the largest, of the largest leaf of all layers."""

    whole: int
    tensor: int
    leaf: int


def model(folder: pathlib.Path, layers: int, width: int) -> Sizes:
    """Write a llama of float32 weights, tensor by tensor."""
    from maxdiloco.huggingface import safetensors_files

    hidden = 3 * width
    config = dict(
        model_type="llama", hidden_size=width, num_hidden_layers=layers, intermediate_size=hidden,
        num_attention_heads=width // 64, vocab_size=VOCABULARY, rms_norm_eps=1e-6,
    )  # fmt: skip
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)}
    shapes |= {"mlp.down_proj": (width, hidden)}
    shapes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    of_all = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(layers)
        for name, shape in shapes.items()
    }
    of_all |= {"model.embed_tokens.weight": (VOCABULARY, width), "model.norm.weight": (width,)}
    of_all |= {"lm_head.weight": (VOCABULARY, width)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    float32 = np.dtype(np.float32)
    written = {name: (shape, float32) for name, shape in of_all.items()}
    rng = np.random.default_rng(0)
    for name, values in safetensors_files.begin(folder, written, max_bytes=1 << 40).items():
        values()[:] = rng.standard_normal(of_all[name], dtype=float32)
    sizes = [4 * math.prod(shape) for shape in of_all.values()]
    return Sizes(sum(sizes), max(sizes), 4 * layers * math.prod(shapes["mlp.up_proj"]))


def peak(*command: str) -> int:
    """Peak bytes of a program of the package in a process of its own, which has to succeed."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, env=os.environ
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024


def peaks(folder: pathlib.Path, layers: int, width: int) -> tuple[Sizes, dict[str, int]]:
    """The sizes of a model and the peak of each command."""
    sizes = model(folder / "theirs", layers, width)
    ours, more = str(folder / "ours"), f"base_output_directory={folder}"
    found = {"import": peak("maxdiloco.hf", "import", str(folder / "theirs"), ours)}
    found["export of the import"] = peak("maxdiloco.hf", "export", ours, str(folder / "again"))
    peak("maxdiloco.train", f"{ours}/start.yml", *STEP.split(), more)
    found["export of a run"] = peak("maxdiloco.hf", "export", "run", str(folder / "of_run"), more)
    return sizes, found


def main(argv: Sequence[str]) -> int:
    """Print the sizes, and for each command its peak and what it is above a model of nothing."""
    options = dict(argument.split("=", 1) for argument in argv)
    layers, width = int(options.get("layers", 8)), int(options.get("width", 1024))
    found = []
    for size in ((1, 64), (layers, width)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(peaks(pathlib.Path(folder), *size))
    (_, empty), (sizes, full) = found
    print(", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes._asdict().items()))
    for name, size in full.items():
        print(f"{name}: {size / 1e6:.0f} MB, {(size - empty[name]) / 1e6:.0f} MB for the model")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
