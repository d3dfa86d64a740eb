"""`/v1/models` and `/health`."""

from tests.serve.conftest import Api
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server


def test_models_are_listed_under_each_name_and_found_by_it(api):
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "alias"]
    assert listed["data"][0]["max_model_len"] == 128
    assert api.get("/v1/models/alias").json()["id"] == "alias"
    assert api.get("/v1/models/no/such").json()["error"]["code"] == "model_not_found"


def test_models_of_other_kinds_are_listed_before_they_are_loaded():
    def fail():
        raise AssertionError

    api = Api(create_app(Server(encoder=LazyModel("e/mbed", fail), videos=LazyModel("v", fail))))
    assert [model["id"] for model in api.get("/v1/models").json()["data"]] == ["e/mbed", "v"]
    assert api.get("/v1/models/e/mbed").json()["object"] == "model"


def test_a_server_without_a_text_model_says_so():
    body = {"messages": [{"role": "user", "content": "a"}]}
    api = Api(create_app(Server()))
    assert api.refused("/v1/chat/completions", body, 404)["code"] == "model_not_found"
    assert api.refused("/v1/completions", {"prompt": "a"}, 404)["code"] == "model_not_found"
    assert api.refused("/tokenize", {"prompt": "a"}, 404)["code"] == "model_not_found"


def test_a_healthy_server_says_so(api):
    assert api.get("/health").json() == {"status": "ok"}
