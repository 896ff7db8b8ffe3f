"""base.yml documents every key, and the package reads each of them and no others."""

import ast
import re

import pytest
import yaml

from maxdiloco.data import corpus, packing, tokenizer
from maxdiloco.diloco import outer, quantize, schedule
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, config, tokenizer_checks
from maxdiloco.models import layers, remat

PACKAGE = base_yml.PACKAGE
FOLDER = base_yml.config_folder()
KEYS = base_yml.declared()
MODELS = base_yml.model_names(FOLDER)
# Those that say which model it is, not what it is like.
CHOOSE_MODEL = {"model_name", "override_model_config"}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_every_key_says_what_it_is_where_its_default_comes_from_and_what_is_allowed(key):
    """Numbers have limits; what a wording admits is tested below."""
    assert re.fullmatch(r"[A-Z].*\.", key.meaning), key.meaning
    assert re.fullmatch(r"\S.*\.", key.source), key.source
    assert re.fullmatch(r"\w+: .+", key.group), key.group
    assert len(key.meaning) <= 100, "the help has one line for it"
    assert checks.allows(key.allowed, key.default)
    assert key.allowed or type(key.default) not in (int, float)


def test_base_yml_is_plain_yml_with_the_same_keys():
    """An editor or another program reads the same file."""
    loaded = yaml.safe_load((FOLDER / "base.yml").read_text())
    assert list(loaded) == list(KEYS)


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
        ("", ["anything", -5, ()], []),
    ],
)
def test_limits_mean_what_they_say(allowed, inside, outside):
    assert all(checks.allows(allowed, value) for value in inside)
    assert not any(checks.allows(allowed, value) for value in outside)


@pytest.mark.parametrize(
    "key, names",
    [
        ("diloco_outer_optimizer", outer.OPTIMIZERS),
        ("diloco_outer_overlap", schedule.OVERLAPS),
        ("diloco_merge", outer.MERGES),
        ("diloco_exchange_dtype", quantize.NAMES),
        ("remat_policy", (remat.AUTO, *remat.POLICIES)),
        ("mlp_activations", layers.ACTIVATIONS),
        ("grain_packing_type", (packing.CONCATENATED, packing.BEST_FIT)),
    ],
)
def test_the_names_that_base_yml_allows_are_those_that_the_code_knows(key, names):
    assert sorted(checks.choices(KEYS[key].allowed)) == sorted(names)


def test_what_the_config_knows_of_the_tokenizer_and_the_text_is_true():
    """The config imports nothing of them, so its copies are compared here."""
    assert tokenizer_checks.BYTE_TOKENS == tokenizer.ByteTokenizer().vocab_size
    assert all(suffix in KEYS["dataset_path"].meaning for suffix in corpus.SUFFIXES)


def test_a_limit_in_other_words_is_an_error():
    with pytest.raises(ValueError, match=r"Allowed: about 5 in base.yml.*Use one that allows"):
        checks.allows("about 5", 5)


def test_configs_are_found_installed_and_in_a_checkout(tmp_path):
    """Package data lies inside the package, a checkout's configs/ beside it."""
    installed = tmp_path / "site" / "maxdiloco"
    checkout = tmp_path / "repo" / "maxdiloco"
    for configs in (installed / "configs", checkout.parent / "configs"):
        configs.mkdir(parents=True)
        (configs / "base.yml").write_text("steps: 1\n")
    assert base_yml.config_folder(installed) == installed / "configs"
    assert base_yml.config_folder(checkout) == checkout.parent / "configs"
    with pytest.raises(ConfigError, match=r"configs=.*holds no base.yml.*Install maxdiloco again"):
        base_yml.config_folder(tmp_path / "elsewhere" / "maxdiloco")


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yml")))
def test_every_run_of_configs_is_a_valid_config(name):
    """quickstart.yml and its like: what the scripts start has to pass the checks."""
    assert isinstance(config.load([str(FOLDER / name)], {}), config.Config)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_sets_model_keys_only(name):
    """What a run is like stays with the user; a model file says what the model is."""
    group = KEYS["base_emb_dim"].group
    model_keys = {key.name for key in KEYS.values() if key.group == group} - CHOOSE_MODEL
    given = {key for key, _, _ in base_yml.read_yml(FOLDER / "models" / f"{name}.yml")}
    assert given <= model_keys
    # A decoder's size is never left to base.yml, which is free to change.
    of_experts = set() if "num_experts" in given else {"base_moe_mlp_dim"}
    assert given >= {key for key in model_keys if key.startswith("base_")} - of_experts | {
        "head_dim",
        "vocab_size",
        "mlp_activations",
        "logits_via_embedding",
    }


def count_parameters(cfg) -> int:
    """Embedding, head, and for each layer attention, feed-forward and norms, as written down."""
    D, F, head = cfg.base_emb_dim, cfg.base_mlp_dim, cfg.head_dim
    vocabulary = cfg.vocab_size * D * (1 if cfg.logits_via_embedding else 2)
    N, K = cfg.base_num_query_heads, cfg.base_num_kv_heads
    attention = 2 * D * head * (N + K)
    attention += {"none": 0, "qkv": head * (N + 2 * K), "all": head * (N + 2 * K) + D}[
        cfg.attention_bias
    ]
    attention += N if cfg.attention_sink else 0
    if cfg.attention_type == "mla":
        q, kv, v = cfg.q_lora_rank, cfg.kv_lora_rank, cfg.v_head_dim
        attention = D * q + q + q * N * head + D * (kv + cfg.qk_rope_head_dim) + kv
        attention += kv * N * (cfg.qk_nope_head_dim + v) + N * v * D
    E = cfg.num_experts
    F = F if E == 1 or cfg.base_moe_mlp_dim == -1 else cfg.base_moe_mlp_dim
    feed_forward = D * F * (len(cfg.mlp_activations) + 1)
    feed_forward += F * len(cfg.mlp_activations) + D if cfg.mlp_bias else 0
    dense = 0
    if E > 1:
        feed_forward *= E + cfg.shared_experts
        feed_forward += D * E + E * (cfg.router_bias + cfg.routed_bias)
        dense = D * cfg.base_mlp_dim * (len(cfg.mlp_activations) + 1) - feed_forward
    norms = (4 if cfg.norm_placement == "sandwich" else 2) * D
    if cfg.use_qk_norm:
        norms += 2 * head if cfg.qk_norm_scope == "head" else head * (N + K)
    layers = cfg.base_num_decoder_layers * (attention + feed_forward + norms)
    return vocabulary + layers + cfg.first_num_dense_layers * dense + D


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_states_its_number_of_parameters(name):
    text = (FOLDER / "models" / f"{name}.yml").read_text()
    stated = re.search(r"# Parameters: ([\d,]+) =\n# ([^:]+):\n", text)
    count = count_parameters(config.load([f"model_name={name}"], {}))
    assert int(stated[1].replace(",", "")) == count
    assert eval(stated[2].replace("^", "**")) == count  # the equation beside it


def test_the_ladder_has_the_sizes_of_its_paper():
    """2503.09799 Tab. 3 and 4 name the sizes, rounded: within five percent."""
    sizes = "35m=35 90m=90 180m=180 330m=335 550m=550 1b=1300 4b=4000 10b=10000"
    for name, millions in (size.split("=") for size in sizes.split()):
        cfg = config.load([f"model_name={name}"], {})
        assert abs(count_parameters(cfg) / (int(millions) * 1e6) - 1) < 0.05, name
        assert cfg.base_emb_dim == 64 * cfg.base_num_query_heads == cfg.base_mlp_dim // 4, name


def test_tiny_is_the_model_of_base_yml():
    """So that base.yml's comments on its sizes are true."""
    tiny = config.load(["model_name=tiny", "enable_diloco=false"], {})
    assert config.describe_differences(tiny) == [
        "model_name=tiny (default default)", "enable_diloco=false (default true)"
    ]  # fmt: skip


def reads(source: str) -> tuple[set[str], set[str]]:
    """Keys that a module reads from a config: as attributes, and as subscripts.

    A config is a name or an attribute called `cfg` or `config`, unless `config` is a module or
    jax's own. A subscript may be an f-string; it comes back as a pattern.
    """
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    attributes, subscripts = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = isinstance(owner, ast.Name) and owner.id not in modules and owner.id
            if isinstance(owner, ast.Attribute):
                name = ast.unparse(owner) != "jax.config" and owner.attr
            if name in ("cfg", "config"):
                attributes.add(node.attr)
        elif isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                subscripts.add(re.escape(node.slice.value))
            elif isinstance(node.slice, ast.JoinedStr):
                parts = [
                    re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
                    for part in node.slice.values
                ]
                subscripts.add("".join(parts))
    return attributes, subscripts


def test_the_scan_sees_every_way_to_read_a_key():
    """The positive control of the test below."""
    source = """
import jax
from maxdiloco.flags import config
cfg = config.load(argv, environ)
jax.config.update("a", cfg.steps)
self.cfg.log_period + run.config.eval_steps
values["hardware"] + values[f"dcn_{axis}_parallelism"]
"""
    attributes, subscripts = reads(source)
    assert attributes == {"steps", "log_period", "eval_steps"}
    assert subscripts == {"hardware", "dcn_.+_parallelism"}


def test_every_declared_key_is_read_and_every_key_that_is_read_is_declared():
    """A key that is only checked is not yet used."""
    attributes, subscripts = set(), set()
    names = ("checks.py", "check_experts.py", "tokenizer_checks.py", "warnings.py")
    checking = {PACKAGE / "flags" / name for name in names}
    for path in set(PACKAGE.rglob("*.py")) - checking:
        found = reads(path.read_text())
        attributes |= found[0]
        subscripts |= found[1]
    unread = [name for name in KEYS if name not in attributes]
    assert [n for n in unread if not any(re.fullmatch(one, n) for one in subscripts)] == []
    assert attributes - set(KEYS) - {"as_dict"} == set()
