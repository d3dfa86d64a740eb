"""openai-python with a server of ours: chat, stream, structured output, a tool call, embeddings.

Needs `pip install openai`. Start `verax serve` first. VERAX_URL is its address if it is not the usual one.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("VERAX_URL", "http://127.0.0.1:8000/v1"), api_key=os.environ.get("VERAX_API_KEY", "none")
)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def schema(*names: str) -> dict:
    """JSON schema of an object of numbers."""
    properties = dict.fromkeys(names, NUMBER)
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


def main() -> None:
    """Ask, stream, get an answer by a schema, run a tool that the model calls, and embed."""
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print("answer:", answer.choices[0].message.content)

    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    print("stream: ", *(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), sep="")

    made = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema("sum")}},
    )
    print("by schema:", json.loads(made.choices[0].message.content or ""))

    add = {"name": "add", "description": "Add two numbers.", "parameters": schema("first", "second")}
    called = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        tools=[{"type": "function", "function": add}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    call = called.choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    total = sum(arguments.values())
    print("tool call:", call.function.name, arguments, "=", total)
    messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print("after it:", answer.choices[0].message.content)

    vectors = client.embeddings.create(model="verax-embed", input=["A fox by the river."]).data
    print("embedding:", len(vectors[0].embedding), "numbers")


if __name__ == "__main__":
    main()
