"""One replica of torchft's streaming DiLoCo on a host of a benchmark. Imports nothing of ours.

    VENV/bin/python torchft_process.py JSON

JSON: what `benchmarks.peer_torchft.job` describes. Runs with the python of the environment
that has torch and torchft. The model is that of maxdiloco.models: RMS norms, grouped-query
attention with rotary embedding and norms of queries and keys, a gated feed-forward, a tied
embedding. Each host has a store and a manager; host 0 also the lighthouse, in this process.

`trace` gets a line for each inner step, time.monotonic() at its beginning [s]. With `fast_ms` the
process sleeps for this time after each inner step, before torchft's own work. `report` gets, as
JSON, the number of parameters, the fragments' sizes and what the last period's exchanges did.
"""

import ctypes
import json
import math
import os
import signal
import sys
import time
import zlib
from datetime import timedelta

PR_SET_PDEATHSIG = 1  # prctl(2)
STORE_PORT = 7100
LIGHTHOUSE_PORT = 7200
LIMIT = timedelta(seconds=600)  # of every wait inside torchft: thin links are slow, not broken


def main() -> None:
    """Pin the process before torch counts its threads, then train."""
    job = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if job["cpu"] >= 0:
        os.sched_setaffinity(0, {job["cpu"]})
    run(job)


def decoder(spec: dict, *, tied: bool = True, qk_norm: bool = True, gated: bool = True):
    """The model. tied: the embedding is the head too; qk_norm: queries and keys are normalised.

    gated: a feed-forward with silu gates; else one with gelu. `ends` is what belongs to no layer,
    `layers` the rest.
    """
    import torch
    from torch import nn

    D, V, H = spec["base_emb_dim"], spec["vocab_size"], spec["head_dim"]
    pairs = torch.arange(0, H, 2) / H
    angles = torch.arange(spec["max_target_length"])[:, None] / 10_000**pairs
    layer = layer_class(spec, qk_norm, gated)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.ends = nn.ModuleDict({"embedding": nn.Embedding(V, D), "norm": nn.RMSNorm(D)})
            nn.init.normal_(self.ends["embedding"].weight, std=1 / math.sqrt(D))
            if not tied:
                self.ends["head"] = nn.Linear(D, V, bias=False)
            self.layers = nn.ModuleList(layer() for _ in range(spec["base_num_decoder_layers"]))
            self.register_buffer("sin", angles.sin(), persistent=False)
            self.register_buffer("cos", angles.cos(), persistent=False)

        def forward(self, tokens):
            x = self.ends["embedding"](tokens) * math.sqrt(D)
            for layer in self.layers:
                x = layer(x, self.sin, self.cos)
            x = self.ends["norm"](x)
            return x @ self.ends["embedding"].weight.T if tied else self.ends["head"](x)

    return Decoder()


def layer_class(spec: dict, qk_norm: bool, gated: bool):
    """A layer of `decoder`, as a class."""
    from torch import nn
    from torch.nn import functional

    D, F, H = spec["base_emb_dim"], spec["base_mlp_dim"], spec["head_dim"]
    N, K = spec["base_num_query_heads"], spec["base_num_kv_heads"]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
            self.query_norm, self.key_norm = (
                nn.RMSNorm(H) if qk_norm else nn.Identity() for _ in range(2)
            )
            self.query = nn.Linear(D, N * H, bias=False)
            self.key, self.value = (nn.Linear(D, K * H, bias=False) for _ in range(2))
            self.out = nn.Linear(N * H, D, bias=False)
            self.up = nn.Linear(D, F, bias=False)
            self.gate = nn.Linear(D, F, bias=False) if gated else None
            self.down = nn.Linear(F, D, bias=False)

        def forward(self, x, sin, cos):
            y = self.attention_norm(x)
            q, k, v = (
                product(y).unflatten(-1, (-1, H)).transpose(1, 2)
                for product in (self.query, self.key, self.value)
            )
            q, k = rotated(self.query_norm(q), sin, cos), rotated(self.key_norm(k), sin, cos)
            k, v = (part.repeat_interleave(N // K, dim=1) for part in (k, v))
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(context.transpose(1, 2).flatten(2))
            y = self.mlp_norm(x)
            if gated:
                return x + self.down(functional.silu(self.gate(y)) * self.up(y))
            return x + self.down(functional.gelu(self.up(y), approximate="tanh"))

    return Layer


def rotated(x, sin, cos):
    """Rotary embedding of halves."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def fragments_of(model, P: int) -> list:
    """Modules that hold the parameters, disjoint and in order: the ends, and P - 1 of layers."""
    from torch import nn

    return [model.ends, *(nn.ModuleList(model.layers[p :: P - 1]) for p in range(P - 1))]


def run(job: dict) -> None:
    """Train for job["steps"] inner steps, with or without exchanges, and write the report."""
    import torch

    if job["cpu"] >= 0:
        torch.set_num_threads(1)
    spec = job["spec"]
    torch.manual_seed(0)  # equal parameters at first, so that nothing has to be sent for it
    model = decoder(spec)
    fragments = fragments_of(model, spec["num_diloco_fragments"])
    inner = torch.optim.AdamW(
        model.parameters(), lr=4e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    before: list[int] = []  # checksums before torchft's own work, of the last period's steps
    last_period = False

    def after_inner_step(*_) -> None:
        if job["fast_ms"]:
            time.sleep(job["fast_ms"] / 1000)
        before[:] = map(checksum, fragments) if last_period else ()

    inner.register_step_post_hook(after_inner_step)  # the first, so it is called first
    store, lighthouse, manager = join(job)
    if job["exchange"]:
        enter_diloco(job, manager, fragments, inner)
    data = torch.Generator().manual_seed(1 + job["replica"])
    shape = (spec["per_device_batch_size"], spec["max_target_length"] + 1)
    barrier(store, job["replicas"], "begin")
    exchanged = []
    with open(job["trace"], "w", buffering=1, encoding="utf-8") as trace:
        for step in range(job["steps"]):
            last_period = step >= job["steps"] - spec["diloco_sync_period"]
            trace.write(f"{time.monotonic():.6f}\n")
            tokens = torch.randint(spec["vocab_size"], shape, generator=data)
            logits = model(tokens[:, :-1])
            targets = tokens[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
            inner.zero_grad()
            loss.backward()
            inner.step()
            pairs = zip(before, map(checksum, fragments), strict=True) if last_period else ()
            exchanged += [[p, x, y] for p, (x, y) in enumerate(pairs) if x != y]
    report = {
        "versions": versions(),
        "parameters": size(model),
        "fragment_bytes": [4 * size(fragment) for fragment in fragments],
        "commits": manager.current_step(),
        "participants": manager.num_participants(),
        "exchanged": exchanged,
        "loss": loss.item(),
    }
    with open(job["report"], "w", encoding="utf-8") as file:
        json.dump(report, file)
    barrier(store, job["replicas"], "end")
    leave(store, job)


def join(job: dict):
    """The meeting store of all hosts, the lighthouse (None elsewhere than on host 0), a manager.

    The manager and its store have the address of the host instead of its name.
    """
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    mine, first = job["addresses"][job["replica"]], job["addresses"][0]
    lighthouse = None
    if job["replica"] == 0:
        bind = f"{first}:{LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=job["replicas"])
    own = TCPStore(mine, STORE_PORT, is_master=True, wait_for_workers=False)
    store = own if job["replica"] == 0 else TCPStore(first, STORE_PORT, is_master=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=job["replicas"],
        load_state_dict=lambda _: None,
        state_dict=dict,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=mine,
        store_port=STORE_PORT,
        lighthouse_addr=f"http://{first}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica_{job['replica']}",
        hostname=mine,
        init_sync=False,
        max_retries=0,
    )
    return (store, own), lighthouse, manager


def enter_diloco(
    job: dict, manager, fragments, inner, *, lr: float = 0.7, momentum: float = 0.9
) -> None:
    """Let torchft exchange from the inner optimizer's hooks on, until the process ends.

    lr, momentum: of the outer optimizer.
    """
    import torch
    from torchft.local_sgd import DiLoCo

    outer = [
        torch.optim.SGD(fragment.parameters(), lr=lr, momentum=momentum, nesterov=True)
        for fragment in fragments
    ]
    DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=job["spec"]["diloco_sync_period"],
        fragment_sync_delay=job["spec"]["num_communication_overlapping_steps"],
        use_bucketization=job["bucketization"],
    ).__enter__()


def barrier(store, replicas: int, name: str) -> None:
    """Wait until every replica is here."""
    if store[0].add(name, 1) == replicas:
        store[0].set(f"{name} all", "")
    store[0].wait([f"{name} all"], LIMIT)


def leave(store, job: dict) -> None:
    """End the process, host 0's last: it holds the store. Threads of servers would wait on."""
    if job["replica"]:
        store[0].set(f"left {job['replica']}", "")
    else:
        store[0].wait([f"left {i}" for i in range(1, job["replicas"])], LIMIT)
    os._exit(0)


def checksum(fragment) -> int:
    """The values of a fragment's parameters, in order."""
    total = 0
    for parameter in fragment.parameters():
        total = zlib.crc32(parameter.detach().numpy().tobytes(), total)
    return total


def size(module) -> int:
    """Values of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def versions() -> dict[str, str]:
    """Of what is measured."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torchft", "torch")}


if __name__ == "__main__":
    main()
