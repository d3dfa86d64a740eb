"""Adapters from their folders: kept by number, and refused by one error if they belong to another model."""

import pytest

from tests.support.adapters import adapter_weights, save_adapter
from verax.errors import CheckpointError, InvalidParameterError
from verax.text.features.lora import AdaptedLayers, AdapterLoader, LoRARequest

PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def loader():
    layers = AdaptedLayers({PATH: (6, 8)}, {PATH: PATH, "layers.0.self_attn.q_proj": PATH}, 1, 4, "float32")
    return AdapterLoader(layers, 2)


@pytest.fixture
def make(tmp_path):
    def save(number=1, sizes=None, **settings):
        weights = adapter_weights(sizes or {PATH: (6, 8)}, rank=settings.get("rank", 4))
        return LoRARequest(f"a{number}", number, save_adapter(tmp_path / f"a{number}", weights, **settings))

    return save


def test_an_adapter_is_read_once_and_kept_by_its_number(loader, make):
    request = make()
    loaded = loader.load(request)
    assert loader.load(LoRARequest("other name", 1, str(request.lora_path))) is loaded
    assert [matrix.shape for matrix in loaded.matrices[PATH]] == [(4, 8), (6, 4)]


def test_the_least_recently_used_is_forgotten_and_read_again(loader, make):
    requests = [make(number) for number in (1, 2, 3)]
    first, second = loader.load(requests[0]), loader.load(requests[1])
    loader.load(requests[0])
    loader.load(requests[2])
    assert loader.load(requests[0]) is first
    assert loader.load(requests[1]) is not second


def test_modules_go_by_their_names_in_another_layout(loader, make):
    assert PATH in loader.load(make(sizes={"layers.0.self_attn.q_proj": (6, 8)})).matrices


def test_a_number_stands_for_one_folder(loader, make):
    loader.load(make())
    with pytest.raises(InvalidParameterError, match="lora_int_id: 1 stands for the adapter in"):
        loader.load(LoRARequest("b", 1, make(2).lora_path))


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        ({"rank": 5}, InvalidParameterError, r"max_lora_rank: .* has rank 5, .* pass LLM\(..., max_lora_rank=5\)"),
        ({"sizes": {PATH: (6, 9)}}, CheckpointError, r"another base.*q_proj \(adapter \[6, 9\], model \[6, 8\]\)"),
        ({"sizes": {"lm_head": (6, 8)}}, CheckpointError, "no layers .* lm_head; it was trained for somebody/tiny"),
        ({"sizes": {f"model.h.{i}.c": (6, 8) for i in range(9)}}, CheckpointError, r"model\.h\.4\.c and 4 more"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(loader, make, made, error, says):
    with pytest.raises(error, match=says):
        loader.load(make(**made))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (("", 1, "path"), "lora_name"),
        ((3, 1, "path"), "lora_name"),
        (("a", 0, "path"), "lora_int_id: expected a whole number of at least 1, got 0"),
        (("a", True, "path"), "lora_int_id"),
        (("a", "1", "path"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
        (("a", 1, None), "lora_path"),
    ],
)
def test_a_request_with_wrong_values_is_refused(values, says):
    with pytest.raises(InvalidParameterError, match=says):
        LoRARequest(*values)
