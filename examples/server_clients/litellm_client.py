"""LiteLLM with a server of ours. Needs `pip install litellm`; no test runs it.

Start `verax serve` first.
"""

import litellm

answer = litellm.completion(
    model="openai/verax-text",  # `openai/` says that the server speaks OpenAI's API
    api_base="http://127.0.0.1:8000/v1",
    api_key="none",
    messages=[{"role": "user", "content": "What is 47 + 38?"}],
    temperature=0,
)
print(answer.choices[0].message.content)
