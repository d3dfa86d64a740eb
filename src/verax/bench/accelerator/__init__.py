"""One run on an accelerator: correctness, text, video and the delta rule, in parts that can be repeated."""
