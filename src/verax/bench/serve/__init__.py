"""Load on a server that speaks OpenAI's API: throughput, latencies, and answers that are checked."""
