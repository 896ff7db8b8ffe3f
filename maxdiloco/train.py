"""Train one language model over several slices: `python -m maxdiloco.train [file.yml] key=value`.

The flags are checked before JAX is imported; the run is in run/start.py.
"""

import gc
import os
from collections.abc import Sequence

from maxdiloco.command_line import guarded
from maxdiloco.metrics.start_time import StartClock
from maxdiloco.output import say

SCHEMA = "--schema"
EXAMPLES = (
    "",
    "configs/quickstart.yml run_name=a",
    "configs/recipes/streaming_4bit.yml dataset_path=/data/text",
    "hardware=cpu dcn_diloco_parallelism=2 steps=200",
    "runs/a/config.yml steps=2000",
)


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    clock = StartClock()
    # Imports and tracing make hundreds of thousands of permanent objects. Garbage collection over
    # them costs 5% of the start (benchmarks/results/step_time.md). It is enabled again after the
    # first step.
    gc.disable()
    try:
        # Imported here, since Ctrl-C is handled only after the call of end_with.
        from maxdiloco.config import config, help

        if words := help.help_words(argv):
            own = [f"  {SCHEMA}  print the JSON schema of yml files, for editors"]
            say(help.help_text("maxdiloco.train", words[1:], own=own, examples=EXAMPLES))
            return 0
        if SCHEMA in argv:
            say(help.schema_text())
            return 0
        notes: list[str] = []
        cfg = config.load(argv, os.environ, warn=notes.append)
        clock.lap("keys")
        from maxdiloco.run import tokenizer as run_tokenizer

        resolved = run_tokenizer.resolve_vocab_size(cfg)
        from maxdiloco.run.start import run

        clock.lap("imports")
        return run(resolved, clock, notes, unresolved=cfg)
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
