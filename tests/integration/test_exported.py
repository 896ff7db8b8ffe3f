"""A model trained here is the same model in transformers: its text, its loss, its parameters."""
# B sequences  L tokens

import numpy as np
import pytest
from run import KEYS, output_of, run_program, train
from run_files import assert_equal_bits, checkpoint_arrays
from safetensors.numpy import load_file

from maxdiloco import generate, hf
from maxdiloco import tokenizer as tokenizer_program
from maxdiloco import train as train_program
from maxdiloco.checkpoint import read
from maxdiloco.data import pipeline
from maxdiloco.run import data as run_data
from maxdiloco.run import settings as run_settings
from maxdiloco.run import stored
from maxdiloco.run import tokenizer as run_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch_import, pytest.mark.usefixtures("programs")]

TEXT = "".join(f"the cat number {i} sat on mat {i * 7 % 13}, and why not?\n" for i in range(400))
PROMPT = "the cat number 3"
RUN = KEYS | dict(dataset_type="text", vocab_size="auto", tokenizer_type="huggingface")
RUN |= dict(max_target_length=48, per_device_batch_size=4, diloco_sync_period=5, eval_steps=4)
RUN |= dict(base_num_kv_heads=1, log_period=11, max_num_checkpoints_to_keep=1)
RUN |= dict(steps=22)  # between rounds: the replicas differ
RUN |= dict(opt_type="sgd", learning_rate=1.0)  # compiles in half the time


@pytest.fixture(scope="module")
def place(tmp_path_factory, programs):
    """Folder with a text, its tokenizer, and an empty folder for runs."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text(TEXT[i * 1000 : (i + 1) * 1000])
    arguments = [str(folder / "text"), f"out={folder / 'tok.json'}", "vocab_size=300"]
    assert tokenizer_program.main(arguments) == 0
    return folder


def run(place, name, **keys):
    """A run of 22 steps over two replicas; its folder."""
    paths = dict(dataset_path=place / "text", eval_dataset_path=place / "text")
    paths |= dict(tokenizer_path=place / "tok.json")
    assert train(place / name, **RUN | paths | keys).code == 0
    return place / name


@pytest.fixture(scope="module")
def trained(place):
    """A run with the defaults of base.yml: tied, scaled embedding, qk-norm, gated silu."""
    return run(place, "defaults")


def export(run, out, *options):
    """The folder of its export."""
    assert hf.main(["export", str(run), str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def exported(trained):
    return export(trained, trained.parent / "exported")


def theirs(folder):
    how = dict(dtype=torch.float32, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def greedy(folder, prompt, count):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    options = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    found = theirs(folder).generate(**inputs, **options)
    return tokenizer.decode(found[0], skip_special_tokens=True)


def our_greedy(folder, prompt, count):
    options = [f"prompt={prompt}", f"max_new_tokens={count}", "temperature=0"]
    return output_of(generate.main, folder, *options).removesuffix("\n")


def test_transformers_continue_a_prompt_with_the_same_text(trained, exported):
    ours = our_greedy(trained, PROMPT, 24)
    assert greedy(exported, PROMPT, 24) == ours
    assert len(ours) > len(PROMPT) + 20


@pytest.mark.full
def test_the_evaluation_loss_is_that_of_transformers(trained, exported, evaluated):
    """eval_steps=4 batches of 8 windows; each document of a window is a text of its own there.
    Float32 sums of some 1,500 losses: 1e-5 of the mean."""
    ours = evaluated(trained)["texts"][0]
    model, total, tokens = theirs(exported), 0.0, 0
    cfg = stored.configure(read.newest_meta(trained, key="RUN"), [], {})
    options = dict(batch_size=8, num_sequences=32, rows=np.arange(8))
    of_run = run_tokenizer.open_tokenizer(cfg)
    tokenised = run_data.prepare_sources(
        run_settings.read_data(cfg), of_run, lambda line: None, splits=("eval",)
    )
    text = run_data.open_evaluated(run_settings.read_data(cfg), of_run, prepared=tokenised)[""]
    with pipeline.eval_batches(text, **options) as batches:
        rows = [pair for b in batches for pair in zip(b["tokens"], b["segment_ids"], strict=True)]
    for row, segments in rows:
        for segment in set(segments) - {0}:
            document = torch.tensor(row[segments == segment][None].astype(np.int64))
            if document.shape[1] > 1:
                with torch.no_grad():
                    logits = model(document).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum")
                total, tokens = total + float(loss), tokens + document.shape[1] - 1
    assert tokens == ours["tokens"] > 500
    assert total / tokens == pytest.approx(ours["loss"], rel=1e-5)


def test_parameters_of_a_replica_and_the_mean_on_request(trained, exported, tmp_path):
    """The replicas differ, two steps after a round; outer parameters are neither."""
    name = "model.layers.1.mlp.down_proj.weight"
    found = {"outer": load_file(exported / "model.safetensors")[name].T}
    for parameters in ("replica_1", "mean"):
        out = export(trained, tmp_path / parameters, f"parameters={parameters}")
        found[parameters] = load_file(out / "model.safetensors")[name].T
    saved = checkpoint_arrays(trained, 22)
    first, second = saved["params['layers']['mlp']['w_out']"][:, 1]
    np.testing.assert_array_equal(found["replica_1"], second)
    np.testing.assert_array_equal(found["mean"], (first + second) / np.float32(2))
    theta = saved["outer_params['layers']['mlp']['w_out']"][1]
    np.testing.assert_array_equal(found["outer"], theta)
    assert len({value.tobytes() for value in (first, *found.values())}) == 4
    assert hf.main(["export", str(trained), str(tmp_path / "x"), "parameters=replica_2"]) == 2


def test_a_run_trains_from_an_import_with_its_tokenizer(exported, place, capfd):
    """The one command of the documentation; its export is like the import."""
    ours = place / "imported"
    assert hf.main(["import", str(exported), str(ours), "max_target_length=48"]) == 0
    same = {"vocab_size", "tokenizer_path", *(k for k in RUN if k.startswith("base_"))}
    keys = {k: v for k, v in RUN.items() if k not in same | {"tokenizer_type", "head_dim"}}
    keys |= {"dataset_path": place / "text", "base_output_directory": place, "run_name": "more"}
    keys |= {"learning_rate": 0.0, "adam_weight_decay": 0.0, "steps": 2}
    pairs = [f"{key}={value}" for key, value in keys.items()]
    more = run_program(train_program.main, ours / "start.yml", *pairs)
    assert more.code == 0 and "with the outer parameters of" in more.output
    assert "another tokenizer" not in more.output + more.errors
    capfd.readouterr()
    again = export(place / "more", place / "again")
    assert f"are from {ours / 'huggingface'}" in capfd.readouterr().out
    assert_equal_bits(*(load_file(f / "model.safetensors") for f in (again, exported)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (exported / name).read_bytes()


def test_a_run_on_bytes_is_exported_with_a_tokenizer_of_bytes(place):
    keys = dict(tokenizer_type="byte", tokenizer_path="", steps=3, vocab_size=384)
    folder = run(place, "bytes", **keys)
    out = export(folder, place / "bytes-exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "Grüße \U0001f600\n\x00 end"
    assert tokenizer(text)["input_ids"] == [256, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    ours = our_greedy(folder, "the", 8)
    assert greedy(out, "the", 8) == ours


@pytest.mark.full
def test_an_eager_run_is_exported_as_the_mean_of_its_replicas(place):
    """The tied table is written as it is for the head. Seven steps of H=5: the thetas differ."""
    folder = run(place, "eager", diloco_round_overlap="eager", steps=7)
    out = export(folder, place / "eager_out")
    theta_R = checkpoint_arrays(folder, 7)["outer['embedding']"]
    assert np.any(theta_R[0] != theta_R[1])
    head = load_file(out / "model.safetensors")["lm_head.weight"]
    mean = (theta_R[0] + theta_R[1]) / np.float32(2)
    np.testing.assert_array_equal(head, mean[: len(head)])  # less the rows of padding
