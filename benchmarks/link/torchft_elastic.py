"""One replica group of torchft's streaming DiLoCo, whose peers come and go.

    VENV/bin/python -I torchft_elastic.py JSON

JSON: what `benchmarks.link.torchft_storm.Replicas` writes. Runs with the python of the environment
that has torch and torchft; imports of ours torchft_process.py alone, which has the model. It trains
until it is ended. What is chosen is that of torchft's own train_diloco.py: min_replica_size=1, a
synchronous quorum, gloo's operations and the transfer of a state 10 s, the manager's 30 s, a quorum
and a connection 60 s (the manager's defaults), model and inner optimizer in the state that a joiner
gets from a peer; torchft adds the fragments' global parameters and outer optimizers. As its
manager.py asks for: init_sync=False, for all begin with equal parameters, and a quorum is tried
again, so that a lighthouse that is away ends nobody. A state is saved from time to time and loaded
at a start, as torchtitan does: where no peer is left the run goes on from it.

`trace` gets a line for each inner step, as of torchft_process.py. `events` gets JSON lines that
`torchft_storm.committed` reads: {"line": ...}, the commits that the state comes from, where it was
loaded from a peer or a file; {"commit": ..., "steps": n} for each commit of this process, with the
inner steps that it has counted. A commit is [quorum, torchft's step].
"""

import ctypes
import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import time
from datetime import timedelta

PR_SET_PDEATHSIG = 1  # prctl(2)
OPERATION = timedelta(seconds=10)  # as the rest of these: see above
MANAGER = timedelta(seconds=30)
QUORUM_RETRIES = 5  # manager.py asks for some; our choice of the number


def main() -> None:
    """Train."""
    job = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Peers get the state from the address of the host's name, which is one for all hosts here.
    socket.gethostname = lambda: job["address"]
    sys.path.append(str(pathlib.Path(__file__).parent))
    run(job)


class Ledger:
    """Inner steps since fragment 0's last commit, and the commits that the state comes from."""

    def __init__(self, path: str):
        self.events = open(path, "w", buffering=1, encoding="utf-8")
        self.line: list[list[int]] = []
        self.steps = self.sent = 0  # since the last commit; of them in the exchange on its way

    def load(self, line: list[list[int]]) -> None:
        """The state is another one now: this process's own steps are not in it."""
        self.line[:], self.steps = line, 0
        self.events.write(json.dumps({"line": line}) + "\n")

    def outcome(self, commit: list[int], committed: bool, fragment: int) -> None:
        """An exchange is over. Where it failed torchft resets the fragment: its steps are lost."""
        counted = self.sent if fragment == 0 and committed else 0
        if fragment == 0:
            self.steps -= self.sent if committed else self.steps
        if committed:
            self.line.append(commit)
            self.events.write(json.dumps({"commit": commit, "steps": counted}) + "\n")


def counted_manager(ledger: Ledger, P: int) -> type:
    """torchft's manager, which tells the ledger. P: fragments."""
    from torchft.manager import Manager

    class Counted(Manager):
        def start_quorum(self, *args, **options):
            super().start_quorum(*args, **options)  # gets the state from a peer, if need be
            ledger.sent = ledger.steps

        def should_commit(self, *args, **options):
            step = self.current_step()
            committed = super().should_commit(*args, **options)
            ledger.outcome([self._quorum_id, step], committed, step % P)
            return committed

    return Counted


def run(job: dict) -> None:
    """Train until the process is ended."""
    import logging

    import torch
    from torch.distributed import TCPStore
    from torchft_process import decoder, enter_diloco, fragments_of, size

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal parameters at first
    spec, ledger = job["spec"], Ledger(job["events"])
    model = decoder(spec, **job["decoder"])
    print(f"{size(model)} parameters", flush=True)
    fragments = fragments_of(model, spec["num_diloco_fragments"])
    inner = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)
    store = TCPStore(job["address"], 0, is_master=True, wait_for_workers=False)
    manager = join(job, store.port, ledger, model, inner)
    enter_diloco(job, manager, fragments, inner)
    load(job["checkpoint"], manager)
    data = torch.Generator().manual_seed(1 + job["replica"])
    shape = (spec["per_device_batch_size"], spec["max_target_length"] + 1)
    with open(job["trace"], "w", buffering=1, encoding="utf-8") as trace:
        for t in itertools.count(1):
            trace.write(f"{time.monotonic():.6f}\n")
            tokens = torch.randint(spec["vocab_size"], shape, generator=data)
            logits = model(tokens[:, :-1])
            targets = tokens[:, 1:].flatten()
            inner.zero_grad()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()
            time.sleep(job["sleep_ms"] / 1000)
            ledger.steps += 1
            inner.step()  # and torchft's work
            if t % job["checkpoint_period"] == 0:
                save(job["checkpoint"], manager)


def join(job: dict, store_port: int, ledger: Ledger, model, inner):
    """The manager. store_port: of this group's store."""
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.process_group import ProcessGroupGloo

    def state() -> dict:
        own = {"model": model.state_dict(), "inner_optim": inner.state_dict()}
        return own | {"line": list(ledger.line)}

    def load_state(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner_optim"])
        ledger.load(state["line"])

    return counted_manager(ledger, job["spec"]["num_diloco_fragments"])(
        pg=ProcessGroupGloo(timeout=OPERATION),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=state,
        use_async_quorum=False,
        timeout=MANAGER,
        rank=0,
        world_size=1,
        store_addr=job["address"],
        store_port=store_port,
        lighthouse_addr=job["lighthouse"],
        replica_id=f"replica_{job['replica']}",
        hostname=job["address"],
        checkpoint_transport=HTTPTransport(timeout=OPERATION, num_chunks=0),
        init_sync=False,
        quorum_retries=QUORUM_RETRIES,
    )


def save(path: str, manager) -> None:
    """Save what a joiner would get."""
    import torch

    torch.save(manager._manager_state_dict(), f"{path}.new")
    os.replace(f"{path}.new", path)


def load(path: str, manager) -> None:
    """Load what was saved, if anything was."""
    import torch

    if os.path.exists(path):
        saved = torch.load(path, weights_only=False)
        for key, load_own in manager._load_state_dict_fns.items():
            load_own(saved["user"][key])
        manager.load_state_dict(saved["torchft"])


if __name__ == "__main__":
    main()
