"""Programs in a folder: a start with them traces nothing and gives the same tokens; a folder of another is refused."""

import json
import shutil

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import ops
from verax.errors import InvalidParameterError
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step import runner
from verax.text.step.program import check_supported

SIZES = dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32)
PARAMS = [SamplingParams(temperature=t, max_tokens=6, seed=3, ignore_eos=True) for t in (0, 0.8)]


def start(folder, **options):
    return LLM(folder, use_tqdm=False, **options)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(["abc", "once upon"], PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def compiled(checkpoint, tmp_path_factory):
    """Folder of programs, and the tokens of the engine that wrote them."""
    llm = start(checkpoint, structured_outputs=True, **SIZES)
    folder = tmp_path_factory.mktemp("programs") / "programs"
    assert {path.name for path in llm.write_programs(folder)} == {path.name for path in folder.glob("*.bin")}
    return folder, tokens(llm)


def no_tracing(*arguments, **options):
    raise AssertionError("traced")


def test_a_start_with_programs_traces_nothing_and_gives_the_same_tokens(checkpoint, compiled, monkeypatch):
    folder, expected = compiled
    monkeypatch.setattr(runner, "compile_program", no_tracing)
    monkeypatch.setattr(runner, "jitted_programs", no_tracing)
    llm = start(checkpoint, programs=folder, structured_outputs=True)
    before = llm.engine.runner.num_compiled()
    assert tokens(llm) == expected
    assert llm.engine.runner.num_compiled() == before == len(list(folder.glob("*.bin")))
    assert llm.max_model_len == 64  # sizes that no option names come from the folder
    # Programs for structured output may be left over.
    assert tokens(start(checkpoint, programs=str(folder), max_num_seqs=2)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_num_seqs=4), r"max_num_seqs: the programs of .* were compiled for 2, got 4"),
        (dict(kv_cache_dtype="int8"), r"cache_dtype: .* were compiled for bfloat16, got int8"),
        (dict(kv_cache_dtype="fp8"), r"cache_dtype: .* were compiled for bfloat16, got float8_e4m3fn"),
        (dict(kv_cache_memory=1 << 20, max_model_len=32), "kv_cache_memory: the cache of"),
        (dict(dtype="float32", kv_cache_dtype="bfloat16"), r"programs: .* was compiled for weights "),
        (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), "speculative_config: programs"),
    ],
)
def test_options_of_another_engine_are_named(checkpoint, compiled, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        start(checkpoint, programs=compiled[0], **options)


@pytest.fixture
def changed(compiled, tmp_path):
    """A function that copies the folder with another value in its manifest."""

    def change(section, key, value):
        folder = shutil.copytree(compiled[0], tmp_path / "programs")
        manifest = json.loads((folder / "programs.json").read_text())
        manifest[section][key] = value
        (folder / "programs.json").write_text(json.dumps(manifest))
        return folder

    return change


def test_structured_output_needs_programs_for_it(checkpoint, changed):
    folder = changed("sizes", "structured_outputs", False)
    with pytest.raises(InvalidParameterError, match=r"has no programs for them; compile with --structured-outputs"):
        start(checkpoint, programs=folder, structured_outputs=True)


def test_another_model_is_named_by_the_first_difference(compiled, tmp_path):
    other = tiny_checkpoint(tmp_path, intermediate_size=64)
    with pytest.raises(InvalidParameterError, match=r"compiled for model.intermediate_size 96, but here it is 64"):
        start(other, programs=compiled[0])


def test_other_implementations_are_refused(checkpoint, compiled):
    with (
        ops.use_implementations(sample="bisect"),
        pytest.raises(InvalidParameterError, match=r"implementations.sample"),
    ):
        start(checkpoint, programs=compiled[0])


@pytest.mark.parametrize("key", ["jaxlib", "platform", "device", "processor", "source"])
def test_another_version_or_machine_is_refused(checkpoint, changed, key):
    with pytest.raises(InvalidParameterError, match=rf"was compiled for {key} another, but here it is"):
        start(checkpoint, programs=changed("made_for", key, "another"))


def test_a_damaged_folder_is_an_error_that_names_it(checkpoint, compiled, tmp_path):
    with pytest.raises(InvalidParameterError, match=r"programs: .* verax compile -o FOLDER makes one"):
        start(checkpoint, programs=tmp_path)
    folder = shutil.copytree(compiled[0], tmp_path / "programs")
    (folder / "decode_1x1.bin").write_bytes(b"no pickle")
    with pytest.raises(InvalidParameterError, match=r"decode_1x1.bin cannot be loaded"):
        start(checkpoint, programs=folder)


@pytest.mark.parametrize("option", [{"enable_lora": True}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_an_engine_with_further_programs_is_refused(option):
    with pytest.raises(InvalidParameterError, match=f"{next(iter(option))}: programs are not written"):
        check_supported(EngineConfig(**option))
