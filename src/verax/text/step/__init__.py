"""The compiled step: program, sizes, runner, sampler."""
