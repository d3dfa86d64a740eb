"""Load on a server that speaks OpenAI's API: throughput, latencies, goodput, and answers that are checked."""
