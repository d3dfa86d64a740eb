"""The interface of a language model: the members that the engine, the loader and training use, and no others; and the
functions by which tokens see each other, which a model takes as arguments, so that it holds no cache and no state.

A class need not inherit from these protocols. `verax.register_causal_lm` checks it and serves it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import InvalidParameterError
from verax.fields import file_of, read_value
from verax.files import JsonObject
from verax.nn import Linear, Sentences


@runtime_checkable
class AttentionFn(Protocol):
    """Attention of one layer. Training passes causal attention, the engine its paged cache."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K H"],
        /,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, "N"] | None = None,
    ) -> Float[Array, "*B T N H"]:
        """Attention of layer `layer`; the keywords are as in `ops.attention`.

        A model whose layers share keys and values calls it again with the layer that they are of, and with the same.
        """
        ...


RecurrentLayer = Callable[
    [Float[Array, "B T D"], Any, Int[Array, "M"] | None, ops.StateSlots | None], tuple[Float[Array, "B T D"], Any]
]
"""A layer that goes through tokens in order: `recurrence(x, state, cu_seqlens, slots)` gives outputs and states after.

`state` is made by the configuration's `new_state`, one entry for each of N sequences; None stands for zeros. N is B;
or, packed, `len(cu_seqlens) - 1` sequences lie along T of a batch of one, as in `ops.delta`. With `slots` there is an
entry for each slot instead, in `state` and in the states after.
"""


@runtime_checkable
class ReplayableLayer(Protocol):
    """A `RecurrentLayer` in two parts, for drafts: `recurrence(x, ...)` is `advance(project(x), ...)`.

    A step that verifies drafts keeps what `project` gives. Once it is known which tokens hold, `advance` takes those
    again from the states before the step.
    """

    def project(self, x: Float[Array, "B T D"], /) -> Any:
        """Inputs of the recurrence for each token, as a tree of arrays `[B, T, ...]`.

        Where devices divide the states of the layer, they divide the last axes of these arrays.
        """
        ...

    def advance(
        self, inputs: Any, state: Any, cu_seqlens: Int[Array, "M"] | None, slots: ops.StateSlots | None, /
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Outputs and states after the tokens of these inputs; other arguments as in `RecurrentLayer`."""
        ...


RunRecurrent = Callable[[int, Float[Array, "*B T D"], RecurrentLayer], Float[Array, "*B T D"]]
"""Run of recurrent layer i: `run_recurrent(i, x, recurrence)` loads its sequences' states, and stores those after."""


def causal_attention(
    dtype: DTypeLike, segments: Int[Array, "B T"] | None = None, *, causal: bool = True
) -> AttentionFn:
    """Causal attention over whole sequences `[B, T]`, for a model without a cache.

    Args:
        dtype: of keys and values.
        segments: as in `ops.attention`, for rows of several sequences.
        causal: False for tokens that see those after them too: a window's number of them, its own not counted.
    """

    def attend(
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        window: int | None = None,
        **options: Any,
    ) -> Float[Array, "B T N H"]:
        if not causal and window is not None:
            window += 1  # transformers' windows to both sides include their ends
        k, v = k.astype(dtype), v.astype(dtype)
        return ops.attention(q, k, v, causal=causal, segments=segments, window=window, **options)

    return attend


def run_from_zeros(cu_seqlens: Int[Array, "M"] | None = None) -> RunRecurrent:
    """Run of recurrent layers over whole sequences from zeroed states; the states after are dropped.

    `cu_seqlens`: as in `ops.delta`, for sequences that are packed along one row.
    """

    def run(layer: int, x: Float[Array, "B T D"], recurrence: RecurrentLayer) -> Float[Array, "B T D"]:
        return recurrence(x, None, cu_seqlens, None)[0]

    return run


C = TypeVar("C")


@runtime_checkable
class CausalLMConfig(Protocol):
    """The sizes that the engine reads. Usually a frozen dataclass; a size may be a property.

    Attributes:
        vocab_size: tokens of the vocabulary, V.
        num_hidden_layers: layers, L: those that call `attend` or `run_recurrent` with keys or a state of their own.
        num_key_value_heads: heads of keys and values, K.
        head_dim: size of a head, H.
        max_position_embeddings: positions, the longest sequence in tokens.
        tie_word_embeddings: True if the output head is the token embedding.
    """

    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], /) -> Any:
        """Configuration of a config.json. It raises `UnsupportedModelError` for what the model does not compute."""
        ...


@runtime_checkable
class RecurrentConfig(Protocol):
    """A configuration whose model has recurrent layers: its model takes `run_recurrent` as a fourth argument."""

    def new_state(self, layer: int, num_seqs: int) -> Any:
        """Zeroed state of `num_seqs` sequences for recurrent layer `layer`; None for a layer that attends."""
        ...


@runtime_checkable
class DividedStateConfig(RecurrentConfig, Protocol):
    """A configuration whose recurrent layers are divided over devices, and their states with them.

    The layers declare how their weights are divided, as all layers do (`verax.nn.parallel`). Without these members
    every device has the states whole.
    """

    def on_devices(self, devices: int) -> Any:
        """Configuration on `devices` devices: recurrent layers are whole on each where these cannot divide them."""
        ...

    def state_axes(self, layer: int) -> Any:
        """Axis of each array of the layer's state that is divided, in a tree like it; None if the state is whole."""
        ...


@runtime_checkable
class SlidingWindowConfig(Protocol):
    """A configuration whose model has layers that attend to a sliding window: they pass it to `attend`.

    The engine keeps no keys and values older than the window of such a layer.
    """

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Tokens that a query sees, itself included, by layer; None for all. Values of recurrent layers are unused."""
        ...


@runtime_checkable
class LayerHeadsConfig(Protocol):
    """A configuration whose layers have keys and values of several shapes."""

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values of a layer, and their size."""
        ...


@runtime_checkable
class CausalLM(Protocol):
    """A language model: an `nnx.Module` whose paths are the keys of the published checkpoint.

    Layers that are declared as divided (`verax.nn.parallel`) let several devices run it. They must divide attention by
    heads: each device then passes its own heads to `attend`.

    Attributes:
        ignored_weights: patterns of keys that a checkpoint may have and the model does not need; of the class.
        key_aliases: (pattern, replacement) pairs from a module's path to its key in another layout; of the class.
        config: configuration that the model was made of.
        dtype: dtype of the weights that are not quantised, and of keys and values.
    """

    ignored_weights: tuple[str, ...]
    key_aliases: tuple[tuple[str, str], ...]
    config: Any
    dtype: DTypeLike

    def __init__(self, config: Any, *, dtype: DTypeLike = ..., rngs: Any) -> None: ...

    def __call__(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*B T"] | None = None, attend: AttentionFn | None = None
    ) -> Float[Array, "*B T D"]:
        """Final hidden states, float32. Without `attend`: causal attention over `[B, T]` tokens at positions 0..T-1.

        A model with recurrent layers takes `run_recurrent: RunRecurrent | None = None` as well.
        """
        ...

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        ...


_CLASS_MEMBERS = ("ignored_weights", "key_aliases", "dtype", "logits")
_CONFIG_MEMBERS = tuple(CausalLMConfig.__annotations__)


def has_recurrent_layers(config: CausalLMConfig) -> TypeGuard[RecurrentConfig]:
    """True if the model of this configuration takes `run_recurrent`."""
    return isinstance(config, RecurrentConfig)


def prediction_layers(config: CausalLMConfig) -> int:
    """Layers of the model's head of multi-token prediction, numbered after the others; 0 for a model without one."""
    return getattr(config, "num_nextn_predict_layers", 0)


def sliding_windows(config: CausalLMConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer, in tokens; None for a layer that attends to everything.

    Layers of a prediction head are the last ones.
    """
    head = (None,) * prediction_layers(config)
    if not isinstance(config, SlidingWindowConfig):
        return (None,) * config.num_hidden_layers + head
    if len(config.sliding_windows) != config.num_hidden_layers:
        raise InvalidParameterError(
            f"model: {type(config).__name__} has {len(config.sliding_windows)} sliding_windows for "
            f"{config.num_hidden_layers} layers"
        )
    return tuple(config.sliding_windows) + head


def layer_heads(config: CausalLMConfig, layer: int) -> tuple[int, int]:
    """Heads of keys and values of a layer that attends, and their size."""
    if isinstance(config, LayerHeadsConfig):
        return config.layer_heads(layer)
    return config.num_key_value_heads, config.head_dim


def state_axes(config: CausalLMConfig, layer: int) -> Any:
    """Axis of each array of a layer's recurrent state that devices divide; None for a state that each has whole."""
    attends = layer >= config.num_hidden_layers  # a layer of a prediction head
    return config.state_axes(layer) if isinstance(config, DividedStateConfig) and not attends else None


def config_on_devices(config: C, devices: int) -> C:
    """Configuration of a model as `devices` devices hold it.

    It has each head of keys and values several times, next to each other, where devices share heads: those of which
    there are fewer than devices. `config.shared_heads` names the fields with their numbers. Recurrent layers are whole
    where devices do not divide them, and so are embeddings and output head.
    """
    if cast(CausalLMConfig, config).vocab_size % devices and getattr(config, "vocabulary_division", None):
        config = cast(Any, replace)(config, vocabulary_division=None)
    if isinstance(config, DividedStateConfig):
        config = cast(C, config.on_devices(devices))
    heads = cast(CausalLMConfig, config).num_key_value_heads
    counts = {name: getattr(config, name) for name in getattr(config, "shared_heads", ("num_key_value_heads",))}
    repeated = {name: devices for name, count in counts.items() if count and count < devices and devices % count == 0}
    if not repeated and (heads >= devices or devices % heads):
        return config
    if repeated:
        with contextlib.suppress(TypeError):  # a configuration without that field
            return cast(Any, replace)(config, **repeated)
    raise InvalidParameterError(
        f"tensor_parallel_size: {type(config).__name__} cannot repeat its {heads} heads of keys and values; use a "
        "number of devices that divides them"
    )


def text_config(config: Mapping[str, Any], **defaults: Any) -> JsonObject:
    """Object of the language model in a config.json: its `text_config`, in a file of a model with a vision tower.

    With a vision tower, the outer file says whether the output head is tied, as transformers reads it.

    `defaults`: values of keys that the language model's object leaves out.
    """
    part = read_value(config, "text_config", dict, None)
    where = f"{file_of(config)}: text_config" if part else file_of(config)
    text = JsonObject({**defaults, **(config if part is None else part)}, where)
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return text


def final_hidden_states(
    model: CausalLM,
    tokens: Int[Array, "*B T"],
    positions: Int[Array, "*B T"],
    attend: AttentionFn,
    run_recurrent: RunRecurrent,
) -> Float[Array, "*B T D"]:
    """Final hidden states of a model; `run_recurrent` goes to those that have recurrent layers only."""
    if has_recurrent_layers(model.config):
        return cast(Callable[..., Any], model)(tokens, positions, attend, run_recurrent)
    return model(tokens, positions, attend)


class CausalLMForSequenceClassification(nnx.Module):
    """A cross-encoder of a language model: one logit for a pair of texts, from the last token that is not padding.

    Follows transformers' `GenericForSequenceClassification`. Classes of a checkpoint derive from it.

    Attributes:
        language_model: class of the language model; of the class.
        causal: False for tokens that see those after them; of the class.
        padding: id of the padding token, which a text may end with too; of the class.
    """

    language_model: ClassVar[type[Any]]
    causal: ClassVar[bool]
    padding: ClassVar[int | None]
    ignored_weights: ClassVar[tuple[str, ...]]

    key_aliases = ((r"^language\.", ""),)
    """The checkpoint's names of the language model's weights."""

    def __init__(self, config: Any, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.language = self.language_model(config, dtype=dtype, rngs=rngs)
        self.score = Linear(config.hidden_size, 1, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "1 T"], sentences: Sentences, types: Int[Array, "1 T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. `sentences`: places of the pairs. Language models read no `types`."""
        attend = causal_attention(self.language.dtype, sentences.segments, causal=self.causal)
        run = run_from_zeros(sentences.cu_seqlens)
        hidden = final_hidden_states(self.language, tokens, sentences.positions, attend, run)
        if self.padding is not None:
            places = jnp.where(tokens == self.padding, -1, sentences.positions)[0]
            lengths = jax.ops.segment_max(places, sentences.segments[0], sentences.lengths.shape[0]) + 1
            sentences = sentences._replace(lengths=jnp.minimum(jnp.maximum(lengths, 1), sentences.lengths))
        return self.score(sentences.last(hidden))[:, 0]


def predicted_hidden_states(
    model: CausalLM,
    hidden: Float[Array, "*B T D"],
    tokens: Int[Array, "*B T"],
    positions: Int[Array, "*B T"],
    attend: AttentionFn,
) -> Float[Array, "*B T D"]:
    """Hidden states one token later than `hidden`, by the model's prediction head, whose layer attends.

    `hidden`: final hidden states at `positions`, or the head's own. `tokens`: tokens at `positions + 1`.
    """
    mixers = (attend, run_from_zeros()) if has_recurrent_layers(model.config) else (attend,)
    return cast(Any, model).predict(hidden, tokens, positions, *mixers)


def check_causal_lm_class(model: Any, config: Any) -> None:
    """Check the classes of a language model and of its configuration."""
    for argument, given in (("model", model), ("config", config)):
        if not inspect.isclass(given):
            raise InvalidParameterError(f"{argument}: expected a class, got {given!r}")
    declared = getattr(config, "__dataclass_fields__", {})  # a field without default is not an attribute of the class
    present = [name for name in ("from_hf", *_CONFIG_MEMBERS) if name in declared or hasattr(config, name)]
    _require("config", config, ("from_hf", *_CONFIG_MEMBERS), present, "CausalLMConfig")
    _require_model(model, recurrent=hasattr(config, "new_state"))


def check_causal_lm(model: Any) -> None:
    """Check a language model in memory."""
    _require("model", type(model), ("config",), [name for name in ("config",) if hasattr(model, name)], "CausalLM")
    present = [name for name in _CONFIG_MEMBERS if hasattr(model.config, name)]
    _require("model", type(model.config), _CONFIG_MEMBERS, present, "CausalLMConfig")
    _require_model(type(model), recurrent=has_recurrent_layers(model.config))


def _require_model(model: type[Any], *, recurrent: bool) -> None:
    """Check the members of a model's class, and that its `__call__` takes what the engine passes."""
    taken = inspect.signature(model.__call__).parameters if "__call__" in dir(model) else {}
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    calls = [f"__call__(..., {name})" for name in ("tokens", "positions", "attend", "run_recurrent")[: 3 + recurrent]]
    present = [name for name in _CLASS_MEMBERS if hasattr(model, name)]
    present += calls if variadic else [f"__call__(..., {name})" for name in taken]
    _require("model", model, (*_CLASS_MEMBERS, *calls), present, "CausalLM")


def _require(argument: str, given: type[Any], needed: Iterable[str], present: Iterable[str], protocol: str) -> None:
    if missing := [name for name in needed if name not in present]:
        raise InvalidParameterError(
            f"{argument}: {given.__name__} lacks {', '.join(missing)}; verax.models.{protocol} says what these are"
        )
