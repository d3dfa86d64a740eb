"""LiteLLM with a server of ours: chat, stream, structured output, a tool call, embeddings.

Needs `pip install 'litellm[mcp]'`. Start `verax serve` first. VERAX_URL is its address if it is not the usual one. With
LITELLM_LOCAL_MODEL_COST_MAP=True in the environment, LiteLLM fetches no list of prices.
"""

import json
import os

import litellm

# `openai/` says that the server speaks OpenAI's API.
SERVER = {
    "api_base": os.environ.get("VERAX_URL", "http://127.0.0.1:8000/v1"),
    "api_key": os.environ.get("VERAX_API_KEY", "none"),
}
MODEL, ENCODER = "openai/verax-text", "openai/verax-embed"

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"first": NUMBER, "second": NUMBER},
        "required": ["first", "second"],
        "additionalProperties": False,
    },
}


def ask(messages: list, **options):
    """Answer of the model."""
    return litellm.completion(model=MODEL, messages=messages, temperature=0, **SERVER, **options)


def main() -> None:
    """Ask, stream, get an answer by a schema, run a tool that the model calls, and embed."""
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    print("answer:", ask(messages).choices[0].message.content)
    print("stream: ", *(chunk.choices[0].delta.content or "" for chunk in ask(messages, stream=True)), sep="")

    schema = {"name": "numbers", "schema": ADD["parameters"]}
    made = ask(messages, response_format={"type": "json_schema", "json_schema": schema})
    print("by schema:", json.loads(made.choices[0].message.content))

    choice = {"type": "function", "function": {"name": "add"}}
    answer = ask(messages, tools=[{"type": "function", "function": ADD}], tool_choice=choice).choices[0].message
    call = answer.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    total = arguments["first"] + arguments["second"]
    print("tool call:", call.function.name, arguments, "=", total)
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
    print("after it:", ask(messages).choices[0].message.content)

    vectors = litellm.embedding(model=ENCODER, input=["A fox by the river."], **SERVER).data
    print("embedding:", len(vectors[0]["embedding"]), "numbers")


if __name__ == "__main__":
    main()
