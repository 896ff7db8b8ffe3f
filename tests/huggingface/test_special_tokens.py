"""Texts get the tokens that transformers' AutoTokenizer of the same folder adds."""

import json

import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe, sentencepiece_model
from tiers import corner, full

pytest.importorskip("torch")
pytest.importorskip("transformers")
import tokenizers
import torch
import transformers
from tokenizers import processors

from benchmarks import parity
from maxdiloco import evaluate, generate, hf
from maxdiloco.config import config
from maxdiloco.data import tokenizer
from maxdiloco.huggingface import sidecar_files

pytestmark = pytest.mark.torch_import

FIRST, LAST = "<|begin_of_text|>", "<|end_of_text|>"  # tokens 0 and 1 of byte_level_bpe
ROWS = 700  # for the tokens of every tokenizer here


def template(engine, *first):
    """A post-processor that puts tokens before a text."""
    special = [(name, engine.token_to_id(name)) for name in first]
    places = dict(single=[*first, "$A"], pair=[*first, "$A", "$B"])
    return processors.TemplateProcessing(**places, special_tokens=special)


PROCESSORS = {
    "none": lambda engine: None,
    "template": lambda engine: template(engine, FIRST),
    "of llama 3": lambda engine: processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template(engine, FIRST)]
    ),
    "of roberta": lambda engine: processors.RobertaProcessing(
        (LAST, 1), (FIRST, 0), add_prefix_space=False
    ),
    "another token": lambda engine: template(engine, LAST),
    "byte level": lambda engine: processors.ByteLevel(),
    "two": lambda engine: template(engine, LAST, FIRST),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """A tokenizer.json without a post-processor, and a tokenizer.model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "json": byte_level_bpe(folder, vocab_size=300).read_text(),
        "model": sentencepiece_model(folder).read_bytes(),
    }


def write_json(folder, text, processor, **names):
    """tokenizer.json with a post-processor, and tokenizer_config.json."""
    engine = tokenizers.Tokenizer.from_str(text)
    if (made := PROCESSORS[processor](engine)) is not None:
        engine.post_processor = made
    engine.save(str(folder / "tokenizer.json"))
    write_names(folder, names)


def write_names(folder, names):
    if names:
        (folder / "tokenizer_config.json").write_text(json.dumps(names))


def theirs(folder, text):
    """Tokens of transformers."""
    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def document(found, text):
    """Tokens of a document in training and in evaluation."""
    end = [] if found.eos is None else [found.eos]
    return [*found.prompt(text), *end]


def imported(folder, source):
    """The tokenizer of a run that starts from an import."""
    small.done("import", source, folder / "ours", f"vocab_multiple={ROWS}")
    keys = config.load([str(folder / "ours/start.yml")], {})
    return tokenizer.build(vars(keys))


NAMES = {
    "no names": {},
    "add_bos_token": {"bos_token": FIRST, "eos_token": LAST, "add_bos_token": True},
    "no add_bos_token": {"bos_token": FIRST, "eos_token": LAST, "add_bos_token": False},
    "null": {"bos_token": None, "eos_token": LAST},
    "of llama": {"tokenizer_class": "LlamaTokenizer", "bos_token": FIRST, "add_bos_token": True},
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    ("processor", "before", "after"),
    [
        ("none", 0, 0),
        ("byte level", 0, 0),
        ("template", 1, 0),
        ("of llama 3", 1, 0),
        ("of roberta", 1, 1),
        ("another token", 1, 0),
    ],
)
def test_a_tokenizer_json_adds_what_transformers_adds(
    source, tmp_path, content, processor, before, after, names
):
    """The post-processor decides: transformers 5 ignores add_bos_token next to tokenizer.json."""
    write_json(source, content["json"], processor, **NAMES[names])
    found = imported(tmp_path, source)
    assert document(found, "hello") == theirs(source, "hello")
    assert len(document(found, "hello")) == len(found.encode("hello")) + before + after


@pytest.mark.parametrize(
    ("names", "before"),
    [
        ({}, 0),
        ({"add_bos_token": True}, 1),
        ({"add_bos_token": False}, 0),
        ({"add_bos_token": True, "bos_token": None}, 0),
        ({"add_bos_token": True, "add_eos_token": True}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("bos_id", [1, -1], ids=["bos", "no bos"])
def test_a_sentencepiece_model_adds_what_transformers_adds(source, tmp_path, names, before, bos_id):
    sentencepiece_model(source, bos_id=bos_id)
    write_names(source, names)
    found = imported(tmp_path, source)
    for text in ("hello", " of the  parser\n"):
        assert document(found, text) == theirs(source, text)
    after = int("add_eos_token" in names)
    added = len(document(found, "hello")) - len(found.encode("hello"))
    assert bos_id < 0 or added == before + after


def test_of_two_tokens_before_a_text_the_second_is_kept(source, tmp_path, content, capfd):
    """Only one token can start a document."""
    write_json(source, content["json"], "two")
    found = imported(tmp_path, source)
    assert theirs(source, "hello") == [1, *document(found, "hello")]
    assert "tokens 1 " in capfd.readouterr().out


def test_a_tokenizer_without_bos_refuses_add_bos(source, tmp_path, content, capfd):
    write_json(source, content["json"], "none", bos_token=None)
    target, rows = tmp_path / "ours", f"vocab_multiple={ROWS}"
    assert hf.main(["import", str(source), str(target), rows, "add_bos=true"]) == 2
    assert "add_bos=true" in capfd.readouterr().err and not target.exists()
    small.done("import", source, target, rows)
    for program in (generate, evaluate):
        assert program.main([str(target), "add_bos=true"]) == 2
        assert "add_bos=true" in capfd.readouterr().err
    assert generate.main([str(target), "add_bos=yes"]) == 2
    assert "add_bos=yes" in capfd.readouterr().err


@pytest.mark.parametrize("bos", [None, 0], ids=["no bos", "bos"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_exported_tokenizer_starts_a_text_as_the_run_does(tmp_path, content, processor, bos):
    """Whatever the run's tokenizer.json adds."""
    write_json(tmp_path, content["json"], processor)
    file = (tmp_path / "tokenizer.json").read_bytes()
    ours = tokenizer.from_content("huggingface", file, "here").with_bos_and_eos(bos, 1)
    sidecar_files.write(tmp_path, ours, 99)
    assert theirs(tmp_path, "hello") == ours.prompt("hello")


@pytest.mark.parametrize("bos", [None, 1], ids=["no bos", "bos"])
def test_an_exported_sentencepiece_model_starts_text_as_the_run(tmp_path, content, bos):
    ours = tokenizer.from_content("sentencepiece", content["model"], "here").with_bos_and_eos(
        bos, 2
    )
    sidecar_files.write(tmp_path, ours, 99)
    for model_type in ("llama", "qwen3", "gemma2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert theirs(tmp_path, "hello") == ours.prompt("hello"), model_type


# --- the text of small models ---------------------------------------------------------------------

FAMILIES = (
    "llama", "llama, stretched", "mistral", "qwen3", "olmo2", "gemma2", "gemma3_text", "mixtral",
    "qwen3_moe", "gpt_oss", "deepseek_v3",
)  # fmt: skip


def saved(folder, family, content, processor, **names):
    """Save a random model and its tokenizer, which has 300 tokens and those of its class."""
    case = parity.CASES[family]
    model = parity.torch_model(case._replace(changes=case.changes | {"vocab_size": 304}))
    model.save_pretrained(folder)
    write_json(folder, content["json"], processor, **names)
    return model


def their_tokens(model, tokens):
    """Greedy continuation of transformers."""
    found = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens)),  # token 0 is not padding
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    return found[0, len(tokens) :].tolist()


def their_text(folder, tokens):
    return transformers.AutoTokenizer.from_pretrained(folder).decode(
        tokens, skip_special_tokens=True
    )


def our_text(folder, *options):
    """Greedy text of maxdiloco.generate."""
    output = folder.parent / "text.jsonl"
    options = ["prompt=hello", "max_new_tokens=12", "temperature=0", *options]
    assert generate.main([str(folder), f"output={output}", *options]) == 0
    return json.loads(output.read_text())["text"]


@pytest.mark.parametrize("family", corner(FAMILIES, ["llama, stretched", "qwen3"]))
def test_greedy_text_of_an_import_is_that_of_transformers(tmp_path, content, family):
    """Half of the families have a tokenizer that adds BOS. In float32. The text stops where that of
    transformers stops: at eos_token_id of generation_config.json, here the ninth token."""
    folder = tmp_path / "theirs"
    processor = ("none", "template")[FAMILIES.index(family) % 2]
    model = saved(folder, family, content, processor, bos_token=FIRST)
    tokens = theirs(folder, "hello")
    whole = their_tokens(model, tokens)
    model.generation_config.eos_token_id = [299, whole[8]]
    model.save_pretrained(folder)
    cut = their_tokens(model, tokens)
    assert cut[-1] == whole[8] and cut == whole[: len(cut)] != whole
    small.done("import", folder, tmp_path / "ours")
    assert our_text(tmp_path / "ours") == their_text(folder, [*tokens, *cut[:-1]])


@pytest.mark.parametrize("processor", ["none", full("template")])
def test_add_bos_of_generate_and_evaluate_overrides_the_tokenizer(tmp_path, content, processor):
    """Text and loss are those of transformers, with a BOS token and without."""
    folder, ours, length = tmp_path / "theirs", tmp_path / "ours", 8
    model = saved(folder, "llama", content, processor, bos_token=FIRST)
    small.done("import", folder, ours, f"max_target_length={length}")
    text = "def parse(self, string, position): raise an error " * 8
    (tmp_path / "text.txt").write_text(text)
    plain = transformers.AutoTokenizer.from_pretrained(folder)
    for option, bos in (("add_bos=true", True), ("add_bos=false", False)):

        def tokens(text, bos=bos):
            return [0] * bos + plain(text, add_special_tokens=False)["input_ids"]

        prompt = tokens("hello")
        assert our_text(ours, option) == their_text(folder, prompt + their_tokens(model, prompt))
        report = tmp_path / "report.json"
        options = [f"eval_dataset_path={tmp_path / 'text.txt'}", "eval_steps=-1", option]
        options += ["dataset_path=", f"base_output_directory={tmp_path}", "hardware=cpu"]
        assert evaluate.main([str(ours), f"report={report}", *options]) == 0
        (row,) = json.loads(report.read_text())["texts"]
        whole, losses = tokens(text), []
        for start in range(0, len(whole) - length + 1, length):
            ids = torch.tensor([whole[start : start + length]])
            with torch.no_grad():
                logits = model(ids).logits[0, :-1]
            found = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            losses += found.tolist()
        assert row["tokens"] == len(losses)
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
