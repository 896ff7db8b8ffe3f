"""Run a compiled PyTorch loop that does a step on request. Imports nothing of ours.

    VENV/bin/python -I torch_process.py JSON

JSON: what benchmarks.peer_torch.torch_job describes. Runs with the python of an environment that
has torch. The model is that of link/torchft_process.py. bfloat16 by autocast over float32
parameters, scaled_dot_product_attention, a fused AdamW, gradients clipped at norm 1.

Prints a line of JSON when it is ready, after the first step, and one for every line it reads.
"""

import json
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

CLIP = 1.0
WARM_UP = 2


def model_module():
    """link/torchft_process.py, from its file: this script's folder is not searched."""
    path = Path(__file__).parents[1] / "link" / "torchft_process.py"
    loader = SourceFileLoader("torchft_process", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # torch.compile looks it up there
    loader.exec_module(module)
    return module


def main() -> None:
    """Make the model, compile, and answer."""
    began = time.time()
    job = json.loads(sys.argv[1])
    import torch
    from torch.nn import functional

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    torch.manual_seed(0)
    options = {name: job[name] for name in ("tied", "qk_norm", "gated")}
    model = model_module().decoder(job["spec"], **options).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=4e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, fused=True
    )
    half = job["dtype"] == "bfloat16"

    def loss_of(tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    compiled = torch.compile(loss_of) if job["compile"] else loss_of
    shape = (job["batch"], job["spec"]["max_target_length"] + 1)
    tokens = torch.randint(job["spec"]["vocab_size"], shape).to(device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        wait()
        return loss.item()

    losses = [step()]
    first_s = time.time() - began
    losses += [step() for _ in range(WARM_UP - 1)]
    answer(
        first_step_s=first_s,
        torch=torch.__version__,
        dtype=job["dtype"],
        threads=torch.get_num_threads(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        answer(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, loss=loss)


def answer(**figures) -> None:
    """A line of JSON."""
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
