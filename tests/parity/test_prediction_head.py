"""The head of multi-token prediction compared with its definition in vLLM, written on transformers' layers."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flax import nnx

from tests.support.tiny import HYBRID, random_weights, tiny_config
from verax.models import causal_attention, causal_lm
from verax.models.causal_lm import predicted_hidden_states

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}
FAMILIES = {
    "qwen3": ({"num_nextn_predict_layers": 1}, "qwen3.modeling_qwen3", "Qwen3"),
    "qwen3_5_text": ({**HYBRID, "mtp_num_hidden_layers": 1}, "qwen3_5.modeling_qwen3_5", "Qwen3_5"),
    "qwen3_5_moe_text": (
        {**HYBRID, **MOE, "mtp_num_hidden_layers": 1},
        "qwen3_5_moe.modeling_qwen3_5_moe",
        "Qwen3_5Moe",
    ),
    "qwen3_next": ({**HYBRID, **MOE}, "qwen3_next.modeling_qwen3_next", "Qwen3Next"),
}


def in_torch(config, module, name, weights, hidden, tokens):
    """`norm(layer(fc([norm(embedding of t + 1), norm(hidden at t)])))`, as `Qwen3NextMultiTokenPredictor` has it."""
    classes = vars(__import__(f"transformers.models.{module}", fromlist=["x"]))
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    sizes = config_class(**{**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    sizes._attn_implementation = "eager"
    norm_class = classes[f"{name}RMSNorm"]
    rotary_class = classes.get(f"{name}TextRotaryEmbedding") or classes[f"{name}RotaryEmbedding"]
    of = {key.removeprefix("mtp."): torch.tensor(np.asarray(w)) for key, w in weights.items() if key.startswith("mtp.")}

    def norm(key):
        made = norm_class(sizes.hidden_size, eps=sizes.rms_norm_eps)
        made.weight.data = of[f"{key}.weight"]
        return made

    layer = classes[f"{name}DecoderLayer"](sizes, 0).eval()
    prefix = "layers.0."
    layer.load_state_dict({key.removeprefix(prefix): w for key, w in of.items() if key.startswith(prefix)})
    B, T = tokens.shape
    embedded = torch.tensor(np.asarray(weights["model.embed_tokens.weight"]))[torch.tensor(tokens).long()]
    x = torch.cat([norm("pre_fc_norm_embedding")(embedded), norm("pre_fc_norm_hidden")(torch.tensor(hidden))], dim=-1)
    x = x @ of["fc.weight"].T
    positions = torch.arange(T)[None].expand(B, T)
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    out = layer(
        x,
        position_embeddings=rotary_class(sizes)(x, positions),
        attention_mask=mask,
        position_ids=positions,
    )
    return norm("norm")(out[0] if isinstance(out, tuple) else out).detach().numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_equals_its_definition_in_torch(family):
    changes, module, name = FAMILIES[family]
    config = tiny_config(family, **changes)
    weights = random_weights(config, seed=3, prediction_head=True)
    architecture, sizes = causal_lm(config, prediction_head=True)
    abstract = nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    filled = [(p, leaf.replace(jnp.asarray(weights[".".join(map(str, p))]))) for p, leaf in nnx.to_flat_state(state)]
    model = nnx.merge(graph, nnx.from_flat_state(filled))
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 13, sizes.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, sizes.vocab_size, (2, 13))
    positions = jnp.broadcast_to(jnp.arange(13), (2, 13))
    ours = predicted_hidden_states(
        model, jnp.asarray(hidden), jnp.asarray(tokens), positions, causal_attention(jnp.float32)
    )
    theirs = in_torch(config, module, name, weights, hidden, tokens)
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
