"""Files of requests in OpenAI's batch format, answered by the server's application without a socket."""
