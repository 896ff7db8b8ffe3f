"""Every compile, said as it happens."""

from collections.abc import Callable

import jax

from maxdiloco import tables


class Compiles:
    """Says every compile with the time it took; total: seconds of all of them.

    resident: what DiLoCo keeps beyond plain training, for the memory lines; set when known.
    """

    def __init__(self, say: Callable[[str], None], *, show_memory: bool):
        self._say = say
        self._show_memory = show_memory
        self._untaken = 0.0
        self.total = 0.0
        self._temporary: dict[str, int] = {}
        self.resident = ""

    def __call__(self, name: str, seconds: float, compiled: jax.stages.Compiled) -> None:
        """Take note of one compile, see parallel.program.Program."""
        self._untaken += seconds
        self.total += seconds
        self._say(f"compiled {name} in {seconds:.1f} s ({self.total:.1f} s in all)")
        if self._show_memory:
            self._say_memory(name, compiled)

    def _say_memory(self, name: str, compiled: jax.stages.Compiled) -> None:
        memory = compiled.memory_analysis()
        self._temporary[name] = memory.temp_size_in_bytes
        self._say(f"  {tables.memory_line(memory)}")
        plain = self._temporary.get("inner", 0)
        more = max(0, max(self._temporary.values()) - plain)
        if self.resident and "inner" in self._temporary:
            self._say(
                f"  beyond plain training [MiB a device]: {self.resident}, temporary "
                f"{more / 2**20:.1f}"
            )

    def take(self) -> float:
        """Seconds spent compiling since the last call."""
        seconds, self._untaken = self._untaken, 0.0
        return seconds
