"""Devices and processes of a program: chosen, emulated and joined before JAX's backends start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel import processor
from maxdiloco.processes import distributed


@contextmanager
def joined(cfg: Any) -> Iterator[None]:
    """This process with its devices, beside the others of the job, for a `with`.

    cfg: a Config. Raises ConfigError for devices that are not there, LostPeerError.
    """
    mesh_lib.choose_platform(cfg)
    if mesh_lib.on_cpu_alone(cfg):
        processor.keep_freed_memory()
    with distributed.processes(
        os.environ,
        timeout_s=cfg.jax_distributed_initialization_timeout,
        peer_timeout_s=cfg.peer_timeout_seconds,
        peer_port=cfg.peer_port,
    ) as job:
        mesh_lib.emulate_devices(cfg, num_processes=job.num_processes)
        mesh_lib.visible_devices(cfg)  # those that are not there are refused before JAX is used
        yield
