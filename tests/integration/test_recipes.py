"""Every file of configs/recipes trains, and says where its values come from."""

import math
import re

import pytest
from run import ROOT, train
from tiers import corner

from maxdiloco.config import config, files
from maxdiloco.config.keys import KEYS
from maxdiloco.run import settings as run_settings

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yml"))
# What makes each the mode that its name says.
MODES = {
    "data_parallel": {"enable_diloco": False},
    "delayed": {"diloco_round_overlap": "delayed"},
    "diloco": {"enable_diloco": True, "diloco_round_overlap": "none"},
    "eager": {"diloco_round_overlap": "eager"},
    "many_replicas": {"opt_type": "muon", "diloco_sync_period": 10},
    "muon": {"opt_type": "muon"},
    "muon_int2": {"opt_type": "muon", "diloco_exchange_dtype": "int2"},
    "streaming": {
        "enable_streaming_diloco": True,
        "num_diloco_fragments": 3,
        "num_communication_overlapping_steps": 1,
    },
}
FOUR_BITS = {"diloco_exchange_dtype": "float4_e3m0"}
MODES |= {f"{name}_4bit": MODES[name] | FOUR_BITS for name in ("eager", "streaming")}
MODES["many_replicas"] |= FOUR_BITS


def loaded(name):
    cfg = config.load([f"configs/recipes/{name}.yml"], {})
    return run_settings.with_replicas(cfg, 2).as_dict()


def test_there_is_a_recipe_for_every_mode_which_is_what_its_name_says():
    """It names itself, sets no key of the model and comments every number."""
    assert {path.stem for path in RECIPES} == MODES.keys()
    keys = KEYS
    for path in RECIPES:
        found, wanted = loaded(path.stem), MODES[path.stem]
        assert {key: found[key] for key in wanted} == wanted
        given = [keys[name].group for name in files.read_yml(path)]
        assert given and keys["head_dim"].group not in given
        text = path.read_text(encoding="utf-8")
        assert f"configs/recipes/{path.name} " in text
        lines = text.splitlines()
        numbers = [i for i, line in enumerate(lines) if re.search(r": [0-9.]+$", line)]
        assert all(lines[i - 1].startswith("#") for i in numbers), path


def test_recipes_differ_in_the_mode_alone():
    """The exchange's numbers are DiLoCo's; delayed has a lower rate, Muon its own numbers."""
    found = {name: loaded(name) for name in MODES}
    numbers = ("diloco_sync_period", "diloco_outer_lr", "diloco_outer_momentum")
    for name in ("eager", "streaming"):
        assert all(found[name][key] == found["diloco"][key] for key in numbers), name
    assert found["delayed"]["diloco_outer_lr"] < found["diloco"]["diloco_outer_lr"]
    for name in ("eager", "streaming"):
        assert found[f"{name}_4bit"] == found[name] | FOUR_BITS


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", corner(MODES, ["streaming_4bit"]))
def test_a_recipe_trains(name, tmp_path):
    """Nine steps; rounds of four, so that each has exchanged twice, eager's first in vain."""
    keys = dict(steps=9, diloco_sync_period=4, enable_checkpointing="false")
    run = train(tmp_path / "a", f"configs/recipes/{name}.yml", **keys)
    assert run.code == 0
    last = run.rows[-1]
    assert last["step"] == 9 and math.isfinite(last["learning/loss"])
    assert ("diloco/outer_grad_norm" in last) == (name != "data_parallel")


def test_a_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    """As an installed package has it; a file of the same name in the working directory wins."""
    monkeypatch.chdir(tmp_path)
    assert config.load(["configs/recipes/eager.yml"], {}).diloco_round_overlap == "eager"
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    (tmp_path / "configs" / "recipes" / "eager.yml").write_text("steps: 5\n")
    cfg = config.load(["configs/recipes/eager.yml"], {})
    assert (cfg.steps, cfg.diloco_round_overlap) == (5, "none")
