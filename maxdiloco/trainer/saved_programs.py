"""Where a program that was compiled before may be loaded: from JAX's compile cache, or a file."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from maxdiloco.flags.config import Config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble

LOSES_ORDER = (
    "a CPU loses the order of collectives in a saved program, and devices that share a replica "
    "would wait for each other forever"
)


def keep_their_order(cfg: Config, mesh: Mesh) -> bool:
    """Whether the devices of a mesh can run a saved program of the step.

    XLA:CPU orders the collectives of a program by one resource. When it loads a program, the body
    of each loop gets a resource of its own (jaxlib 0.10.2): a collective of the layers' loop and
    one outside then start in any order, on each device in another. Programs without a collective
    in a loop are sound: those of replicas that have a device each.
    """
    sharing = mesh.size // (mesh.shape["diloco"] if assemble.has_replicas(cfg) else 1)
    return mesh.devices.flat[0].platform != "cpu" or sharing == 1


def note(cfg: Config, mesh: Mesh) -> list[str]:
    """A line for the user whose jax_cache_dir is not used."""
    if not cfg.jax_cache_dir or keep_their_order(cfg, mesh):
        return []
    return [f"note: jax_cache_dir={cfg.jax_cache_dir} is not used: {LOSES_ORDER}."]


@contextmanager
def compile_cache(cfg: Config) -> Iterator[None]:
    """Programs compiled inside come from jax_cache_dir, where that is sound, and are kept there."""
    if not cfg.jax_cache_dir:
        yield
        return
    before = jax.config.values["jax_compilation_cache_dir"]
    use = keep_their_order(cfg, mesh_lib.build(cfg))
    jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir if use else None)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a folder
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
