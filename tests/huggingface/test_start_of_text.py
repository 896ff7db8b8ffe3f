"""A text starts with the tokens that transformers' tokenizer of the same folder puts there."""

import json

import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe, sentencepiece_model
from tiers import corner

pytest.importorskip("torch")
pytest.importorskip("transformers")
import jax
import tokenizers
import torch
import transformers
from tokenizers import processors

from benchmarks import parity
from maxdiloco.data import tokenizer
from maxdiloco.evaluation import run_tokenizer
from maxdiloco.flags import config
from maxdiloco.huggingface import sidecar_files
from maxdiloco.models import sampling

pytestmark = pytest.mark.xdist_group("torch")

FIRST = "<|begin_of_text|>"  # token 0 of byte_level_bpe
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
        ("<|end_of_text|>", 1), (FIRST, 0), add_prefix_space=False
    ),
    "another token": lambda engine: template(engine, "<|end_of_text|>"),
    "byte level": lambda engine: processors.ByteLevel(),
    "two": lambda engine: template(engine, "<|end_of_text|>", FIRST),
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


def imported(folder, source):
    """The tokenizer of a run that starts from an import."""
    small.done("import", source, folder / "ours", f"vocab_multiple={ROWS}")
    keys = config.load([str(folder / "ours/start.yml")], {})
    return tokenizer.build(vars(keys))


@pytest.mark.parametrize(
    ("processor", "names", "starts"),
    [
        ("none", {}, False),
        ("none", {"bos_token": FIRST, "add_bos_token": True}, False),
        ("byte level", {"tokenizer_class": "LlamaTokenizer", "bos_token": FIRST}, False),
        ("template", {}, True),
        ("template", {"bos_token": FIRST, "add_bos_token": False}, True),
        ("of llama 3", {"bos_token": None, "eos_token": "<|end_of_text|>"}, True),
        ("another token", {"bos_token": FIRST}, True),
    ],
)
def test_the_post_processor_of_tokenizer_json_decides(
    source, tmp_path, content, processor, names, starts
):
    """transformers 5 reads add_bos_token for no tokenizer.json, and bos_token_id never."""
    write_json(source, content["json"], processor, **names)
    found = imported(tmp_path, source)
    assert found.prompt("hello") == theirs(source, "hello")
    assert (found.prompt("hello") != found.encode("hello")) == starts


@pytest.mark.parametrize(
    ("names", "starts"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({"add_bos_token": True, "bos_token": None}, False),
        ({"add_bos_token": True, "bos_token": "<s>"}, True),
    ],
    ids=str,
)
def test_add_bos_token_decides_for_a_sentencepiece_model(source, tmp_path, content, names, starts):
    (source / "tokenizer.model").write_bytes(content["model"])
    write_names(source, names)
    found = imported(tmp_path, source).prompt("hello")
    assert found == theirs(source, "hello")
    assert (found[0] == 1) == starts


def test_of_two_tokens_before_a_text_the_second_is_kept(source, tmp_path, content):
    """Only one token can start a document."""
    write_json(source, content["json"], "two")
    found = imported(tmp_path, source)
    assert theirs(source, "hello") == [1, *found.prompt("hello")]


@pytest.mark.parametrize("bos", [None, 0], ids=["no bos", "bos"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_exported_tokenizer_starts_a_text_as_the_run_does(tmp_path, content, processor, bos):
    """Whatever the run's tokenizer.json puts there itself."""
    write_json(tmp_path, content["json"], processor)
    file = (tmp_path / "tokenizer.json").read_bytes()
    ours = tokenizer.of_content("huggingface", file, "here", bos, 1)
    sidecar_files.write(tmp_path, ours, 99, None)
    assert theirs(tmp_path, "hello") == ours.prompt("hello")


@pytest.mark.parametrize("bos", [None, 1], ids=["no bos", "bos"])
def test_an_exported_sentencepiece_model_starts_text_as_the_run(tmp_path, content, bos):
    ours = tokenizer.of_content("sentencepiece", content["model"], "here", bos, 2)
    sidecar_files.write(tmp_path, ours, 99, None)
    for model_type in ("llama", "qwen3", "gemma2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert theirs(tmp_path, "hello") == ours.prompt("hello"), model_type


# --- the text of small models ---------------------------------------------------------------------

FAMILIES = ("llama", "mistral", "qwen3", "olmo2", "gemma2", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family", corner(FAMILIES, ["llama", "mistral"]))
def test_greedy_text_of_an_import_is_that_of_transformers(tmp_path, content, family):
    """Half of the families have a tokenizer that adds no token. In float32."""
    case = parity.CASES[family]
    case = case._replace(changes=case.changes | {"vocab_size": 300})
    model = parity.torch_model(case)
    model.save_pretrained(tmp_path / "theirs")
    processor = ("none", "template")[FAMILIES.index(family) % 2]
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": FIRST}
    write_json(tmp_path / "theirs", content["json"], processor, **names)
    inputs = torch.tensor([theirs(tmp_path / "theirs", "hello")])
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    seen = torch.ones_like(inputs)  # token 0 is no padding
    expected = model.generate(inputs, attention_mask=seen, **options)[0].tolist()
    found = parity.imported(None, tmp_path)
    prompt = run_tokenizer.of_checkpoint(found.cfg, found.path).prompt("hello")
    tokens = sampling.sample(
        found.model,
        found.params,
        np.array([prompt], np.int32),
        max_new_tokens=8,
        temperature=0.0,
        top_k=0,
        key=jax.random.key(0),
    )
    assert [*prompt, *np.asarray(tokens[0]).tolist()] == expected
