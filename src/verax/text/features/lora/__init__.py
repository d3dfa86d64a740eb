"""LoRA adapters beside a model that runs: chosen by request, several in one batch."""
