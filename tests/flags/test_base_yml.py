"""base.yml documents every key, and the package reads each of them and no others."""

import ast
import re

import pytest
import yaml

from maxdiloco.data import corpus, kinds, packing, tokenizer
from maxdiloco.diloco import outer, quantize, schedule
from maxdiloco.engine.settings import TRANSPORTS
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, config, together
from maxdiloco.models import mlp, remat
from maxdiloco.models.config import LatentConfig, RouterConfig, from_keys
from maxdiloco.models.model import Model, count_parameters
from maxdiloco.models.rope import RopeConfig

PACKAGE = base_yml.PACKAGE
FOLDER = base_yml.config_folder()
KEYS = base_yml.declared()
MODELS = base_yml.model_names()
# Those that say which model it is, not what it is like.
CHOOSE_MODEL = {"model_name", "override_model_config"}


def test_every_key_has_a_meaning_a_source_and_limits():
    """Numbers have limits; what a wording admits is tested below. Other programs read the file."""
    loaded = yaml.safe_load((FOLDER / "base.yml").read_text())
    assert list(loaded) == list(KEYS)
    for name, key in KEYS.items():
        assert re.fullmatch(r"[A-Z].*\.", key.meaning), name
        assert re.fullmatch(r"\S.*\.", key.source), name
        assert re.fullmatch(r"\w+: .+", key.group), name
        assert len(key.meaning) <= 100, f"the help has one line for {name}"
        for part in (key, *key.entries.values()):
            assert checks.allows(part.allowed, part.default), part.name
            assert part.allowed or type(part.default) not in (int, float), part.name
        for entry in key.entries.values():
            other, values = entry.read_with
            assert re.fullmatch(r"[a-z0-9].*\.", entry.meaning), entry.name
            choices = checks.choices(key.entries[other].allowed) if other else values
            assert set(values) <= set(choices) and not entry.resume + entry.source, entry.name
    # Its comments on sizes are of its own model, tiny.
    tiny = config.load(["model_name=tiny", "enable_diloco=false"], {})
    assert [line.split(" ")[0] for line in config.describe_differences(tiny)] == [
        "model_name=tiny", "enable_diloco=false"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "allowed, inside, outside",
    [
        ("one of a, b", ["a", "b", ("a", "b"), ()], ["c", "", ("a", "c"), "a, b"]),
        ('one of "", a', ["", "a"], ["b", '""']),
        (">= 1", [1, 2, 1.0], [0, -1, 0.999]),
        ("> 0", [1, 0.001], [0, 0.0, -1]),
        ("-1 or >= 1", [-1, 1, 5], [0, -2]),
        ("0 to 1", [0, 0.5, 1, 1.0], [-0.001, 1.001]),
        ("0 to below 1", [0, 0.999], [1, 1.0, -0.1]),
        (">= 1e-05", [2e-05], [1e-06]),
        ("a multiple of 2", [4], [3]),
        ("", ["anything", -5, ()], []),
    ],
)
def test_limits_mean_what_they_say(allowed, inside, outside):
    assert all(checks.allows(allowed, value) for value in inside)
    assert not any(checks.allows(allowed, value) for value in outside)
    with pytest.raises(ValueError, match="about 5"):
        checks.allows("about 5", 5)


# What a row of together.yml may name beside what together.py works out; the last three with keys.
FACTS = """num_replicas num_tokens unused_rows platform num_devices num_parameters
    given usual name""".split()


@pytest.mark.parametrize("row", together.rows())
def test_a_row_of_together_yml_names_existing_keys_and_values(row):
    """One that does not would never count, or end in a traceback."""
    conditions, line = [*row.when.items(), *row.unless.items()], row.error + row.warning + row.note
    assert conditions and bool(row.use) != bool(line) and (row.keys or not row.use)
    named = {*row.keys, *dict(conditions), *re.findall(r"{(\w+)", line)}
    for name, wanted in conditions:
        if name in KEYS and KEYS[name].allowed.startswith("one of "):
            allowed = checks.choices(KEYS[name].allowed)
            assert any(re.fullmatch(base_yml.show(wanted), choice) for choice in allowed), name
        elif isinstance(wanted, str) and re.search(r"> |>= |below |multiple ", wanted):
            named |= set(re.findall("[a-z_]{6,}", wanted.replace("multiple", "")))
        if name == "vocab_size" and "below" in str(wanted):
            assert wanted.endswith(f" {tokenizer.ByteTokenizer().vocab_size}")
    assert named <= {*together.named_values(config.load([], {}), KEYS), *FACTS}


def test_what_base_yml_allows_and_says_is_what_the_code_knows():
    """The config imports nothing of it, so its copies are compared here."""
    for key, names in {
        "diloco_outer_optimizer": outer.OPTIMIZERS,
        "diloco_round_overlap": schedule.ROUND_OVERLAPS,
        "diloco_aggregation": outer.AGGREGATIONS,
        "diloco_exchange_dtype": quantize.NAMES,
        "diloco_transport": ("auto", *TRANSPORTS),
        "remat_policy": (remat.AUTO, *remat.POLICIES),
        "mlp_activations": mlp.ACTIVATIONS,
        "dataset_type": kinds.KINDS,
        "grain_packing_type": (packing.CONCATENATED, packing.BEST_FIT),
    }.items():
        assert sorted(checks.choices(KEYS[key].allowed)) == sorted(names), key
    tables = {"rope_scaling": RopeConfig, "router": RouterConfig, "latent_attention": LatentConfig}
    for key, kind in tables.items():
        known = {name: kind._field_defaults.get(name) for name in kind._fields}
        known.pop("max_timescale", None)  # a key of its own
        assert sorted(known) == sorted(KEYS[key].entries)
        for name, entry in KEYS[key].entries.items():
            assert entry.required or entry.default == known[name], entry.name
    assert all(suffix in KEYS["dataset_path"].meaning for suffix in corpus.SUFFIXES)


def test_configs_are_found_installed_and_in_a_checkout_and_are_valid(tmp_path):
    """Package data lies inside the package, a checkout's configs/ beside it."""
    installed = tmp_path / "site" / "maxdiloco"
    checkout = tmp_path / "repo" / "maxdiloco"
    for configs in (installed / "configs", checkout.parent / "configs"):
        configs.mkdir(parents=True)
        (configs / "base.yml").write_text("steps: 1\n")
    assert base_yml.config_folder(installed) == installed / "configs"
    assert base_yml.config_folder(checkout) == checkout.parent / "configs"
    with pytest.raises(ConfigError, match="^configs="):
        base_yml.config_folder(tmp_path / "elsewhere" / "maxdiloco")
    for path in FOLDER.glob("*.yml"):  # quickstart.yml and its like, which the scripts start
        assert isinstance(config.load([str(path)], {}), config.Config)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_sets_model_keys_and_states_its_parameters(name):
    """What a run is like stays with the user; a decoder's size is never left to base.yml, which is
    free to change."""
    group = KEYS["base_emb_dim"].group
    model_keys = {key.name for key in KEYS.values() if key.group == group} - CHOOSE_MODEL
    path = FOLDER / "models" / f"{name}.yml"
    given = {key for key, _, _ in base_yml.read_yml(path)}
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
from maxdiloco.flags import config
cfg = config.load(argv, environ)
jax.config.update("a", cfg.steps)
parts.model.config.head_dim
self.cfg.log_period + run.config.eval_steps
values["hardware"] + values[f"dcn_{axis}_parallelism"]
"""
    attributes, subscripts = reads(source)
    assert attributes == {"steps", "log_period", "eval_steps"}
    assert subscripts == {"hardware", "dcn_.+_parallelism"}
    names = ("checks.py", "together.py")
    checking = {PACKAGE / "flags" / name for name in names}
    of_models = set((PACKAGE / "models").rglob("*.py"))  # whose `config` is a ModelConfig
    others = set(PACKAGE.rglob("*.py")) - checking - of_models
    found = [reads(path.read_text()) for path in others]
    found += [reads(path.read_text(), ("cfg",)) for path in of_models]
    attributes, subscripts = (set().union(*each) for each in zip(*found, strict=True))
    by_name = set(tokenizer.KEYS)
    unread = [name for name in KEYS if name not in attributes | by_name]
    assert [n for n in unread if not any(re.fullmatch(one, n) for one in subscripts)] == []
    assert attributes - set(KEYS) == {"as_dict", "eval_paths", "get", "holds_out", "items", "sizes"}
