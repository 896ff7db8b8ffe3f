"""Convert the keys of transformers' configs that decide a model's computation to ours, and back.

Most keys have one counterpart, a row of FIELDS. The layers with a sliding window and the rotary
embedding have several keys each, which functions convert.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.errors import ConfigError

Values = Mapping[str, Any]
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # values in layer_types
_LARGEST = float(np.finfo(np.float32).max)  # models compute in float32
_LENGTH = "original_max_position_embeddings"
_ROPE_ENTRIES = {  # {rope_type: entries of rope_parameters}
    "linear": ("factor",),
    "llama3": ("low_freq_factor", "high_freq_factor", "factor", _LENGTH),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "factor", _LENGTH),
}
_MSCALES = "mscale", "mscale_all_dim"
_DIGITS = 12  # decimals of mscale_all_dim in config.json: 1.0 rather than 0.9999999999999998


class Field(NamedTuple):
    """A key of config.json with its counterpart in base.yml.

    Attributes:
      theirs: the key of config.json.
      ours: the key of base.yml, or an entry of a table, as `router.scaling_factor`.
      null: our value if theirs is null. None: null is refused.
      read: converts their value to ours.
      write: converts our value to theirs.
    """

    theirs: str
    ours: str
    null: Any = None
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


# transformers' names of the functions that we compute: jax.nn.gelu is the tanh form.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}


def _read_activation(name: str) -> tuple[str, str]:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{name} is not an activation of maxdiloco: {', '.join(_ACTIVATIONS)}")
    return (_ACTIVATIONS[name], "linear")


def _write_activation(ours: tuple[str, ...]) -> str:
    return _THEIR_ACTIVATIONS.get(ours[0], "silu")


FIELDS = (
    Field("hidden_size", "base_emb_dim"),
    Field("num_hidden_layers", "base_num_decoder_layers"),
    Field("intermediate_size", "base_mlp_dim"),
    Field("num_attention_heads", "base_num_query_heads"),
    Field("num_key_value_heads", "base_num_kv_heads"),
    Field("head_dim", "head_dim"),
    Field("vocab_size", "vocab_size"),
    Field("rms_norm_eps", "normalization_layer_epsilon"),
    Field("tie_word_embeddings", "logits_via_embedding"),
    Field("hidden_act", "mlp_activations", read=_read_activation, write=_write_activation),
    Field("hidden_activation", "mlp_activations", read=_read_activation, write=_write_activation),
    Field("attention_bias", "attention_bias", read=lambda value: "all" if value else "none",
          write=lambda value: value == "all"),
    Field("mlp_bias", "mlp_bias"),
    # transformers' class accepts only an integer.
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", write=round),
    Field("attn_logit_softcapping", "attn_logits_soft_cap", 0.0, write=lambda cap: cap or None),
    Field("final_logit_softcapping", "final_logits_soft_cap", 0.0, write=lambda cap: cap or None),
    Field("num_local_experts", "num_experts"),
    Field("n_routed_experts", "num_experts"),
    Field("num_experts_per_tok", "num_experts_per_tok"),
    Field("moe_intermediate_size", "base_moe_mlp_dim"),
    Field("norm_topk_prob", "router.normalise_weights"),
    Field("n_group", "router.num_groups", 1),
    Field("topk_group", "router.groups_per_token", 1),
    Field("routed_scaling_factor", "router.scaling_factor"),
    Field("n_shared_experts", "shared_experts", 0),
    Field("first_k_dense_replace", "first_num_dense_layers"),
    Field("swiglu_limit", "mlp_activations_limit"),
    Field("q_lora_rank", "latent_attention.q_lora_rank", 0, write=lambda rank: rank or None),
    Field("kv_lora_rank", "latent_attention.kv_lora_rank"),
    Field("qk_nope_head_dim", "latent_attention.qk_nope_head_dim"),
    Field("qk_rope_head_dim", "latent_attention.qk_rope_head_dim"),
    Field("v_head_dim", "latent_attention.v_head_dim"),
)  # fmt: skip


def read_field(field: Field, config: Values) -> Any:
    """Return our value of a field.

    Args:
      field: a field whose key `config` has.
      config: a complete config of transformers, which has checked the types.

    Raises:
      ConfigError: maxdiloco cannot compute the value.
    """
    value = config[field.theirs]
    if value is None and field.null is not None:
        return field.null
    try:
        return field.read(value)
    except ConfigError as error:
        raise ConfigError(f"{field.theirs}={value}: {error}.") from error


def number(key: str, value: Any) -> float:
    """Return a value as a number that float32 can hold. Raises ConfigError, which names the key."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:
        raise ConfigError(f"{key}={value}: expected a number of at most {_LARGEST:.2g}.")
    return value


# -- layers with a sliding window ----------------------------------------------------------------


def read_layers(config: Values) -> dict[str, Any]:
    """Return our keys for the layers with a sliding window and those without.

    Args:
      config: a complete config of transformers.

    Raises:
      ConfigError: maxdiloco cannot compute a value of layer_types or sliding_window.
    """
    window = config.get("sliding_window") or 0
    if type(window) is not int or window < 0:
        raise ConfigError(f"sliding_window={window}: expected an integer >= 0 or null.")
    if not config.get("use_sliding_window", True):
        window = 0
    types = config.get("layer_types")
    if types is None:
        return {"sliding_window_size": window}
    if unknown := set(types) - {LOCAL, GLOBAL}:
        raise ConfigError(f"layer_types has {min(unknown)}: expected {LOCAL} or {GLOBAL}.")
    kinds = tuple("local" if kind == LOCAL and window else "global" for kind in types)
    if "local" not in kinds:
        return {"sliding_window_size": 0, "local_rope_max_timescale": -1.0}  # no local layers
    # The shortest pattern whose repetition gives these layers.
    sizes = range(1, len(kinds) + 1)
    size = next(p for p in sizes if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return {"sliding_window_size": window, "attention_pattern": kinds[:size]}


def write_layers(ours: Values, known: frozenset[str]) -> dict[str, Any]:
    """Return the entries of config.json for the layers with a sliding window.

    Args:
      ours: our keys with their values.
      known: the keys that the config class of the model type has.
    """
    window, found = ours["sliding_window_size"], {}
    if "use_sliding_window" in known:
        found["use_sliding_window"] = bool(window)
    if "layer_types" in known:
        kinds = kinds_of_layers(ours)
        found["layer_types"] = [LOCAL if kind == "local" else GLOBAL for kind in kinds]
    if "sliding_window" in known and (window or "layer_types" not in known):
        found["sliding_window"] = window or None
    return found


def kinds_of_layers(ours: Values) -> tuple[str, ...]:
    """Return `local` or `global` for every layer."""
    alike = ("local",) if ours["sliding_window_size"] else ("global",)
    kinds = ours["attention_pattern"] or alike
    return tuple(kinds[i % len(kinds)] for i in range(ours["base_num_decoder_layers"]))


# -- rotary embedding ----------------------------------------------------------------------------


def read_rope(config: Values, *, local: bool, latent: bool) -> dict[str, Any]:
    """Return our keys of the rotary embedding.

    Args:
      config: a complete config of transformers.
      local: whether local layers have their own wavelength (Gemma 3).
      latent: whether YaRN also scales the attention logits, by mscale_all_dim (DeepSeek).

    Raises:
      ConfigError: maxdiloco cannot compute a value.
    """
    parameters = config["rope_parameters"]
    if not local:
        found = _read_theta("rope_max_timescale", parameters) | _read_scaling(parameters, latent)
        return found | (_read_logit_scale(config) if latent else {})
    whole, own = parameters[GLOBAL], parameters[LOCAL]
    found = _read_theta("rope_max_timescale", whole) | _read_scaling(whole, latent)
    if own["rope_type"] != "default":
        raise ConfigError(f"rope_type={own['rope_type']}: expected default in {LOCAL} layers.")
    return found | _read_theta("local_rope_max_timescale", own)


def _read_theta(ours: str, parameters: Values) -> dict[str, Any]:
    theta = float(number("rope_theta", parameters["rope_theta"]))
    if theta <= 0:
        raise ConfigError(f"rope_theta={theta}: expected a number above 0.")
    return {ours: theta}


def _read_scaling(parameters: Values, latent: bool) -> dict[str, Any]:
    kind = parameters["rope_type"]
    if kind not in ("default", *_ROPE_ENTRIES):
        raise ConfigError(f"rope_type={kind}: expected default, {', '.join(_ROPE_ENTRIES)}.")
    for key in ("partial_rotary_factor", *(() if kind == "yarn" else _MSCALES)):
        if parameters.get(key) not in (None, 1, 1.0):
            raise ConfigError(f"{key}={parameters[key]}: expected 1 with rope_type={kind}.")
    if kind == "default":
        return {}
    given = {name: parameters.get(name) for name in _ROPE_ENTRIES[kind]}
    table = {name: value for name, value in given.items() if value is not None}
    for name in table.keys() - {"truncate"}:
        number(name, table[name])
    if "factor" not in table:
        raise ConfigError(f"factor is missing in rope_parameters, which rope_type={kind} needs.")
    scales = [parameters.get(key) for key in _MSCALES]
    if kind == "yarn" and "attention_factor" not in table and all(scales):
        over, under = (_mscale(table["factor"], number("mscale", scale)) for scale in scales)
        table["attention_factor"] = over / under
    return {"rope_scaling": {"rope_type": kind} | table}


def _read_logit_scale(config: Values) -> dict[str, Any]:
    dim = sum(number(key, config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    parameters, found = config["rope_parameters"], {"head_dim": dim}
    all_dim = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "yarn" and all_dim:
        factor = _mscale(parameters["factor"], number("mscale_all_dim", all_dim))
        found["query_pre_attn_scalar"] = dim / factor**4  # both factors of the product have it
    return found


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor of the rotated features (arXiv 2309.00071, section 3.4), weighted."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def write_rope(ours: Values, *, local: bool, latent: bool) -> dict[str, Any]:
    """Return rope_parameters of config.json.

    Args:
      ours: our keys with their values; entries of tables are keys such as `rope_scaling.factor`.
      local: as for `read_rope`.
      latent: as for `read_rope`.
    """
    theta, table = ours["rope_max_timescale"], {"rope_type": "default"}
    if ours["rope_scaling"]:
        names = ("rope_type", *_ROPE_ENTRIES[ours["rope_scaling.rope_type"]])
        table = {name: ours[f"rope_scaling.{name}"] for name in names}
        if table.get("attention_factor") == "auto":
            del table["attention_factor"]
    table["rope_theta"] = theta
    if latent:
        _write_logit_scale(table, ours)
    if not local:
        return {"rope_parameters": table}
    own = ours["local_rope_max_timescale"]
    own = {"rope_type": "default", "rope_theta": theta if own == -1 else own}
    return {"rope_parameters": {GLOBAL: table, LOCAL: own}}


def _write_logit_scale(table: dict[str, Any], ours: Values) -> None:
    dim, scalar = ours["head_dim"], ours["query_pre_attn_scalar"]
    if table["rope_type"] != "yarn" or scalar == dim or table["factor"] <= 1:
        return
    factor = (dim / scalar) ** 0.25
    all_dim = round((factor - 1) / (0.1 * math.log(table["factor"])), _DIGITS)
    table["mscale_all_dim"] = all_dim
    if table.get("attention_factor") == 1:  # as in published files: the factors cancel
        table["mscale"] = all_dim
        del table["attention_factor"]
