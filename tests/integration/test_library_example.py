"""The worked example of the library class does what it says."""

import runpy

from run_tools import ROOT


def test_library_example_learns_and_goes_on_from_what_it_has_saved(tmp_path):
    """scripts/library_example.py: a user's own HSDP-sharded step; the loss falls every round. Three
    rounds and, from the saved state, a fourth are four rounds to the bit."""
    main = runpy.run_path(ROOT / "scripts" / "library_example.py")["main"]
    losses = main()
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    assert main(str(tmp_path / "saved"), steps=30) == losses[:3]
    assert main(str(tmp_path / "saved"), steps=40) == losses[3:]
