"""MaxText's command line: keys and values that base.yml does not have, and what becomes of them.

maxtext.yml is the table of the keys.
"""

import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import show

FOLDER = pathlib.Path(__file__).parent


class Foreign(NamedTuple):
    """Keys of MaxText that base.yml does not have; see maxtext.yml.

    names, harmless: regular expressions of the keys, and of the values that are dropped with a
    note. why: why nothing is lost then. instead: the remedy for other values.
    """

    names: str
    harmless: str
    why: str
    instead: str


_HARMLESS = {
    "any": r"(?s:.*)",
    "off": r"false|0|0\.0*|-1|-1\.0*|none|null|\[\]|\{\}|0\.|disabled",
}


def foreign_keys() -> list[Foreign]:
    """The entries of maxtext.yml."""
    read = yaml.safe_load((FOLDER / "maxtext.yml").read_text(encoding="utf-8"))
    return [_foreign(**entry) for entry in read]


def _foreign(
    names: list[str], harmless: str | list[str], why: str = "", instead: str = ""
) -> Foreign:
    values = _HARMLESS[harmless] if isinstance(harmless, str) else "|".join(harmless)
    return Foreign("|".join(names), values, why, instead)


# Values of keys that base.yml has. (key, value): (our value, what differs).
VALUES = {
    ("remat_policy", "minimal_with_context"): ("minimal", "which keeps the same"),
    ("remat_policy", "save_dot_with_context_except_mlp"): (
        "save_qkv_context", "which recomputes the output product of attention too"),
    ("remat_policy", "save_dot_except_mlp"): (
        "save_qkv_context", "which keeps attention's result in place of its output product"),
    ("remat_policy", "save_dot_except_mlpwi"): (
        "save_qkv_context", "which keeps attention's result in place of output products"),
    ("remat_policy", "save_qkv_proj"): ("save_qkv_context", "which keeps attention's result too"),
    ("remat_policy", "save_out_proj"): (
        "save_context", "which keeps attention's result in place of its output product"),
    ("attention", "cudnn_flash_te"): ("flash", "which is cuDNN's kernel by JAX on a GPU"),
    ("attention", "cudnn_flash_jax"): ("flash", "which is cuDNN's kernel by JAX on a GPU"),
    ("hardware", "gpu_multiprocess"): ("gpu", "for one process and for several"),
    ("grain_packing_type", "first_fit"): ("best_fit", "which cuts no document that fits either"),
    ("max_num_checkpoints_to_keep", "none"): ("2147483647", "so all are kept"),
    ("num_diloco_fragments", "none"): ("1", "which is MaxText's too"),
    ("attention_type", "full"): ("global", "which is causal"),
    ("attention_bias", "true"): ("qkv", "which is of queries, keys and values"),
    ("attention_bias", "false"): ("none", "the same"),
    ("mlp_activations_limit", "-1"): ("0.0", "which is no limit too"),
}  # fmt: skip
# (key, value): what to do, since nothing here is near it.
REFUSED = {
    ("remat_policy", "qkv_proj_offloaded"): "no layer's values go to host memory. Use "
    "remat_policy=save_qkv_context, or full where memory is short",
    ("remat_policy", "minimal_offloaded"): "no layer's values go to host memory. Use "
    "remat_policy=minimal, or full where memory is short",
    ("remat_policy", "custom"): "names of single tensors are not taken. Use minimal, "
    "save_qkv_context, save_context or full",
    ("attention_type", "local_sliding"): "a window is a key of its own. Use sliding_window_size=N, "
    "with attention_pattern for some of the layers",
    ("attention_type", "chunk"): "chunks are not here. Use sliding_window_size=N",
    ("opt_type", "adam_pax"): "it places eps and the decay otherwise. Use opt_type=adamw",
    ("profiler", "nsys"): "NVIDIA's profiler is not switched from here. Use profiler=xplane",
    ("tokenizer_type", "tiktoken"): "its files are not read. Use tokenizer_type=huggingface with a "
    "tokenizer.json of the same tokenizer",
    ("dataset_type", "tfds"): "TFDS is not read. Use dataset_type=hf, or text in files",
    ("dataset_type", "olmo_grain"): "its index is not read. Use maxdiloco.prepare, then "
    "dataset_type=arrayrecord",
    ("dataset_type", "c4_mlperf"): "TFDS is not read. Use dataset_type=hf, or text in files",
}


FRACTION = (
    "would be less than a sequence for each device. Here every device adds whole sequences to the "
    "batch, and those that share sequences by context parallelism add them together. Use 1 with "
    "fewer devices in a slice, or with ici_context_parallelism."
)


BASE = "base.yml"  # its file of defaults, which its command lines name first; ours too
_MOST_FOREIGN = 20  # keys of MaxText alone in a copy of our base.yml: our choice; its own has 700
_IN_ITS_PLACE = (
    "Put configs/base.yml in its place: the defaults here are this package's, and docs/maxtext.md "
    "lists those that differ."
)


def refuse_missing_base(path: pathlib.Path) -> None:
    """Raise ConfigError for a base.yml that is not there, as on a command line of MaxText."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file here; MaxText's commands name one. {_IN_ITS_PLACE}")


def refuse_base(path: pathlib.Path, given: Collection[str], keys: Collection[str]) -> None:
    """Raise ConfigError for MaxText's own base.yml. given: its keys; keys: of ours."""
    known = foreign_keys()
    if sum(name not in keys and foreign(name, known) is not None for name in given) > _MOST_FOREIGN:
        raise ConfigError(f"{path} is MaxText's, whose defaults are not read. {_IN_ITS_PLACE}")


def foreign(name: str, known: Iterable[Foreign]) -> Foreign | None:
    """The entry of a key of MaxText that base.yml does not have, None where there is none."""
    return next((entry for entry in known if re.fullmatch(entry.names, name)), None)


def taken(
    given: Mapping[str, Any], keys: Collection[str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """What was given without MaxText's keys, and with its values as this package names them.

    given: {name: values.Given}, names as other_names.translate leaves them. keys: of base.yml; one
    of them is never taken for MaxText's. warn: called with a line on what was dropped, and on each
    value that was replaced. Raises ConfigError, one line for all that cannot be dropped.
    """
    known = [] if given.keys() <= set(keys) else foreign_keys()
    kept, dropped, refused = {}, {}, []
    for name, value in given.items():
        text = _text(value.raw)
        entry = None if name in keys else foreign(name, known)
        where = (name, _plain(text))
        if entry is not None and (text == "" or re.fullmatch(entry.harmless, _plain(text))):
            dropped.setdefault(entry.why or "off here too", []).append(name)
        elif entry is not None:
            refused.append(f"{name}={text} is MaxText's and not here. {entry.instead}.")
        elif name == "per_device_batch_size" and re.fullmatch(r"0?\.0*[1-9]\d*", text):
            refused.append(f"{name}={text} {FRACTION}")
        elif where in REFUSED:
            refused.append(f"{name}={text} is MaxText's: {REFUSED[where]}.")
        elif where in VALUES:
            own, what = VALUES[where]
            warn(f"note: {name}={text} of MaxText is {name}={own} here, {what}.")
            kept[name] = value._replace(raw=own)
        else:
            kept[name] = value
    steps = given.get("steps")
    if steps is not None and steps.raw == "-1" and "learning_rate_schedule_steps" in kept:
        warn(
            "note: steps=-1 is one epoch of the text here; in MaxText it is "
            "learning_rate_schedule_steps."
        )
    if refused:
        raise ConfigError(" ".join(refused) + " See docs/maxtext.md.")
    if dropped:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in dropped.items())
        warn(f"note: keys of MaxText that do nothing here and may be left out: {reasons}.")
    return kept


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else show(raw)


def _plain(text: str) -> str:
    """A value in one spelling: 0.0 and 0 are the same, and so are None and null."""
    small = text.lower()
    if small in ("none", "null"):
        return "none"
    return re.sub(r"(\d)\.0*$", r"\1", small)
