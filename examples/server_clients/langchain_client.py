"""LangChain with a server of ours: chat, stream, structured output, a tool call, embeddings.

Needs `pip install langchain-openai`. Start `verax serve` first. VERAX_URL is its address if it is not the usual one.
"""

import os

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

url, key = os.environ.get("VERAX_URL", "http://127.0.0.1:8000/v1"), os.environ.get("VERAX_API_KEY", "none")
model = ChatOpenAI(base_url=url, api_key=key, model="verax-text", temperature=0)
# LangChain would fetch the vocabulary of one of OpenAI's models to count tokens; the server counts by itself.
encoder = OpenAIEmbeddings(base_url=url, api_key=key, model="verax-embed", check_embedding_ctx_length=False)


class Sum(BaseModel):
    """A sum."""

    sum: int = Field(ge=0, le=999)


@tool
def add(first: int = Field(ge=0, le=99), second: int = Field(ge=0, le=99)) -> int:
    """Add two numbers."""
    return first + second


def main() -> None:
    """Ask, stream, get an answer by a schema, run a tool that the model calls, and embed."""
    question = HumanMessage("What is 47 + 38?")
    print("answer:", model.invoke([question]).content)
    print("stream: ", *(chunk.content for chunk in model.stream([question])), sep="")
    print("by schema:", model.with_structured_output(Sum).invoke([question]).model_dump())

    answer = model.bind_tools([add], tool_choice="add", strict=True).invoke([question])
    call = answer.tool_calls[0]
    result = add.invoke(call)
    print("tool call:", call["name"], call["args"], "=", result.content)
    print("after it:", model.invoke([question, answer, result]).content)

    print("embedding:", len(encoder.embed_query("A fox by the river.")), "numbers")


if __name__ == "__main__":
    main()
