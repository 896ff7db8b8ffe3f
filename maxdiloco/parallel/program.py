"""A jitted function with a name, whose compilations are reported."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh


def throttle_cpu(mesh: Mesh, arrays: Any) -> None:
    """Wait for arrays on several emulated devices: a host that runs ahead deadlocks XLA:CPU."""
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)


def _abstract(args: Any) -> tuple:
    """Return the types that a program is compiled for, by value.

    jax 0.12 compares types by identity, and the results of a loaded executable have a layout of
    their own.
    """
    types = map(jax.typeof, jax.tree.leaves(args))
    return tuple((t.shape, t.dtype, t.weak_type, t.sharding, t.memory_space) for t in types)


class Program:
    """A function under jit, compiled once for each set of argument shapes.

    Arguments must keep the shardings of the first call.

    Attributes:
      name: for the log.
      compiled: the executables.
    """

    def __init__(
        self,
        name: str,
        fn: Callable,
        *,
        donate: Sequence[int] = (),
        compiler_options: dict[str, Any] | None = None,
        on_compile: Callable[[str, float, jax.stages.Compiled], None],
        **options: Any,
    ):
        """Compile nothing yet.

        Args:
          name: for the log.
          fn: the function.
          donate: indices of arguments whose memory the results may use.
          compiler_options: of XLA.
          on_compile: called with name, seconds and executable after each compilation.
          **options: of jax.jit.
        """
        self.name = name
        self.compiled: dict[tuple, jax.stages.Compiled] = {}
        self._compiler_options = compiler_options
        self._on_compile = on_compile
        options = options | dict(donate_argnums=tuple(donate), compiler_options=compiler_options)
        self._jitted = jax.jit(fn, **options)

    def out_shapes(self, *args: Any) -> Any:
        """Return shapes and dtypes of the results."""
        return jax.eval_shape(self._jitted, *args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Return the executable for such arguments (ShapeDtypeStructs); compile it if needed."""
        return self.lowered(*args)()

    def lowered(self, *args: Any) -> Callable[[], jax.stages.Compiled]:
        """Lower the function, which holds the GIL, and return a function that compiles it.

        The latter may be called in any thread.
        """
        key = _abstract(args)
        if key in self.compiled:
            return lambda: self.compiled[key]
        start = time.perf_counter()
        lowered = self._jitted.lower(*args)
        lowering = time.perf_counter() - start

        def compile_():
            start = time.perf_counter()
            compiled = self.compiled[key] = lowered.compile()
            self._on_compile(self.name, lowering + time.perf_counter() - start, compiled)
            return compiled

        return compile_

    def fingerprint(self, *args: Any) -> str:
        """Return a digest of the program for such arguments, by which equal programs are found."""
        text = self._jitted.lower(*args).as_text()
        whole = repr((text, _abstract(args), sorted((self._compiler_options or {}).items())))
        return hashlib.sha256(whole.encode()).hexdigest()

    def __call__(self, *args: Any) -> Any:
        """Run the executable; compile it first if needed."""
        return self.compile(*args)(*args)
