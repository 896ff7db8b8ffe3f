"""The worked example of the library class does what it says."""

import importlib.util
import pathlib


def test_library_example_learns():
    """scripts/library_example.py: a user's own HSDP-sharded step; the loss falls every round."""
    path = pathlib.Path(__file__).parents[2] / "scripts" / "library_example.py"
    spec = importlib.util.spec_from_file_location("library_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main()
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
