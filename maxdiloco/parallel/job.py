"""Devices and processes of a program: chosen, emulated and joined before JAX's backends start."""

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maxdiloco.flags import base_yml, shared_keys
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel import processor
from maxdiloco.processes import coordination, distributed
from maxdiloco.version import __version__

_COMPILE = ("jax", "jaxlib")  # which make the programs that exchange with each other


@contextmanager
def joined(cfg: Any) -> Iterator[None]:
    """This process with its devices, beside the others of the job, for a `with`.

    cfg: a Config. Raises ConfigError for keys or versions that differ between the processes and
    for devices that are not there, LostPeerError.
    """
    mesh_lib.choose_platform(cfg)
    set_up_cpu(cfg)
    with distributed.processes(
        os.environ,
        timeout_s=cfg.jax_distributed_initialization_timeout,
        peer_timeout_s=cfg.peer_timeout_seconds,
        peer_port=cfg.peer_port,
    ) as job:
        if job.num_processes > 1:
            coordination.require_equal(
                job,
                shared_keys.shared(cfg.as_dict(), keys=base_yml.declared()) | versions(),
                difference=shared_keys.difference,
                timeout_s=cfg.peer_timeout_seconds,
            )
        mesh_lib.emulate_devices(cfg, num_processes=job.num_processes)
        mesh_lib.visible_devices(cfg)  # those that are not there are refused before JAX is used
        yield


def versions() -> dict[str, str]:
    """What has to be installed alike for all processes."""
    installed = {f"version of {name}": importlib.metadata.version(name) for name in _COMPILE}
    return {"version of maxdiloco": __version__} | installed


def set_up_cpu(cfg: Any) -> None:
    """Memory and threads of XLA:CPU where JAX may use nothing else, before its backends start."""
    if not mesh_lib.on_cpu_alone(cfg):
        return
    in_caller = mesh_lib.on_one_cpu_device(cfg) and not distributed.launcher(
        os.environ, on_tpu=False
    )
    if in_caller:
        mesh_lib.run_in_caller()
    processor.keep_freed_memory(in_caller=in_caller)
