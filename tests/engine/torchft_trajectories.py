"""Write the trajectories of torchft's DiLoCo that test_torchft.py compares with ours.

    pip install torchft==0.2.0 torch==2.13.0
    python torchft_trajectories.py torchft_trajectories.json

Run it in an environment of its own: torchft and torch are not dependencies. Two replicas with
different gradients train two fragments of one value each.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

SYNC_PERIOD, STEPS, INNER_LR = 6, 24, 0.1
# The settings of torchft's own regression test: tau, and alpha.
CASES = [(tau, alpha) for tau in (0, 1) for alpha in (0.0, 0.5, 1.0)]
START = [1.0, -0.5]  # of the fragments
# Inner step of replica r: x <- x - INNER_LR * (x - TARGETS[r]).
TARGETS = [[3.0, 0.25], [-1.0, 2.0]]


def float32(tensor):
    """Return the one value of a tensor with the digits that identify a float32."""
    return float(f"{tensor.item():.9g}")


def replica(number, lighthouse, ready, tau, alpha):
    """Train one replica: (its parameters [STEPS, F], the outer parameters [STEPS, F])."""
    from torch import distributed, nn, optim
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    layers = [nn.Linear(1, 1, bias=False) for _ in START]
    for layer, value in zip(layers, START, strict=True):
        nn.init.constant_(layer.weight, value)
    inner = optim.SGD([layer.weight for layer in layers], lr=INNER_LR)
    outer = [optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in layers]
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=len(TARGETS),
        use_async_quorum=False,
        load_state_dict=None,
        state_dict=None,
        replica_id=str(number),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        init_sync=False,
    )
    params, theta = [], []
    with DiLoCo(
        manager,
        layers,
        inner,
        outer,
        sync_every=SYNC_PERIOD,
        fragment_sync_delay=tau,
        fragment_update_alpha=alpha,
    ) as diloco:
        ready.wait()
        for _ in range(STEPS):
            for layer, target in zip(layers, TARGETS[number], strict=True):
                layer.weight.grad = layer.weight.detach() - target
            inner.step()
            params.append([float32(layer.weight) for layer in layers])
            theta.append([float32(f.original_parameters["weight"]) for f in diloco._fragments])
    manager.shutdown(wait=False)
    return params, theta


def trajectory(tau, alpha):
    """Run both replicas in threads, as torchft's tests do."""
    from torchft.coordination import LighthouseServer

    lighthouse, ready = LighthouseServer("[::]:0", min_replicas=2), threading.Barrier(2)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(replica, r, lighthouse.address(), ready, tau, alpha) for r in (0, 1)]
        (params_0, theta), (params_1, theta_1) = (run.result() for run in runs)
    lighthouse.shutdown()
    assert theta == theta_1
    params = [list(step) for step in zip(params_0, params_1, strict=True)]
    return {"tau": tau, "alpha": alpha, "params": params, "outer": theta}


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        cases = [json.dumps(trajectory(*case)) for case in CASES]
        file.write("[\n" + ",\n".join(cases) + "\n]\n")
