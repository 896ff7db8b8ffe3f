"""What of config.json is more than another name of one of our keys, both ways."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError

Values = Mapping[str, Any]
# Layers of a model: eighty times those of the deepest published one, Llama 3 405B with 126
# (arXiv 2407.21783, Table 3). config.json may ask for more than fits a list.
MOST_LAYERS = 10_000
_MSCALES = "mscale", "mscale_all_dim"
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # of layer_types


class Rule(NamedTuple):
    """read: config.json -> our keys. write: our keys -> keys of config.json. Raise ConfigError.

    Our keys are those of base.yml, entries of tables as `router.scaling_factor`. key: of
    config.json, that it alone reads.
    """

    read: Callable[[Values], dict[str, Any]]
    write: Callable[[Values], dict[str, Any]]
    key: str = ""


# Names of theirs with the function that ours computes: jax.nn.gelu is the tanh form.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_THEIRS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}
_SIZES = {
    "hidden_size": "base_emb_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "intermediate_size": "base_mlp_dim",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "normalization_layer_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
}
_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}
_LENGTH = "original_max_position_embeddings"
_ROPE_ENTRIES = {  # of each rope_type, beside it
    "linear": ("factor",),
    "llama3": ("low_freq_factor", "high_freq_factor", "factor", _LENGTH),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "factor", _LENGTH),
}


def field(
    theirs: str,
    ours: str,
    default: Any = None,
    read: Callable[[Any], Any] = lambda value: value,
    write: Callable[[Any], Any] = lambda value: value,
    *,
    null: Any = None,
) -> Rule:
    """A key of config.json that is one of ours.

    default: value of the key where config.json has none; a function of config.json; None: none.
    null: the same where it is there, but null; None: default. read: their value -> ours. write: the
    reverse.
    """

    def read_from(hf):
        value = hf.get(theirs)
        if value is None:
            other = default if null is None or theirs not in hf else null
            try:
                value = other(hf) if callable(other) else other
            except (KeyError, TypeError, ZeroDivisionError):
                pass  # a key that it takes is missing too
        if value is None:
            raise ConfigError(
                f"{theirs} is missing in config.json of model_type={hf['model_type']}. "
                "Download it again."
            )
        return {ours: read(value)}

    return Rule(read_from, lambda keys: {theirs: write(keys[ours])}, theirs)


def or_null(theirs: str, ours: str, default: float) -> Rule:
    """A number, or null for our zero. default: where config.json has no such key."""
    zero = 0 * default  # of the default's type
    return field(theirs, ours, default, lambda x: x or zero, lambda x: x or None, null=zero)


def activation(key: str, default: str, **more: str) -> Rule:
    """A gated feed-forward layer. more: further names in files of the type."""
    names = _ACTIVATIONS | more

    def read(name):
        if not isinstance(name, str) or name not in names:
            raise refused(key, name, f"the activations are {', '.join(_ACTIVATIONS)}")
        return (names[name], "linear")

    return field(
        key, "mlp_activations", default, read, lambda value: _THEIRS.get(value[0], default)
    )


def attention_bias(default: bool) -> Rule:
    """Biases of all four products of attention, or of none."""
    key = "attention_bias"

    def read(value):
        check_type(key, value, default)
        return "all" if value else "none"

    return field(key, key, default, read, lambda value: value == "all")


def sizes(*, epsilon: float, tied: bool = False, **defaults: Any) -> tuple[Rule, ...]:
    """The fields that all types have. defaults: by key of config.json.

    tied: whether the embedding is the head too where config.json does not say.
    """

    def heads(hf):
        return hf["num_attention_heads"]

    defaults = {
        "num_key_value_heads": heads,
        "head_dim": lambda hf: hf["hidden_size"] // hf["num_attention_heads"],
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": tied,
    } | defaults
    nulls = {"num_key_value_heads": heads}
    return tuple(
        field(theirs, ours, defaults.get(theirs), null=nulls.get(theirs))
        for theirs, ours in _SIZES.items()
    )


def expert_fields(key: str, number: int, *, per_token: int, **width: int) -> tuple[Rule, ...]:
    """The numbers of experts and of those that a token uses, and the hidden width of one.

    key: of the number in the published config.json; newer files have another. width: key and value.
    """
    return (
        field(key, "num_experts", lambda hf: hf.get("num_local_experts") or number),
        field("num_experts_per_tok", "num_experts_per_tok", per_token),
        *(field(theirs, "base_moe_mlp_dim", value) for theirs, value in width.items()),
    )


def rope(
    default: float, scaling: Mapping[str, Any] | None = None, *, local: float | None = None
) -> Rule:
    """Rotary embedding in transformers' form of either version.

    Where config.json does not say: default, the longest wavelength; scaling, rope_scaling; local,
    the wavelength of local layers, which is never stretched (Gemma 3), None without such.
    """

    def read(hf):
        whole, own = rope_parameters(hf, scaling), {"rope_theta": hf.get("rope_local_base_freq")}
        if local is not None and GLOBAL in whole:
            whole, own = whole[GLOBAL], whole.get(LOCAL, {})
        found = {"rope_max_timescale": _theta(whole, default)} | _stretch(whole, hf)
        if local is None:
            return found
        if own.get("rope_type", "default") != "default":
            raise refused("rope_type", own["rope_type"], "local layers have default")
        if (base := _theta(own, local)) <= 0:  # such as our own -1
            raise refused("rope_local_base_freq", base, "a wavelength is above 0")
        return found | {"local_rope_max_timescale": base}

    def write(ours):
        found = {"rope_theta": ours["rope_max_timescale"]}
        if local is not None:
            own, base = ours["local_rope_max_timescale"], ours["rope_max_timescale"]
            found["rope_local_base_freq"] = base if own == -1 else own
        if not ours["rope_scaling"]:
            return found | {"rope_scaling": None}
        names = ("rope_type", *_ROPE_ENTRIES[ours["rope_scaling.rope_type"]])
        table = {name: ours[f"rope_scaling.{name}"] for name in names}
        if not table.get("attention_factor", True):
            del table["attention_factor"]
        return found | {"rope_scaling": table}

    return Rule(read, write)


def _theta(parameters: Values, default: float) -> float:
    given = parameters.get("rope_theta")
    return float(number("rope_theta", default if given is None else given))


def rope_parameters(hf: Values, scaling: Values | None = None) -> dict[str, Any]:
    """rope_theta and the scaling, from rope_parameters or from rope_theta and rope_scaling.

    scaling: where config.json does not say.
    """
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or scaling or {}
    if not isinstance(found, dict):
        raise refused("rope_scaling", found, "it is a table")
    theta = {} if hf.get("rope_theta") is None else {"rope_theta": hf["rope_theta"]}
    return theta | found


def _stretch(parameters: Values, hf: Values) -> dict[str, Any]:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", *_ROPE_ENTRIES):
        raise refused("rope_type", kind, f"the types are default, {', '.join(_ROPE_ENTRIES)}")
    for key in ("partial_rotary_factor", *(() if kind == "yarn" else _MSCALES)):
        if parameters.get(key) not in (None, 1, 1.0):
            raise refused(key, parameters[key], f"no model type here has it with rope_type={kind}")
    if kind == "default":
        return {}
    if parameters.get("factor") is None:
        raise refused("rope_scaling", parameters, f"factor is missing, which {kind} needs")
    given = {name: parameters.get(name) for name in _ROPE_ENTRIES[kind]}
    table = {name: value for name, value in given.items() if value is not None}
    if kind == "yarn":
        table.setdefault(_LENGTH, hf.get("max_position_embeddings", 0))
        scales = [parameters.get(key) for key in _MSCALES]
        if "attention_factor" not in table and all(scales):
            factor = number("factor", parameters["factor"])
            over, under = (mscale(factor, number("mscale", scale)) for scale in scales)
            table["attention_factor"] = over / under
    return {"rope_scaling": {"rope_type": kind} | table}


def mscale(factor: float, weight: float) -> float:
    """Yarn's factor of the rotated features (arXiv 2309.00071, section 3.4), weighted."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def pattern(default: int, period: int) -> Rule:
    """Layers with the window and layers without; of `period` layers the last has none."""

    def read(hf):
        types = hf.get("layer_types")
        if types is None:
            every = number("sliding_window_pattern", hf.get("sliding_window_pattern") or period)
            layers = hf.get("num_hidden_layers") or 0
            types = [GLOBAL if (i + 1) % every == 0 else LOCAL for i in range(layers)]
        return _pattern_keys(types, hf, default)

    def write(ours):
        return _layer_types(ours) | {"sliding_window": ours["sliding_window_size"] or default}

    return Rule(read, write)


def qwen_window() -> Rule:
    """Qwen: no window unless use_sliding_window; then in the layers from max_window_layers on."""

    def read(hf):
        if not hf.get("use_sliding_window"):
            return {}
        layers = hf.get("num_hidden_layers") or 0
        first = number("max_window_layers", hf.get("max_window_layers", 28))
        types = hf.get("layer_types") or [LOCAL if i >= first else GLOBAL for i in range(layers)]
        return _pattern_keys(types, hf, 4096)

    def write(ours):
        if not ours["sliding_window_size"]:
            return {"use_sliding_window": False}
        window = {"use_sliding_window": True, "sliding_window": ours["sliding_window_size"]}
        return _layer_types(ours) | window | {"max_window_layers": 0}

    return Rule(read, write)


def _pattern_keys(types: Sequence[str], hf: Values, default: int) -> dict[str, Any]:
    """The shortest pattern that repeats to these layers. default: of sliding_window."""
    window = number("sliding_window", hf.get("sliding_window", default) or 0)
    layers = hf.get("num_hidden_layers") or 0
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise refused("layer_types", types, f"it is a list of {LOCAL}, {GLOBAL}")
    if len(types) != layers:
        raise refused("layer_types", types, f"it has num_hidden_layers={layers} entries")
    if unknown := set(types) - {LOCAL, GLOBAL}:
        raise refused("layer_types", min(unknown), f"the types are {LOCAL}, {GLOBAL}")
    kinds = tuple("local" if kind == LOCAL and window else "global" for kind in types)
    if "local" not in kinds:
        return {"sliding_window_size": 0, "local_rope_max_timescale": -1.0}  # of no layer
    sizes = range(1, len(kinds) + 1)
    size = next(p for p in sizes if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return {"sliding_window_size": window, "attention_pattern": kinds[:size]}


def _layer_types(ours: Values) -> dict[str, Any]:
    return {"layer_types": [LOCAL if kind == "local" else GLOBAL for kind in kinds_of_layers(ours)]}


def kinds_of_layers(ours: Values) -> tuple[str, ...]:
    """local or global, of every layer."""
    alike = ("local",) if ours["sliding_window_size"] else ("global",)
    kinds = ours["attention_pattern"] or alike
    return tuple(kinds[i % len(kinds)] for i in range(ours["base_num_decoder_layers"]))


def check_type(key: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a value of the key that is not of the type of our default; "": any."""
    kind = type(default)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if key and kind in _TYPES and not fits:
        raise refused(key, value, f"it is {_TYPES[kind]}")


def number(key: str, value: Any) -> float:
    """The value of a key that is a number. Raises ConfigError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise refused(key, value, "it is a number")
    return value


def refused(key: str, value: Any, why: str) -> ConfigError:
    """The error for a value of config.json that maxdiloco cannot compute."""
    return ConfigError(
        f"{key}={value} of config.json has no counterpart here: {why}. Use another model."
    )
