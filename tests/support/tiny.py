"""Tiny random checkpoint with its own tokenizer and chat template, as files, for most tests of text."""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from verax import checkpoint
from verax.checkpoint.load import is_transposed
from verax.models import causal_lm

END, TURN_END, TURN_START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "once upon a time there was a small fox who liked the river",
    "the café is naïve, 12 + 30 = 42! 🦊 日本",
    "abc def",
] * 4


def tiny_config(family="qwen3", **changes):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "eos_token_id": [1, 0],
        **changes,
    }


HYBRID = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
)
"""Changes of `tiny_config` for family qwen3_5_text: recurrent layers before and after attention."""

WINDOWED = dict(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    use_sliding_window=True,
    sliding_window=10,
)
"""Changes of `tiny_config`: layers that see 10 tokens before and after one that sees everything."""


def random_weights(config, seed=0, prediction_head=False):
    """Random weights of the model of a config.json; `prediction_head`: with a head of multi-token prediction."""
    architecture, sizes = causal_lm(config, prediction_head=prediction_head)
    return weights_of(nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0))), seed)


def weights_of(abstract, seed=0):
    """Random weights by key: matrices preserve the scale of their inputs, norms and biases differ from 1 and 0.

    Decays of a recurrent layer are between a few tokens and thousands.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        key = ".".join(map(str, path))
        if key.endswith("A_log"):
            weights[key] = 2 * noise - 4
        elif len(leaf.shape) > 1:
            weights[key] = 1.5 * noise * leaf.shape[-1] ** -0.5
            if is_transposed(abstract, key):
                weights[key] = weights[key].swapaxes(1, 2).copy()
        else:
            weights[key] = 0.3 * noise + (not key.endswith("bias"))
    return weights


def tiny_tokenizer(folder, vocab_size=320, chat_template=CHAT_TEMPLATE):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, TURN_END, TURN_START],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "pad_token": END}
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tiny_checkpoint(
    folder, *, family="qwen3", seed=0, dtype=None, chat_template=CHAT_TEMPLATE, prediction_head=False, **changes
):
    """A folder that `LLM(folder)` loads; `changes` go to config.json."""
    config = tiny_config(family, **changes)
    weights = random_weights(config, seed, prediction_head)
    checkpoint.save(weights, folder, config=config, generation_config={"temperature": 0.7}, dtype=dtype)
    return tiny_tokenizer(folder, config["vocab_size"], chat_template)
