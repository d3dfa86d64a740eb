"""openai-python with a server of ours: chat, stream, tools, structured output. Needs `pip install openai`.

Start `verax serve` first. VERAX_URL is its address if it is not the usual one.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("VERAX_URL", "http://127.0.0.1:8000/v1"), api_key=os.environ.get("VERAX_API_KEY", "none")
)


def main() -> None:
    """Ask, stream, and get an answer by a schema."""
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print("answer:", answer.choices[0].message.content)

    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    print("stream: ", *(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), sep="")

    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
    )
    print("by schema:", json.loads(made.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
