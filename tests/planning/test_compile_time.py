"""What train_compile logs of its duration before it compiles."""

import subprocess
import sys

from maxdiloco.config import config
from maxdiloco.planning import compile_time

# Ends at the first line: with exit code 3 if JAX is loaded by then, which takes seconds.
FIRST_LINE = """
import sys
from maxdiloco import train_compile

def first(line):
    print(line)
    sys.exit(3 if "jax" in sys.modules else 0)

train_compile.say_line = first
train_compile.main(["model_name=tiny", "compile_topology=v5e-4", "dataset_type=synthetic"])
"""


def test_the_first_line_has_an_estimate_before_jax_is_loaded():
    done = subprocess.run([sys.executable, "-c", FIRST_LINE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "about 2 min" in done.stdout or "about 120 s" in done.stdout


def test_an_exchange_in_the_step_is_one_more_program_with_the_step():
    keys = ["compile_topology=v5e-4", "enable_streaming_diloco=true", "num_diloco_fragments=2"]
    plain, overlapped = (
        config.load([*keys, f"num_communication_overlapping_steps={tau}"], {}) for tau in (0, 5)
    )
    step = compile_time.step_seconds(plain)
    assert compile_time.run_seconds(overlapped) == compile_time.run_seconds(plain) + step
