"""Folders that sentence-transformers writes, with sentence-transformers as the oracle: modules, poolings, prompts."""

import inspect
import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")

from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

from tests.parity.test_encoders import QWEN, filled, save
from tests.parity.test_rerankers import FAMILIES
from tests.support.tiny_encoder import qwen_tokenizer, random_sentences
from verax import Encoder, Reranker
from verax.embed import modules, settings
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

SENTENCES = random_sentences(12, seed=4, most=20)
PROMPT = "the house : "
D = 48


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a random BERT."""
    folder = tmp_path_factory.mktemp("bert")
    save(folder, "Bert")
    return folder


def saved(base, folder, *makers, **options):
    """A model of these modules after a transformer, saved to a folder and loaded from it."""
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Transformer(str(base)), *(make() for make in makers)], **options)
    for module in list(model)[1:]:
        for weight in module.parameters():
            weight.data += torch.randn(weight.shape) * 0.3
    model.save_pretrained(str(folder))
    return SentenceTransformer(str(folder))


def assert_same(model, folder, **options):
    """Vectors are sentence-transformers', of length 1."""
    expected = model.encode(SENTENCES, normalize_embeddings=True, **options)
    encoder = Encoder(folder, show_progress=False)
    got = encoder.encode(SENTENCES, **options)
    assert got.shape == expected.shape == (len(SENTENCES), encoder.dimension)
    np.testing.assert_allclose(got, expected, atol=1e-5)


MEAN = lambda: Pooling(D, "mean")
TANH = lambda: Dense(D, 32)
TOKENS = dict(module_input_name="token_embeddings")
PROGRAMS = {
    "Dense, Normalize": [MEAN, TANH, Normalize],
    "Normalize, Dense": [MEAN, Normalize, TANH],
    "Dense of tokens": [lambda: Dense(D, 32, **TOKENS), lambda: Pooling(32, "max")],
    "Normalize of tokens": [lambda: Normalize(**TOKENS), MEAN],
    "two of Dense": [MEAN, TANH, lambda: Dense(32, 20, activation_function=torch.nn.ReLU())],
    "residual": [MEAN, lambda: Dense(D, D, use_residual=True, activation_function=torch.nn.GELU())],
    "projected residual": [MEAN, lambda: Dense(D, 32, bias=False, use_residual=True)],
    "LayerNorm": [MEAN, lambda: LayerNorm(D), Dropout],
    "concatenation": [lambda: Pooling(D, ("cls", "mean", "max")), lambda: Dense(3 * D, 16)],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_modules_run_in_their_order_on_the_values_that_they_name(program, base, tmp_path):
    assert_same(saved(base, tmp_path, *PROGRAMS[program]), tmp_path)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", [*Pooling.POOLING_MODES, ("lasttoken", "weightedmean")])
def test_every_pooling_with_and_without_its_prompt(mode, include_prompt, base, tmp_path):
    model = saved(base, tmp_path, lambda: Pooling(D, mode, include_prompt=include_prompt))
    assert_same(model, tmp_path)
    assert_same(model, tmp_path, prompt=PROMPT)


def test_flags_of_older_files_are_concatenated_in_their_order(base, tmp_path):
    model = saved(base, tmp_path, MEAN)
    path = tmp_path / "1_Pooling" / "config.json"
    flags = {f"pooling_mode_{name}": True for name in ("lasttoken", "mean_tokens", "cls_token")}
    path.write_text(json.dumps({"word_embedding_dimension": D, **flags, "pooling_mode_max_tokens": False}))
    model = SentenceTransformer(str(tmp_path))
    assert_same(model, tmp_path)
    assert Encoder(tmp_path).settings.pooling == "cls+mean+lasttoken"


def test_prompts_and_dimensions_of_the_files_are_the_defaults(base, tmp_path):
    prompts = {"query": PROMPT, "document": "fox "}
    model = saved(base, tmp_path, MEAN, Normalize, prompts=prompts, default_prompt_name="query", truncate_dim=7)
    assert_same(model, tmp_path)
    encoder = Encoder(tmp_path)
    for kind in ("query", "document"):
        expected = getattr(model, f"encode_{kind}")(SENTENCES, normalize_embeddings=True)
        np.testing.assert_allclose(getattr(encoder, f"encode_{kind}")(SENTENCES), expected, atol=1e-5)
    assert Encoder(tmp_path, dimensions=40).dimension == 40
    assert_same(
        saved(base, tmp_path / "none", MEAN, prompts={"query": PROMPT}, default_prompt_name="document"),
        tmp_path / "none",
    )


def test_texts_in_lower_case_keep_their_special_tokens(base, tmp_path):
    texts = ["The CAT [SEP] sat", "a fox"]
    saved(base, tmp_path / "vectors", MEAN)
    FAMILIES["bert"](tmp_path / "base")
    CrossEncoder(str(tmp_path / "base")).save_pretrained(str(tmp_path / "scores"))
    for folder in (tmp_path / "vectors", tmp_path / "scores"):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["normalizer"]["lowercase"] = False
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        path = folder / "sentence_bert_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "do_lower_case": True}))
    theirs = SentenceTransformer(str(tmp_path / "vectors")).encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(Encoder(tmp_path / "vectors").encode(texts), theirs, atol=1e-5)
    theirs = CrossEncoder(str(tmp_path / "scores")).predict([("THE cat [SEP]", text) for text in texts])
    np.testing.assert_allclose(Reranker(tmp_path / "scores").score("THE cat [SEP]", texts), theirs, atol=1e-5)


@pytest.mark.parametrize("precision", modules.PRECISIONS)
def test_vectors_of_fewer_bits_are_those_of_quantize_embeddings(precision, base):
    from sentence_transformers.util import quantize_embeddings

    encoder = Encoder(base)
    plain = encoder.encode(SENTENCES)
    ranges = np.stack([plain.min(axis=0), plain.max(axis=0)]) * 0.5  # some numbers lie outside
    for options in ({}, {"ranges": ranges}):
        expected = quantize_embeddings(plain, precision, **options)
        got = encoder.encode(SENTENCES, precision=precision, **options)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_a_transformer_in_a_folder_and_pickled_weights_are_read(base, tmp_path):
    model = saved(base, tmp_path, MEAN, TANH)
    folder = tmp_path / "0_Transformer"
    folder.mkdir()
    for path in [*tmp_path.iterdir()]:
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json", "README.md"):
            path.rename(folder / path.name)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[0]["path"] = folder.name
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    dense = tmp_path / "2_Dense"
    torch.save(model[2].state_dict(), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()
    assert_same(SentenceTransformer(str(tmp_path)), tmp_path)


def test_a_folder_without_modules_is_pooled_as_there(base, tmp_path):
    np.testing.assert_allclose(
        Encoder(base).encode(SENTENCES),
        SentenceTransformer(str(base)).encode(SENTENCES, normalize_embeddings=True),
        atol=1e-5,
    )
    save(tmp_path, "Qwen3")
    for kind, pooling in (("Qwen3Model", "mean"), ("Qwen3ForCausalLM", "lasttoken")):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
        assert Encoder(tmp_path).settings.pooling == pooling
        assert [module.pooling_mode for module in list(SentenceTransformer(str(tmp_path)))[1:]] == [pooling]


@pytest.mark.parametrize(
    ("makers", "change", "error", "says"),
    [
        ([TANH], None, UnsupportedModelError, "reads sentence_embedding, which no module before it makes"),
        ([lambda: Dense(D, 32, **TOKENS)], None, UnsupportedModelError, "no module makes a sentence_embedding"),
        ([lambda: Pooling(D, "max"), lambda: Dense(D + 1, 8)], None, CheckpointError, "takes 49 numbers, .* has 48"),
        ([MEAN], {"type": "sentence_transformers.models.LSTM"}, UnsupportedModelError, "models.LSTM is not supported"),
        ([MEAN], {"type": "custom.Pooling"}, UnsupportedModelError, "custom.Pooling is not supported"),
        ([MEAN], {"path": "../x"}, CheckpointError, "is not a path within the folder"),
    ],
)
def test_programs_that_give_no_vector_are_refused_by_name(makers, change, error, says, base, tmp_path):
    torch.manual_seed(0)
    SentenceTransformer(modules=[Transformer(str(base)), *(make() for make in makers)]).save_pretrained(str(tmp_path))
    if change is not None:
        path = tmp_path / "modules.json"
        listed = json.loads(path.read_text())
        path.write_text(json.dumps([listed[0], {**listed[1], **change}]))
    with pytest.raises(error, match=says):
        Encoder(tmp_path)


ACTIVATIONS = [torch.nn.Identity, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Softplus]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_cross_encoder_has_its_activation_and_prompt(activation, tmp_path):
    FAMILIES["bert"](tmp_path / "base")
    prompts = {"query": PROMPT} if activation is torch.nn.Tanh else {}
    model = CrossEncoder(str(tmp_path / "base"), activation_fn=activation(), prompts=prompts)
    model.default_prompt_name = "query" if prompts else None
    model.save_pretrained(str(tmp_path / "saved"))
    pairs = [("who sat", sentence) for sentence in SENTENCES]
    expected = CrossEncoder(str(tmp_path / "saved")).predict(pairs)
    reranker = Reranker(tmp_path / "saved")
    np.testing.assert_allclose(reranker.score("who sat", SENTENCES), expected, atol=1e-5)
    if prompts:
        plain = reranker.score("who sat", SENTENCES, prompt="")
        np.testing.assert_allclose(reranker.score(PROMPT + "who sat", SENTENCES, prompt=""), expected, atol=1e-5)
        assert np.abs(plain - expected).max() > 1e-3


HEAD = [
    lambda: Pooling(D, "cls"),
    lambda: Dense(D, 32, activation_function=torch.nn.GELU()),
    lambda: LayerNorm(32),
    lambda: Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores"),
]


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_an_encoder_with_modules_is_a_cross_encoder(family, tmp_path):
    save(tmp_path / "base", family)
    modules = [Transformer(str(tmp_path / "base")), *(make() for make in HEAD)]
    model = CrossEncoder(modules=modules, activation_fn=torch.nn.Identity(), prompts={"query": PROMPT})
    model.save_pretrained(str(tmp_path))
    expected = model.predict([("who sat", sentence) for sentence in SENTENCES], prompt_name="query")
    assert expected.std() > 0.01
    got = Reranker(tmp_path).score("who sat", SENTENCES, prompt_name="query")
    np.testing.assert_allclose(got, expected, atol=1e-5)
    path = tmp_path / "4_Dense" / "config.json"
    path.write_text(path.read_text().replace('"scores"', "null"))
    with pytest.raises(UnsupportedModelError, match="no module makes scores"):
        Reranker(tmp_path)


CHAT = """{%- macro text(role, default) -%}
{%- for message in messages if message.role == role -%}
{{ message.content if message.content is string else message.content[0].text }}
{%- else -%}{{ default }}{%- endfor -%}{%- endmacro -%}
<Instruct>: {{ text("system", "find") }}\n<Query>: {{ text("query") }}\n<Document>: {{ text("document") }}<|im_end|>
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


@pytest.mark.parametrize(
    ("form", "announces", "answers", "activation"),
    [("flat", True, ("yes", "no"), torch.nn.Identity), ("structured", False, ("yes", None), torch.nn.Sigmoid)],
)
def test_language_models_score_by_the_logits_of_their_answers(form, announces, answers, activation, tmp_path):
    qwen_tokenizer(tmp_path / "base")
    sizes = {**QWEN, "max_position_embeddings": 100}
    filled(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))).save_pretrained(tmp_path / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "base")
    how = {"method": "forward", "method_output_name": "logits"}
    transformer = Transformer(
        str(tmp_path / "base"),
        transformer_task="text-generation",
        modality_config={"text": how, "message": {**how, "format": form}},
        module_output_name="causal_logits",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}} if announces else None,
    )
    score = LogitScore(*(answer and tokenizer.convert_tokens_to_ids(answer) for answer in answers))
    model = CrossEncoder(modules=[transformer, score], activation_fn=activation(), prompts={"web": "search", "no": ""})
    model.default_prompt_name = "web"
    model.save_pretrained(str(tmp_path / "saved"))
    model, reranker = CrossEncoder(str(tmp_path / "saved")), Reranker(tmp_path / "saved")
    pairs = [("who sat", sentence) for sentence in SENTENCES]
    for theirs, ours in (
        ({}, {}),
        ({"prompt": "a fox"}, {"instruction": "a fox"}),
        ({"prompt_name": "no"}, {"prompt_name": "no"}),
    ):
        expected = model.predict(pairs, **theirs)
        assert expected.std() > 0.01
        np.testing.assert_allclose(reranker.score("who sat", SENTENCES, **ours), expected, atol=1e-5)
        assert 0 < reranker.truncated < len(SENTENCES)


WITHOUT_EFFECT = {
    "config_sentence_transformers.json": ("model_type", "__version__", "similarity_fn_name", "keep_in_fp32_modules"),
    "Dropout": ("dropout",),
    "Pooling": ("embedding_dimension", "word_embedding_dimension"),
    "Transformer": ("unpad_inputs", "module_output_name", "tokenizer_name_or_path", "backend", "model_name_or_path"),
}
"""Keys of the files of sentence-transformers' classes that change no vector and no score, or follow from others."""

OTHER_VALUES = {
    "activation_fn": ["torch.nn.modules.activation.Tanh"],
    "activation_function": ["torch.nn.modules.activation.ReLU"],
    "default_prompt_name": ["query"],
    "module_input_name": ["token_embeddings"],
    "module_output_name": ["token_embeddings", "sentence_embedding"],
    "pooling_mode": ["cls", ["mean", "max"]],
    "prompts": [{"query": "x"}],
    "transformer_task": ["fill-mask"],
    "max_seq_length": [7],
    "truncate_dim": [7],
}
"""Values of keys that have a meaning; of others, each kind of JSON value is tried."""


def known_keys(module):
    """Keys of the file of a module that the library reads or writes."""
    arguments = inspect.signature(module.__init__).parameters
    renamed = {**getattr(module, "config_key_renames", {}), **getattr(module, "_LEGACY_KEYS", {})}
    flags = [flag for flag in modules._FLAGS if module is Pooling]
    return {*module.config_keys, *arguments, *renamed, *flags} - {"self", "args", "kwargs", "init_weight", "init_bias"}


def read(folder, cross=False):
    """All that is read of a folder's files, or the message of a refusal."""

    def plain(value):
        return value if isinstance(value, (str, int, float, tuple, type(None))) or callable(value) else repr(value)

    try:
        if cross:
            reranker = Reranker(folder, show_progress=False)
            scorer = reranker._scorer
            return scorer._activation, scorer.max_length, scorer._tokenizer.encode("The CAT"), reranker._prompts
        program = modules.load_modules(folder, D, dtype=np.float32)
        steps = [
            {name: plain(value) for name, value in vars(step).items() if not name.startswith("_")}
            for step in program.steps
        ]
        transformer = settings.EncoderSettings.from_folder(folder, positions=64, pooling=program.pooling)
    except (CheckpointError, InvalidParameterError, UnsupportedModelError) as error:
        return str(error)
    return [*zip(map(type, program.steps), program.names, steps, strict=True)], transformer


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A folder with each of the modules that are supported."""
    folder = tmp_path_factory.mktemp("whole")
    saved(
        base, folder, MEAN, TANH, lambda: LayerNorm(32), Dropout, lambda: Dense(32, 32), Normalize, lambda: Dense(32, 8)
    )
    return folder


FILES = [
    ("sentence_bert_config.json", Transformer),
    ("1_Pooling/config.json", Pooling),
    ("2_Dense/config.json", Dense),
    ("3_LayerNorm/config.json", LayerNorm),
    ("4_Dropout/config.json", Dropout),
    ("6_Normalize/config.json", Normalize),
]


def silent(folder, file, keys, listed, **options):
    """Keys of a file whose change neither changes what is read nor is refused by name."""
    path, keys_without_effect = folder / file, set()
    text = path.read_text()
    config, expected = json.loads(text), read(folder, **options)
    assert not isinstance(expected, str)
    for key in {*config, *keys} - {*listed}:
        results = []
        for other in OTHER_VALUES.get(key, [True, False, 3, "x", ["x"], {"x": 1}]):
            path.write_text(json.dumps({**config, key: other}))
            results.append(read(folder, **options))
        refusals = [result for result in results if isinstance(result, str)]
        if path.parent == folder:  # a module's size may be refused by its weights or by the next module
            assert all(key in refusal for refusal in refusals), (key, refusals)
        if all(result == expected for result in results):
            keys_without_effect.add(key)
    path.write_text(text)
    return keys_without_effect


@pytest.mark.parametrize(("file", "module"), FILES, ids=lambda value: getattr(value, "__name__", None))
def test_a_change_of_any_key_of_a_module_changes_the_vectors_or_is_refused(file, module, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    keys, listed = known_keys(module), WITHOUT_EFFECT.get(module.__name__, ())
    assert silent(tmp_path / "a", file, keys, listed) == set()


def test_a_change_of_any_key_of_a_model_changes_its_results_or_is_refused(whole, tmp_path):
    file = "config_sentence_transformers.json"
    model = SentenceTransformer(modules=[Normalize()], truncate_dim=3)
    shutil.copytree(whole, tmp_path / "a")
    assert silent(tmp_path / "a", file, model._get_model_config(), WITHOUT_EFFECT[file]) == set()
    FAMILIES["bert"](tmp_path / "base")
    CrossEncoder(str(tmp_path / "base")).save_pretrained(str(tmp_path / "b"))
    keys = json.loads((tmp_path / "b" / file).read_text())
    assert silent(tmp_path / "b", file, keys, WITHOUT_EFFECT[file], cross=True) == set()
