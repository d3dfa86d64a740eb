"""Hooks of schemathesis for `fuzz.py`: requests that are answered, of names that exist, and clips that cost little."""

import json
import os
import random

import requests
import schemathesis

NAMES = {"videos": os.environ.get("VERAX_CLIP", ""), "models": "verax-text"}
"""Names that exist."""

PLAIN = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
"""Prompts that are fine, for half of the bodies: else most are refused for their prompt."""

REQUIRED = {*PLAIN, "max_tokens", "tokens"}
FEW = 4
"""Most optional fields of a body. Of many, two contradict each other nearly always, and the rest is not looked at."""


@schemathesis.hook
def map_body(context, body):
    """Keep few optional fields of a random body."""
    if not isinstance(body, dict):
        return body
    choose = random.Random(json.dumps(body, sort_keys=True, default=str))
    optional = sorted(set(body) - REQUIRED)
    kept = REQUIRED.union(choose.sample(optional, k=min(choose.randint(0, FEW), len(optional))))
    plain = PLAIN if choose.random() < 0.5 else {}
    return {name: plain.get(name, value) for name, value in body.items() if name in kept}


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    """Name what is there, in about half of the cases that do not delete it."""
    operation = context.operation
    kind = operation.path.removeprefix("/v1").split("/")[1]
    if (
        not path_parameters
        or kind not in NAMES
        or operation.method == "delete"
        or len(str(path_parameters["name"])) % 2
    ):
        return path_parameters
    return {"name": NAMES[kind]}


@schemathesis.hook
def after_call(context, case, response):
    """Delete a clip that a case has queued."""
    if case.method == "POST" and case.path.endswith("/videos") and response.status_code == 200:
        requests.delete(f"{response.request.url}/{response.json()['id']}", timeout=60)
