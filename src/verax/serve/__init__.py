"""Server of the engines over HTTP, with the APIs of OpenAI, and the page."""
