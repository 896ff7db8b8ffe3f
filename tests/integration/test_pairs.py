"""Any two features together: a run trains and is read, or is refused with a remedy that works.

Each feature is tested alone elsewhere; here every two values of FACTORS meet in a row at least once
(a covering array, of allpairspy). The first value of a factor is the plain one, and ids name the
others.
"""

import collections
import gzip
import json
import math
import re

import pytest
from allpairspy import AllPairs
from run import run_program
from run_files import metrics_rows, saved_steps
from tiers import corner

from maxdiloco import evaluate, generate, hf, prepare
from maxdiloco import tokenizer as tokenizer_program
from maxdiloco import train as train_program
from maxdiloco.config.keys import KEYS
from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.report import __main__ as report

pytestmark = pytest.mark.usefixtures("programs")

SIZES = dict(
    base_emb_dim=16, base_num_decoder_layers=2, base_mlp_dim=32, base_num_query_heads=2,
    base_num_kv_heads=2, head_dim=8,
)  # fmt: skip
MESH = dict(dcn_diloco_parallelism=2, ici_fsdp_parallelism=1)
STREAMING = dict(enable_streaming_diloco="true", num_diloco_fragments=2)
# {factor: {name of a value: the keys it stands for}}; PLACE is the folder of `place` below.
FACTORS = {
    "data": {
        "text": dict(dataset_path="PLACE/text"),
        "synthetic": dict(dataset_type="synthetic"),
        "jsonl": dict(dataset_path="PLACE/lines.jsonl.gz", text_column="body"),
        "parquet": dict(dataset_type="parquet", dataset_path="PLACE/parquet", text_column="body"),
        "shards": dict(dataset_path="PLACE/shards"),
    },
    "sources": {  # SOURCES: what the row reads otherwise, and a text beside it
        "one_source": {},
        "mixture": dict(dataset_mixture="SOURCES"),
        "per_replica": dict(dataset_mixture="SOURCES", dataset_per_replica="true"),
    },
    "tokenizer": {
        "byte": {},
        "bpe": dict(tokenizer_type="huggingface", tokenizer_path="PLACE/tok.json"),
        "pieces": dict(tokenizer_type="sentencepiece", tokenizer_path="PLACE/tok.model"),
        "bpe_any_rows": dict(
            tokenizer_type="huggingface", tokenizer_path="PLACE/tok.json", vocab_size="auto"
        ),
    },
    "model": {
        "small": SIZES,
        "named": dict(model_name="tiny", override_model_config="true", base_emb_dim=32),
        "gemma": SIZES
        | dict(
            model_name="gemma3-1b",
            override_model_config="true",
            vocab_size=384,
            attention_pattern="[local, global]",
        ),
        "experts": SIZES | dict(num_experts=4, num_experts_per_tok=2),
        "imported": dict(yml="PLACE/imported/start.yml"),
    },  # fmt: skip
    "mode": {
        "diloco": {},
        "data_parallel": dict(enable_diloco="false"),
        "overlapped": STREAMING
        | dict(num_communication_overlapping_steps=1, communication_overlapping_alpha=0.5),
        "eager": dict(diloco_round_overlap="eager"),
        "delayed": dict(diloco_round_overlap="delayed"),
    },  # fmt: skip
    "wire": {
        "float32_wire": {},
        "int8": dict(diloco_exchange_dtype="int8", diloco_error_feedback="always"),
        "float4": dict(diloco_exchange_dtype="float4_e3m0"),
        "int2": dict(diloco_exchange_dtype="int2"),
        "topk": dict(diloco_exchange_dtype="topk", diloco_error_feedback="never"),
    },
    "carrier": {
        "auto": {},
        "xla": dict(diloco_transport="xla"),
        "host": dict(diloco_transport="host"),
    },
    "outer": {
        "nesterov": {},
        "radial": dict(diloco_aggregation="radial_directional_mean", diloco_outer_optimizer="sgd"),
        "outer_adam": dict(diloco_outer_optimizer="adam"),
        "alpha": dict(communication_overlapping_alpha=0.25),
        "outer_on_host": dict(diloco_outer_memory="pinned_host"),
    },
    "inner": {
        "adamw": {},
        "muon": dict(opt_type="muon"),
        "sgd": dict(opt_type="sgd"),
        "offload": dict(optimizer_memory_host_offload="true"),
    },
    "mesh": {
        "two_slices": MESH,
        "fsdp": MESH | dict(ici_fsdp_parallelism=2),
        "tensor": MESH | dict(ici_tensor_parallelism=2),
        "stacked": MESH | dict(dcn_diloco_parallelism=1, num_diloco_replicas=2),
        "experts_apart": MESH | dict(ici_expert_parallelism=2),
    },
    "numbers": {
        "auto_dtype": {},
        "bfloat16": dict(dtype="bfloat16", weight_dtype="bfloat16"),
        "float32": dict(dtype="float32", matmul_precision="highest"),
    },
    "batch": {
        "plain_batch": {},
        "best_fit": dict(grain_packing_type="best_fit"),
        "unpacked": dict(packing="false"),
        "evaluated": dict(
            eval_interval=2,
            sample_prompt="a",
            eval_dataset_path="{held_out: , more: PLACE/text}",
        ),  # fmt: skip
        "one_epoch": dict(steps="all"),
    },
    "again": {  # what a second start of the run has otherwise; None: there is none
        "once": None,
        "other_wire": dict(diloco_exchange_dtype="int8"),
        "other_mode": STREAMING,
        "other_mesh": dict(dcn_diloco_parallelism=1, num_diloco_replicas="auto"),
        "other_optimizer": dict(opt_type="sgd"),
    },
    "reader": {"evaluate": {}, "generate": {}, "export": {}, "report": {}},
}
BASE = dict(
    hardware="cpu", max_target_length=16, per_device_batch_size=2, remat_policy="none",
    diloco_sync_period=2, log_period=1, steps=3, eval_steps=1, learning_rate_schedule_steps=10,
    enable_tensorboard="false", async_checkpointing="false",
)  # fmt: skip
ROWS = list(AllPairs(collections.OrderedDict((name, list(of)) for name, of in FACTORS.items())))
PLAIN = {next(iter(of)) for of in FACTORS.values()}
ROUNDS = 6  # remedies that a row may need, one after the other
KEYS = sorted(KEYS, key=len, reverse=True)
OPTIONS = ["RUN", "DST", "parameters", "like", "step", "vocab_multiple"]  # of the readers
# The first word of a remedy.
IMPERATIVES = "Use|Set|Leave|Give|Add|Lower|Raise|Choose|Prepare|Name|Copy|Mount|Restore|Install"
DOCUMENTS = [f"the cat number {i} sat on mat {i * 7 % 13}, and why not?\n" * 3 for i in range(60)]


# Rows of the default tier: the plain row, both transports, an overlapped exchange, experts,
# imports, refusals with their remedies, and a second start on another mesh.
DEFAULT_IDS = (
    "plain",
    "shards+per_replica+bpe_any_rows+experts+data_parallel+int2+host+radial+sgd+stacked+float32"
    "+best_fit+export",
    "mixture+bpe_any_rows+imported+data_parallel+float4+xla+alpha+sgd+stacked+bfloat16+report",
    "parquet+per_replica+bpe_any_rows+imported+overlapped+float4+host+sgd+stacked+float32+other_mesh"
    "+generate",
)


def name_of(row):
    return "+".join(value for value in row if value not in PLAIN) or "plain"


DEFAULT = [row for row in ROWS if name_of(row) in DEFAULT_IDS]


def test_every_two_values_meet_in_a_row():
    for i, first in enumerate(FACTORS):
        for second in list(FACTORS)[:i]:
            met = {(getattr(row, first), getattr(row, second)) for row in ROWS}
            assert len(met) == len(FACTORS[first]) * len(FACTORS[second])
    assert len(DEFAULT) == len(DEFAULT_IDS)
    for factor in ("reader", "sources", "carrier"):
        assert {getattr(row, factor) for row in DEFAULT} == set(FACTORS[factor])


@pytest.fixture(scope="module")
def place(tmp_path_factory, programs):
    """Folder with the data, the tokenizers, a run and its import that FACTORS name."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("text", "more", "parquet"):
        (folder / name).mkdir()
    for i, document in enumerate(DOCUMENTS):
        (folder / "text" / f"{i}.txt").write_text(document)
        (folder / "more" / f"{i}.txt").write_text(document[::-1])
    lines = [json.dumps({"body": document}) for document in DOCUMENTS]
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    parquet.write_table(pyarrow.table({"body": DOCUMENTS}), folder / "parquet" / "0.parquet")
    with (folder / "tok.model").open("wb") as model:
        trainer.train(
            sentence_iterator=iter(DOCUMENTS), model_writer=model, vocab_size=300,
            model_type="bpe", byte_fallback=True, num_threads=1, minloglevel=2,
            hard_vocab_limit=False,
        )  # fmt: skip
    text = str(folder / "text")
    assert tokenizer_program.main([text, f"out={folder / 'tok.json'}", "vocab_size=280"]) == 0
    assert prepare.main([text, f"out={folder / 'shards'}"]) == 0
    keys = BASE | FACTORS["tokenizer"]["bpe"] | SIZES | MESH | dict(dataset_path=text)
    assert start(folder, keys | dict(run_name="run", base_output_directory=folder)).code == 0
    exported, imported = str(folder / "exported"), str(folder / "imported")
    assert hf.main(["export", str(folder / "run"), exported]) == 0
    assert hf.main(["import", exported, imported]) == 0
    return folder


def values_of(row, output):
    """The keys of a row's first start."""
    values = BASE | dict(base_output_directory=output, run_name="run")
    for factor, name in row._asdict().items():
        if factor not in ("again", "reader"):
            values |= FACTORS[factor][name]
    if values.get("dataset_mixture"):
        beside = dict(path="PLACE/more", name="more", dataset_type="text", text_column="text")
        mine = dict(path=values.pop("dataset_path", "PLACE/text"), name="mine")
        values["dataset_mixture"] = json.dumps([mine, beside])
    return values


def start(place, values):
    """Train with these keys; return the Run."""
    keys = {key: str(value).replace("PLACE", str(place)) for key, value in values.items()}
    yml = [keys.pop("yml")] if "yml" in keys else []
    pairs = [f"{key}={value}" for key, value in keys.items()]
    return run_program(train_program.main, *yml, *pairs)


def refusal(run, known):
    """Return the keys that the error of a refused run names, in its order, and the remedy."""
    line = run.error
    match = re.match(r"(\w+): (.*)", line)
    kinds = {kind.__name__: kind for kind in (ConfigError, CheckpointError, DataError)}
    assert match and match[1] in kinds and run.code == kinds[match[1]].exit_code, line
    named = re.findall(rf"\b({'|'.join(known)})\b", match[2])
    remedy = re.search(rf"(?:[.;:] )((?:{IMPERATIVES})\b.*)", match[2])
    assert named and remedy, f"no key or no remedy: {line}"
    return named, remedy[1]


def mended(values, named, remedy, number):
    """The keys with one of the remedies taken: of those written key=value the number-th, else
    without the first named key that is the row's own."""
    pair = rf"\b({'|'.join(KEYS)})=(\[[^]]*\]|\S*?)(?=[.,;:)]*(?:\s|$))"
    choices = [c for c in re.split(r",? or ", remedy) if re.search(pair, c)]
    if choices:
        chosen = choices[number % len(choices)]
        values = values | dict(re.findall(pair, chosen))
        return values | dict(run_name="anew") if "another run_name" in chosen else values
    fixed = BASE | {key: values[key] for key in ("base_output_directory", "run_name")}
    own = [key for key in named if key in values and values[key] != fixed.get(key)]
    assert own, f"the remedy is no key=value, and names no key of the row: {remedy}"
    return BASE | {key: value for key, value in values.items() if key != own[0]}


def trained(place, values, number):
    """Apply the remedy of each refusal until the run trains; return the keys it trained with."""
    errors = []
    for _ in range(ROUNDS):
        run = start(place, values)
        if run.code == 0:
            return values
        errors.append(run.error)
        values = mended(values, *refusal(run, KEYS), number)
    raise AssertionError("no remedy helps:\n" + "\n".join(errors))


def read(reader, folder):
    """Read a run with a program: it works, or names a key or option and a remedy."""
    out = folder.parent / "read"
    program, *arguments = {
        "evaluate": (evaluate, folder, f"report={out}"),
        "generate": (generate, folder, "max_new_tokens=3", f"output={out}"),
        "export": (hf, "export", folder, out),
        "report": (report, folder, f"out={out}"),
    }[reader]
    run = run_program(program.main, *arguments)
    if run.code:
        refusal(run, KEYS + OPTIONS)
    assert out.exists() == (run.code == 0)


@pytest.mark.parametrize("row", corner(ROWS, DEFAULT), ids=name_of)
def test_a_row_trains_and_is_read_or_is_refused_with_a_remedy(row, place, tmp_path):
    number = ROWS.index(row)
    values = trained(place, values_of(row, tmp_path), number)
    change = FACTORS["again"][row.again]
    if change is not None:
        more = {} if values["steps"] == -1 else dict(steps=5)
        values = trained(place, values | change | more, number)
    run = tmp_path / values["run_name"]
    rows = metrics_rows(run)
    assert rows and all(math.isfinite(each["learning/loss"]) for each in rows)
    assert saved_steps(run)[-1] == rows[-1]["step"]
    read(row.reader, run)
