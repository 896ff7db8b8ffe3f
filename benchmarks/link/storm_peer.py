"""A member of a storm that trains with gradientmail or torchft. Imports nothing of maxdiloco.

    PYTHON -I storm_peer.py JSON

JSON: the job that `benchmarks.storm_of_three` writes. PYTHON has torch and the peer.
torchft_process.py has the model. The optimizer is AdamW with the trainer's rates. Gradients are
clipped to a norm of 1.

`trace` gets time.monotonic() at the beginning of each inner step. `events` gets JSON lines with the
time and these fields:

    loss                     the mean of the last steps
    round, fragment, tokens  gradientmail: a committed round
    commit, steps            torchft: an exchange, and this member's inner steps if fragment 0's
    line                     torchft: the commits of a state that was loaded
"""

import ctypes
import json
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

PR_SET_PDEATHSIG = 1  # prctl(2)
LOSS_STEPS = 10  # of a line with a loss, as log_period of the trainer's runs
# torchft's own train_diloco.py: gloo's operations and the transfer of a state; the manager.
OPERATION, MANAGER = timedelta(seconds=10), timedelta(seconds=30)
QUORUM_RETRIES = 5  # so that a lighthouse that is away ends no member; its manager.py advises some


def main() -> None:
    """Train until the process is ended."""
    job = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.append(str(pathlib.Path(__file__).parent))
    logging.basicConfig(level=logging.INFO)
    training = Training(job)
    if job["system"] == "gradientmail":
        run_gradientmail(job, training)
    else:
        run_torchft(job, training)


class Training:
    """A model, its inner optimizer and its data, and the files with its steps and losses."""

    def __init__(self, job: dict):
        import numpy as np
        import torch
        from torchft_process import decoder, size

        torch.set_num_threads(1)
        torch.manual_seed(0)  # equal parameters at first, so that nothing has to be sent for it
        self.model = decoder(job["spec"], **job["decoder"])
        print(f"{size(self.model)} parameters", flush=True)
        self.inner = torch.optim.AdamW(self.model.parameters(), **job["adamw"])
        self._windows = np.load(job["data"], mmap_mode="r")
        self._rng = np.random.default_rng([job["member"], time.time_ns()])
        self._batch, self._sleep_s = job["spec"]["per_device_batch_size"], job["sleep_ms"] / 1000
        self._trace = open(job["trace"], "w", buffering=1, encoding="utf-8")
        self._events = open(job["events"], "w", buffering=1, encoding="utf-8")
        self._lock, self._losses = threading.Lock(), []

    def step(self) -> int:
        """Take an inner step, and return its tokens. The peer's hooks run after the sleep."""
        import torch

        self._trace.write(f"{time.monotonic():.6f}\n")
        rows = self._rng.integers(len(self._windows), size=self._batch)
        tokens = torch.from_numpy(self._windows[rows].astype("int64"))
        logits, targets = self.model(tokens[:, :-1]), tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        self.inner.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._losses.append(loss.item())
        if len(self._losses) == LOSS_STEPS:
            self.event({"loss": sum(self._losses) / LOSS_STEPS})
            self._losses.clear()
        time.sleep(self._sleep_s)
        self.inner.step()
        return targets.numel()

    def event(self, fields: dict) -> None:
        """Write a line of `events`, from any thread."""
        line = json.dumps({"time": time.monotonic(), **fields}) + "\n"
        with self._lock:
            self._events.write(line)


# -- gradientmail ---------------------------------------------------------------------------------


def run_gradientmail(job: dict, training: Training) -> None:
    """Train until SIGTERM, then wait for the rounds in flight.

    Deltas and updates have 4 bits, and the outer state 16. Steps during an exchange are kept.
    """
    import gradientmail as gm

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def report(event) -> None:
        match event:
            case gm.events.RoundRecorded(record=record):
                tokens = sum(one.tokens for one in record.participants)
                fields = {"round": record.round, "fragment": record.fragment, "tokens": tokens}
                training.event(fields)

    session = gm.Session(
        training.model,
        algorithm=gm.DiLoCo(
            sync_every=job["spec"]["diloco_sync_period"],
            fragments=job["spec"]["num_diloco_fragments"],
            alignment=gm.Carry(),
            outer_lr=job["outer"]["lr"],
            outer_momentum=job["outer"]["momentum"],
            delta_dtype="F4",
            commit_dtype="F4",
            momentum_dtype="BF16",
            residual_dtype="BF16",
        ),
        mailbox=gm.S3Mailbox(job["bucket"], "run", endpoint_url=job["server"]),
        node_id=job["name"],
        compression="zstd",
        lease_every=job["dead_s"] / 4,
        lease_timeout=job["dead_s"],
        callbacks=(gm.log_events, report),
    )
    session.run(lambda _: training.step(), iter(stop.is_set, True))


# -- torchft --------------------------------------------------------------------------------------


class Commits:
    """Inner steps since fragment 0's last commit, and the commits that the state comes from."""

    def __init__(self, training: Training):
        self._event = training.event
        self.line: list[list[int]] = []
        self.steps = self.sent = 0  # since the last commit; in the running exchange

    def load(self, line: list[list[int]]) -> None:
        """Another state was loaded: the member's own steps are not in it."""
        self.line[:], self.steps = line, 0
        self._event({"line": line})

    def exchanged(self, commit: list[int], committed: bool, fragment: int) -> None:
        """An exchange is over. If it failed torchft resets the fragment: its steps are lost."""
        counted = self.sent if fragment == 0 and committed else 0
        if fragment == 0:
            self.steps -= self.sent if committed else self.steps
        if committed:
            self.line.append(commit)
            self._event({"commit": commit, "steps": counted})


def run_torchft(job: dict, training: Training) -> None:
    """Train until the process is ended."""
    from torch.distributed import TCPStore
    from torchft_process import enter_diloco, fragments_of

    # Peers fetch the state from the address of the host's name, which all hosts share here.
    socket.gethostname = lambda: job["address"]
    commits, P = Commits(training), job["spec"]["num_diloco_fragments"]
    store = TCPStore(job["address"], 0, is_master=True, wait_for_workers=False)
    manager = join(job, store.port, commits, training)

    def count_step(*_) -> None:
        commits.steps += 1

    training.inner.register_step_pre_hook(count_step)
    enter_diloco(job, manager, fragments_of(training.model, P), training.inner, **job["outer"])
    load(job["checkpoint"], manager)
    step = 0
    while True:
        training.step()
        step += 1
        if step % job["checkpoint_period"] == 0:
            save(job["checkpoint"], manager)


def counting_manager(commits: Commits, P: int) -> type:
    """Return torchft's manager, which counts its commits. P: fragments."""
    from torchft.manager import Manager

    class Counting(Manager):
        def start_quorum(self, *args, **options):
            super().start_quorum(*args, **options)  # fetches the state from a peer, if need be
            commits.sent = commits.steps

        def should_commit(self, *args, **options):
            step = self.current_step()
            committed = super().should_commit(*args, **options)
            commits.exchanged([self._quorum_id, step], committed, step % P)
            return committed

    return Counting


def join(job: dict, store_port: int, commits: Commits, training: Training):
    """Return the manager. store_port: of this member's own store."""
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.process_group import ProcessGroupGloo

    model, inner = training.model, training.inner

    def state() -> dict:
        own = {"model": model.state_dict(), "inner_optim": inner.state_dict()}
        return own | {"line": list(commits.line)}

    def load_state(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner_optim"])
        commits.load(state["line"])

    return counting_manager(commits, job["spec"]["num_diloco_fragments"])(
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
        lighthouse_addr=job["server"],
        replica_id=job["name"],
        hostname=job["address"],
        checkpoint_transport=HTTPTransport(timeout=OPERATION, num_chunks=0),
        init_sync=False,
        quorum_retries=QUORUM_RETRIES,
    )


def save(path: str, manager) -> None:
    """Save the state that a joiner would get."""
    import torch

    torch.save(manager._manager_state_dict(), f"{path}.new")
    os.replace(f"{path}.new", path)


def load(path: str, manager) -> None:
    """Load the saved state, if there is one."""
    import torch

    if os.path.exists(path):
        saved = torch.load(path, weights_only=False)
        for key, load_own in manager._load_state_dict_fns.items():
            load_own(saved["user"][key])
        manager.load_state_dict(saved["torchft"])


if __name__ == "__main__":
    main()
