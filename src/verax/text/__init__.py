"""The text engine: request, scheduler, blocks, runner, sampler, text."""
