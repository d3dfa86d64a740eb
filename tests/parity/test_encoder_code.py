"""Encoders that transformers has no class for, against the definitions in the code that their checkpoints name."""

import json
import math

import numpy as np
import pytest
import safetensors.torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn
from torch.nn import functional as F

from tests.parity.test_encoders import LONG, filled, relative, save, states
from tests.support.tiny_encoder import sentence_files, tiny_tokenizer
from verax import Encoder
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models import encoder

SENTENCES = LONG[-6:]
D, FF, HEADS, LAYERS, EXPERTS = 48, 80, 6, 3, 5


def vectors(model, folder):
    """Mean of the states of each sentence's tokens, one sentence at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [model(torch.tensor(tokenizer(text).input_ids)).mean(dim=0).numpy() for text in SENTENCES]
    return np.stack(rows)


def write(folder, model, config):
    tiny_tokenizer(folder)
    sentence_files(folder)
    weights = {key: weight.contiguous() for key, weight in model.state_dict().items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def heads(x):
    return x.view(len(x), HEADS, -1).transpose(0, 1)


def attend(q, k, v, bias=0.0):
    scores = heads(q) @ heads(k).transpose(1, 2) / math.sqrt(D // HEADS) + bias
    return (scores.softmax(dim=-1) @ heads(v)).transpose(0, 1).reshape(len(q), D)


class Embeddings(nn.ModuleDict):
    def __init__(self, types, **norm):
        super().__init__(
            dict(word_embeddings=nn.Embedding(60, D), token_type_embeddings=nn.Embedding(types, D), **norm)
        )

    def forward(self, ids):
        return self["word_embeddings"](ids) + self["token_type_embeddings"].weight[0]


class NomicExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.ModuleDict(dict(layer=nn.Linear(D, EXPERTS, bias=False)))
        self.experts = nn.Module()
        self.experts.mlp = nn.ParameterDict({name: torch.empty(EXPERTS * FF, D) for name in ("w1", "w2")})
        self.experts.bias = nn.Parameter(torch.empty(D))

    def forward(self, x):
        weights, chosen = self.router["layer"](x).softmax(dim=-1).topk(2, dim=-1)
        w1, w2 = (self.experts.mlp[name].view(EXPERTS, FF, D) for name in ("w1", "w2"))
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for weight, e in zip(weights[t], chosen[t], strict=True):
                out[t] += weight * (F.gelu(x[t] @ w1[e].T) @ w2[e])
        return out + self.experts.bias


class NomicLayer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.attn = nn.ModuleDict(dict(Wqkv=nn.Linear(D, 3 * D), out_proj=nn.Linear(D, D)))
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp = NomicExperts() if index % 2 == 1 else nn.ModuleDict(dict(fc1=nn.Linear(D, FF), fc2=nn.Linear(FF, D)))

    def forward(self, x):
        q, k, v = self.attn["Wqkv"](x).chunk(3, dim=-1)
        size = D // HEADS
        angles = torch.arange(len(x)).float()[:, None] * 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

        def rotate(y):
            y = y.view(len(y), HEADS, size)
            first, second = y.chunk(2, dim=-1)
            return (y * cos + torch.cat((-second, first), dim=-1) * sin).reshape(len(y), D)

        x = self.norm1(self.attn["out_proj"](attend(rotate(q), rotate(k), v)) + x)
        dense = isinstance(self.mlp, nn.ModuleDict)
        return self.norm2((self.mlp["fc2"](F.gelu(self.mlp["fc1"](x))) if dense else self.mlp(x)) + x)


class NomicMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.emb_ln = Embeddings(1), nn.LayerNorm(D)
        self.encoder = nn.ModuleDict(dict(layers=nn.ModuleList(NomicLayer(i) for i in range(LAYERS))))

    def forward(self, ids):
        x = self.emb_ln(self.embeddings(ids))
        for layer in self.encoder["layers"]:
            x = layer(x)
        return x


NOMIC = dict(
    **dict(model_type="nomic_bert", n_embd=D, n_head=HEADS, n_layer=LAYERS, n_inner=FF, n_positions=512, vocab_size=60),
    **dict(type_vocab_size=1, layer_norm_epsilon=1e-5, rotary_emb_base=10000.0, activation_function="gelu"),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
    **dict(num_experts=EXPERTS, moe_top_k=2, moe_every_n_layers=2, moe_normalize_expert_weights=False),
)


def test_nomic_v2_has_experts_in_every_second_layer(tmp_path):
    theirs = filled(NomicMoe())
    write(tmp_path, theirs, NOMIC)
    expected = vectors(theirs, tmp_path)
    for batch_size in (None, 3):
        ours = Encoder(tmp_path).encode(SENTENCES, normalize=False, batch_size=batch_size)
        assert relative(ours, expected) < 1e-6
    for key, value in (("moe_normalize_expert_weights", True), ("num_shared_experts", 1), ("mlp_fc1_bias", False)):
        with pytest.raises(UnsupportedModelError, match=key):
            encoder({**NOMIC, key: value})


class JinaLayer(nn.Module):
    def __init__(self, act, again):
        super().__init__()
        self.act, self.again = act, again
        parts = {name: nn.Linear(D, D) for name in ("query", "key", "value")}
        if again:
            parts |= {name: nn.LayerNorm(D, eps=1e-12) for name in ("layer_norm_q", "layer_norm_k")}
            self.layer_norm_1, self.layer_norm_2 = (nn.LayerNorm(D, eps=1e-12) for _ in range(2))
        output = nn.ModuleDict(dict(dense=nn.Linear(D, D), LayerNorm=nn.LayerNorm(D, eps=1e-12)))
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(parts), "output": output})
        names = ("up_gated_layer", "down_layer") if again else ("gated_layers", "wo")
        self.mlp = nn.ModuleDict({names[0]: nn.Linear(D, 2 * FF, bias=False), names[1]: nn.Linear(FF, D)})
        if not again:
            self.mlp["layernorm"] = nn.LayerNorm(D, eps=1e-12)

    def forward(self, x, bias):
        parts, output = self.attention["self"], self.attention["output"]
        q, k, v = (parts[name](x) for name in ("query", "key", "value"))
        if self.again:
            q, k = parts["layer_norm_q"](q), parts["layer_norm_k"](k)
        y = output["LayerNorm"](output["dense"](attend(q, k, v, bias)) + x)
        if not self.again:
            gate, up = self.mlp["gated_layers"](y).chunk(2, dim=-1)
            return self.mlp["layernorm"](self.mlp["wo"](self.act(gate) * up) + y)
        y = self.layer_norm_1(x + y)
        up, gate = self.mlp["up_gated_layer"](y).chunk(2, dim=-1)
        return self.layer_norm_2(self.mlp["down_layer"](up * self.act(gate)) + y)


class Jina(nn.Module):
    def __init__(self, act, again):
        super().__init__()
        self.embeddings = Embeddings(2, LayerNorm=nn.LayerNorm(D, eps=1e-12))
        self.encoder = nn.ModuleDict(dict(layer=nn.ModuleList(JinaLayer(act, again) for _ in range(LAYERS))))

    def forward(self, ids):
        slopes = [2.0 ** (-2 * (i + 1)) for i in range(4)] + [2.0**-1, 2.0**-3]  # of 4 heads, then of 8, every second
        places = torch.arange(len(ids))
        bias = -torch.tensor(slopes)[:, None, None] * (places[:, None] - places).abs()
        x = self.embeddings["LayerNorm"](self.embeddings(ids))
        for layer in self.encoder["layer"]:
            x = layer(x, bias)
        return x


JINA = dict(
    **dict(model_type="bert", position_embedding_type="alibi", hidden_act="gelu", vocab_size=60, hidden_size=D),
    **dict(intermediate_size=FF, num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=512),
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("geglu", "jina-bert-implementation"),
        ("reglu", "jina-bert-implementation"),
        ("geglu", "jina-bert-v2-qk-post-norm"),
    ],
)
def test_jina_v2_has_alibi_and_a_gate(kind, code, tmp_path):
    theirs = filled(Jina(F.gelu if kind == "geglu" else F.relu, again=code.endswith("norm")))
    config = {
        **JINA,
        "feed_forward_type": kind,
        "auto_map": {"AutoModel": f"jinaai/{code}--modeling_bert.JinaBertModel"},
    }
    write(tmp_path, theirs, config)
    expected = vectors(theirs, tmp_path)
    for batch_size in (None, 3):
        ours = Encoder(tmp_path).encode(SENTENCES, normalize=False, batch_size=batch_size)
        assert relative(ours, expected) < 1e-6
    with pytest.raises(UnsupportedModelError, match="feed_forward_type 'original'"):
        encoder(JINA)


TASKS = ["retrieval.query", "separation"]


def test_jina_v3_has_an_adapter_for_each_task(tmp_path):
    theirs = save(tmp_path, "JinaEmbeddingsV3")
    (expected,) = states(theirs, tmp_path, SENTENCES[:1])
    path = tmp_path / "model.safetensors"
    generator, stored, changes = torch.Generator().manual_seed(1), safetensors.torch.load_file(path), {}
    weights = {}
    for key, weight in stored.items():
        if weight.ndim < 2:
            weights[f"roberta.{key}"] = weight
            continue
        name, (rows, columns) = f"roberta.{key.removesuffix('weight')}parametrizations.weight.", weight.shape
        a, b = (2, 4, columns), (2, rows, 4)
        if embeds := key.endswith("_embeddings.weight"):
            a, b = (2, rows, 4), (2, 4, columns)
        a, b = (0.2 * torch.randn(shape, generator=generator) for shape in (a, b))
        weights |= {f"{name}original": weight, f"{name}0.lora_A": a, f"{name}0.lora_B": b}
        changes[key] = weight + (a[1] @ b[1] if embeds else b[1] @ a[1]) * 0.5
    safetensors.torch.save_file(weights, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(lora_adaptations=TASKS, lora_rank=4, lora_alpha=2.0, task_instructions={TASKS[0]: "the cat "})
    config |= dict(
        model_type="xlm-roberta",
        position_embedding_type="rotary",
        rotary_emb_base=config.pop("rope_parameters")["rope_theta"],
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(
        json.dumps(
            [
                dict(idx=0, name="transformer", path="", type="custom_st.Transformer"),
                dict(idx=1, name="pooling", path="1_Pooling", type="sentence_transformers.models.Pooling"),
            ]
        )
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(dict(pooling_mode="cls")))
    assert relative(Encoder(tmp_path).encode(SENTENCES[0], normalize=False), expected[0]) < 1e-6
    changed = tmp_path / "changed"
    theirs.save_pretrained(changed)
    safetensors.torch.save_file({**stored, **changes}, changed / "model.safetensors", {"format": "pt"})
    (expected,) = states(transformers.AutoModel.from_pretrained(changed), tmp_path, SENTENCES[:1])
    ours = Encoder(tmp_path, task="separation").encode(SENTENCES[0], normalize=False)
    assert relative(ours, expected[0]) < 1e-6
    query = Encoder(tmp_path, task="retrieval.query")
    np.testing.assert_array_equal(query.encode("a dog"), query.encode("the cat a dog", prompt=""))
    np.testing.assert_array_equal(query.encode_query("a dog"), query.encode("a dog"))
    with pytest.raises(InvalidParameterError, match=r"task: .*'other'.* retrieval.query, separation"):
        Encoder(tmp_path, task="other")
    with pytest.raises(InvalidParameterError, match="task"):
        Encoder(task="separation")
