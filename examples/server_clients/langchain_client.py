"""LangChain with a server of ours. Needs `pip install langchain-openai`; no test runs it.

Start `verax serve` first.
"""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", model="verax-text", temperature=0)

print(model.invoke("What is 47 + 38?").content)
for chunk in model.stream("What is 47 + 38?"):
    print(chunk.content, end="", flush=True)
print()
