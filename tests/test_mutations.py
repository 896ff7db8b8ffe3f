"""The mutations of mutate.py fit the package."""

import pathlib

import mutate
import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "maxdiloco"


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda m: m.wrong)
def test_every_mutation_applies_to_one_place(mutation):
    text = (PACKAGE / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
