"""Devices and processes of a program: chosen, emulated and joined before JAX's backends start."""

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager

from maxdiloco.flags import base_yml, resume
from maxdiloco.flags.config import Config
from maxdiloco.flags.hardware import hardware_of
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.processes import coordination, distributed
from maxdiloco.version import __version__

_COMPILE = ("jax", "jaxlib")  # which make the programs that exchange with each other


@contextmanager
def joined(cfg: Config) -> Iterator[None]:
    """This process with its devices, beside the others of the job, for a `with`.

    Raises ConfigError for keys or versions that differ between the processes and for devices that
    are not there, LostPeerError.
    """
    asked = hardware_of(cfg)
    mesh_lib.choose_platform(asked)
    mesh_lib.set_up_cpu(asked)
    with distributed.processes(
        os.environ,
        timeout_s=cfg.jax_distributed_initialization_timeout,
        peer_timeout_s=cfg.peer_timeout_seconds,
        peer_port=cfg.peer_port,
    ) as job:
        if job.num_processes > 1:
            coordination.require_equal(
                job,
                resume.shared(cfg.as_dict(), keys=base_yml.declared()) | versions(),
                difference=resume.difference,
                timeout_s=cfg.peer_timeout_seconds,
            )
        mesh_lib.emulate_devices(asked, num_processes=job.num_processes)
        mesh_lib.visible_devices(asked)  # those that are not there are refused before JAX is used
        yield


def versions() -> dict[str, str]:
    """What has to be installed alike for all processes."""
    installed = {f"version of {name}": importlib.metadata.version(name) for name in _COMPILE}
    return {"version of maxdiloco": __version__} | installed
