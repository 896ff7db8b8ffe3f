"""The worked example of the library class does what it says."""

import importlib.util
import pathlib

import pytest


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).parents[2] / "scripts" / "library_example.py"
    spec = importlib.util.spec_from_file_location("library_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_library_example_learns_and_goes_on_from_what_it_has_saved(example, tmp_path):
    """scripts/library_example.py: a user's own HSDP-sharded step; the loss falls every round. Three
    rounds and, from the saved state, a fourth are four rounds to the bit."""
    losses = example.main()
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    assert example.main(str(tmp_path / "saved"), steps=30) == losses[:3]
    assert example.main(str(tmp_path / "saved"), steps=40) == losses[3:]
