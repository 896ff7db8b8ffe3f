"""base.yml and the schema equal the declared keys, and the package reads each key and no others."""

import ast
import importlib.util
import json
import re

import jsonschema
import pytest
import yaml
from run import ROOT, output_of

from maxdiloco import train as train_program
from maxdiloco.config import config, files
from maxdiloco.config.fields import Hosts, Resume
from maxdiloco.config.keys import KEYS
from maxdiloco.data import corpus, packing, registry, tokenizer
from maxdiloco.diloco import combinations, outer, quantize, schedule
from maxdiloco.engine.settings import TRANSPORTS
from maxdiloco.errors import ConfigError
from maxdiloco.models import mlp, remat
from maxdiloco.models.config import LatentConfig, RouterConfig, from_keys
from maxdiloco.models.model import Model, count_parameters
from maxdiloco.models.rope import RopeConfig

FOLDER = files.config_folder()
MODELS = files.model_names()
# Those that say which model it is, not what it is like.
CHOOSE_MODEL = {"model_name", "override_model_config"}


def writer():
    """scripts/write_base_yml.py as a module."""
    path = ROOT / "scripts" / "write_base_yml.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_base_yml_and_the_schema_are_those_of_the_declared_keys():
    """scripts/write_base_yml.py writes both; other programs read base.yml with the same values."""
    assert (FOLDER / "base.yml").read_text(encoding="utf-8") == writer().text()
    printed = output_of(train_program.main, "--schema")
    assert (FOLDER / "schema.json").read_text(encoding="utf-8") == printed
    header = (FOLDER / "base.yml").read_text(encoding="utf-8").splitlines()[0]
    assert (FOLDER / header.partition("$schema=")[2]).is_file()
    loaded = yaml.load((FOLDER / "base.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    assert list(loaded) == list(KEYS)
    assert config.load([str(FOLDER / "base.yml")], {}) == config.load([], {})


def test_the_schema_accepts_what_a_yml_file_may_hold_and_no_other_key():
    schema = json.loads((FOLDER / "schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    shipped = [*FOLDER.glob("*.yml"), *FOLDER.glob("*/*.yml")]
    assert len(shipped) > 30
    for path in shipped:
        # YAML 1.2, as editors read it: 3e-3 is a number.
        text = re.sub(r"(?m)^(\w+: \d+)(e-?\d+)$", r"\1.0\2", path.read_text())
        assert [error.message for error in check.iter_errors(yaml.safe_load(text))] == [], path
    for wrong in (
        {"stepz": 1},
        {"steps": "many"},
        {"steps": 0},
        {"adam_b2": 1.0},
        {"hardware": "gpus"},
        {"router": {"groups": 2}},
        {"rope_scaling": {"factor": 8}},
        {"dataset_mixture": [{"path": "/a"}]},
    ):
        assert not check.is_valid(wrong), wrong
    assert check.is_valid({"dataset_mixture": [{"path": "/a", "name": "a", "weight": 0.7}]})


def test_every_key_has_a_sentence_and_every_number_has_limits():
    tagged = [key for key in KEYS.values() if key.start_here]
    assert 15 <= len(tagged) <= 25
    for name, key in KEYS.items():
        parts = [key, *key.entries.values()]
        for part in parts:
            assert re.fullmatch(r"(?s)[A-Z].*\.", part.description), part.name
            assert len(part.description) <= 190, part.name
            number = type(part.default) in (int, float)
            assert part.expected(brief=True) or not number, part.name
        assert config.check({name: key.default}) == config.load([], {}), name
        assert key.title, name
    assert {key.resume for key in KEYS.values()} == set(Resume)
    assert {key.hosts for key in KEYS.values()} == set(Hosts)
    # The sizes are those of the model tiny.
    tiny = config.load(["model_name=tiny", "enable_diloco=false"], {})
    assert [line.split(" ")[0] for line in config.describe_differences(tiny)] == [
        "model_name=tiny", "enable_diloco=false"
    ]  # fmt: skip


def test_the_choices_are_those_that_the_code_knows():
    """The config imports nothing of it, so its copies are compared here."""
    for key, names in {
        "diloco_outer_optimizer": outer.OPTIMIZERS,
        "diloco_round_overlap": schedule.ROUND_OVERLAPS,
        "diloco_aggregation": outer.AGGREGATIONS,
        "diloco_exchange_dtype": quantize.NAMES,
        "diloco_transport": ("auto", *TRANSPORTS),
        "diloco_collective": ("auto", *schedule.COLLECTIVES),
        "remat_policy": (remat.AUTO, *remat.POLICIES),
        "mlp_activations": mlp.ACTIVATIONS,
        "dataset_type": registry.DATASET_TYPES,
        "grain_packing_type": (packing.CONCATENATED, packing.BEST_FIT),
    }.items():
        assert sorted(KEYS[key].choices) == sorted(names), key
    lossless = [name for name in quantize.NAMES if quantize.wire_format(name).error == 0]
    assert lossless == [combinations.LOSSLESS]
    assert combinations.RADIAL in outer.AGGREGATIONS
    tables = {"rope_scaling": RopeConfig, "router": RouterConfig, "latent_attention": LatentConfig}
    for key, kind in tables.items():
        known = {name: kind._field_defaults.get(name) for name in kind._fields}
        known.pop("max_timescale", None)  # a key of its own
        assert sorted(known) == sorted(KEYS[key].entries)
        for name, entry in KEYS[key].entries.items():
            assert entry.default in (None, "auto", known[name]), entry.name
    assert all(suffix in KEYS["dataset_path"].description for suffix in corpus.SUFFIXES)


def test_configs_are_found_installed_and_in_a_checkout_and_are_valid(tmp_path):
    """Package data lies inside the package, a checkout's configs/ beside it."""
    installed = tmp_path / "site" / "maxdiloco"
    checkout = tmp_path / "repo" / "maxdiloco"
    for configs in (installed / "configs", checkout.parent / "configs"):
        configs.mkdir(parents=True)
        (configs / "base.yml").write_text("steps: 1\n")
    assert files.config_folder(installed) == installed / "configs"
    assert files.config_folder(checkout) == checkout.parent / "configs"
    with pytest.raises(ConfigError, match="^configs="):
        files.config_folder(tmp_path / "elsewhere" / "maxdiloco")
    for path in FOLDER.glob("*.yml"):  # quickstart.yml and its like, which the scripts start
        assert isinstance(config.load([str(path)], {}), config.Config)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_sets_model_keys_and_states_its_parameters(name):
    """What a run is like stays with the user; a decoder's size is never left to base.yml, which is
    free to change."""
    model_keys = {key.name for key in KEYS.values() if key.group == "model"} - CHOOSE_MODEL
    path = FOLDER / "models" / f"{name}.yml"
    given = set(files.read_yml(path))
    assert given <= model_keys
    sizes = {key for key in model_keys if key.startswith("base_")}
    sizes -= set() if "num_experts" in given else {"base_moe_mlp_dim"}
    assert given >= sizes | {"head_dim", "vocab_size", "mlp_activations", "logits_via_embedding"}
    stated = re.search(r"# Parameters: ([\d,]+) =\n# ([^:]+):\n", path.read_text())
    cfg = config.load([f"model_name={name}"], {})
    count = count_parameters(Model(from_keys(cfg)))
    assert int(stated[1].replace(",", "")) == count
    assert eval(stated[2].replace("^", "**")) == count  # the equation beside it


def reads(source: str, configs: tuple[str, ...] = ("cfg", "config")) -> tuple[set[str], set[str]]:
    """Keys that a module reads from a config: as attributes, and as subscripts.

    A config is a name or an attribute in `configs`, unless `config` is a module, jax's own or a
    model's. A subscript may be an f-string; it comes back as a pattern.
    """
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name for node in imports for alias in node.names}
    attributes, subscripts = set(), set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = ast.unparse(node.value)
            is_other = owner in {"jax.config", *modules} or owner.endswith("model.config")
            if owner.split(".")[-1] in configs and not is_other:
                attributes.add(node.attr)
        at = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(at, ast.Constant | ast.JoinedStr):
            parts = at.values if isinstance(at, ast.JoinedStr) else [at]
            text = (re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in parts)
            subscripts.add("".join(text))
    return attributes, subscripts


def test_the_declared_keys_are_those_that_the_package_reads():
    """A key that is only checked is not yet used. Positive control: the scan sees every way."""
    source = """
import jax
from maxdiloco.config import config
cfg = config.load(argv, environ)
jax.config.update("a", cfg.steps)
parts.model.config.head_dim
self.cfg.log_period + run.config.eval_steps
values["hardware"] + values[f"dcn_{axis}_parallelism"]
"""
    attributes, subscripts = reads(source)
    assert attributes == {"steps", "log_period", "eval_steps"}
    assert subscripts == {"hardware", "dcn_.+_parallelism"}
    package = files.PACKAGE
    checking = {*(package / "config" / "groups").glob("*.py"), package / "run" / "warnings.py"}
    assert len(checking) > 5
    of_models = set((package / "models").rglob("*.py"))  # whose `config` is a ModelConfig
    others = set(package.rglob("*.py")) - checking - of_models
    found = [reads(path.read_text()) for path in others]
    found += [reads(path.read_text(), ("cfg",)) for path in of_models]
    attributes, subscripts = (set().union(*each) for each in zip(*found, strict=True))
    # run/settings.py copies keys into records of these names, under the names of the keys.
    records = (
        "network",
        "batch",
        "data",
        "optimizer",
        "evaluation",
        "checkpoint",
        "metrics",
        "settings",
    )
    of_run = [reads(path.read_text(), records)[0] for path in (package / "run").rglob("*.py")]
    of_run.append(reads((package / "models/build.py").read_text(), ("keys",))[0])
    by_name = set(tokenizer.KEYS).union(*of_run)
    unread = [name for name in KEYS if name not in attributes | by_name]
    assert [n for n in unread if not any(re.fullmatch(one, n) for one in subscripts)] == []
    assert attributes - set(KEYS) == {
        "as_dict", "check_keys", "eval_paths", "get", "holds_out", "items", "model_copy", "rules",
        "sizes",
    }  # fmt: skip
