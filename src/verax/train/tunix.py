"""Tunix's rollout interface on an `LLM`: verax samples the answers of a GRPO or PPO step, and Tunix trains.

Tunix (google-tunix) is imported where the class of the interface is made, and not before. Its `RLCluster` takes the
result of `tunix_rollout` as `ClusterConfig(rollout_engine=...)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from verax.errors import InvalidParameterError, MissingDependencyError
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

__all__ = ["tunix_rollout"]


def tunix_rollout(llm: LLM, *, weights: Callable[[Any], Any] = lambda params: params) -> Any:
    """Rollout engine for Tunix's `ClusterConfig(rollout_engine=...)`.

    Args:
        llm: engine of the model that is trained, with a tokenizer, and room for prompts and answers.
        weights: function from the trainer's parameters (an `nnx.State`) to what `LLM.update_weights` takes; the
            parameters themselves by default, for a trainer of verax's own module.
    """
    return partial(_rollout_class(), llm=llm, weights=weights)


@cache
def _rollout_class() -> type[Any]:
    """A subclass of Tunix's `BaseRollout`, whose `RLCluster` takes no other class."""
    try:
        interface: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
    except ImportError as error:
        raise MissingDependencyError(f"Tunix cannot be imported ({error}): pip install google-tunix") from error

    class VeraxRollout(interface.BaseRollout):
        """Rollout worker: answers, their log-probabilities and new weights, by an `LLM`."""

        def __init__(
            self,
            *,
            llm: LLM,
            weights: Callable[[Any], Any],
            rollout_actor: Any = None,
            tokenizer: Any = None,
            mesh: Any = None,
            rollout_config: Any = None,
        ):
            """Take an engine and what Tunix's cluster passes: `mesh` and `rollout_config` have no effect here.

            The engine begins with the weights of `rollout_actor`, if there is one.
            """
            if llm.tokenizer is None:
                raise InvalidParameterError("llm: this engine has no tokenizer, and Tunix's prompts are texts")
            self._llm = llm
            self._weights = weights
            self._tokenizer = tokenizer
            # Tunix calls within a mesh and guards against transfers. Both belong to a thread, and would compile the
            # engine's programs again, or stop it.
            self._thread = ThreadPoolExecutor(1, "verax-rollout")
            if rollout_actor is not None:
                self.update_params(nnx.state(rollout_actor))

        def generate(self, prompts: list[str] | list[list[int]], rollout_config: Any, **kwargs: Any) -> Any:
            """Answers to prompts; a prompt of more than `max_prompt_length` tokens is an error."""
            params = [_sampling(rollout_config, i) for i in range(len(prompts))]
            # Tunix passes an array of numpy's texts, and token ids of conversations with tools.
            outputs = self._generate(
                [str(p) if isinstance(p, str) else np.asarray(p).tolist() for p in prompts], params
            )
            if failed := [output.error for output in outputs if output.error is not None]:
                raise RuntimeError(failed[0])
            width = rollout_config.max_prompt_length
            padded = np.full((len(prompts), width), self.pad_id(), np.int32)
            for row, output in zip(padded, outputs, strict=True):
                if (length := len(output.prompt_token_ids)) > width:
                    raise InvalidParameterError(f"max_prompt_length: a prompt has {length} tokens, more than {width}")
                row[width - length :] = output.prompt_token_ids
            answers = [output.outputs[0] for output in outputs]
            logprobs = None
            if rollout_config.return_logprobs:
                logprobs = [
                    np.asarray([at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)])
                    for answer in answers
                ]
            return interface.RolloutOutput(
                text=[answer.text for answer in answers],
                logits=[],
                tokens=[np.asarray(answer.token_ids, np.int32) for answer in answers],
                left_padded_prompt_tokens=padded,
                logprobs=logprobs,
            )

        def get_per_token_logps(
            self,
            prompt_tokens: Int[Array, "B P"],
            completion_tokens: Int[Array, "B C"],
            completion_mask: Shaped[Array, "B C"] | None = None,
        ) -> Float[Array, "B C"]:
            """Log-probability of each token of an answer after its prompt, nats; 0 after an answer's end.

            `prompt_tokens`: padded on the left. `completion_tokens`: padded on the right. `completion_mask`: the last
            token of an answer is the last that is not 0 here; if None, the first that ends a text, or the padding does.
            """
            prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
            texts, pad, end = [], self.pad_id(), self.eos_id()
            kept = answers != pad if completion_mask is None else np.asarray(completion_mask) != 0
            for prompt, answer, own in zip(prompts, answers, kept, strict=True):
                begin = int(np.argmax(prompt != pad)) if (prompt != pad).any() else len(prompt)
                ends = np.flatnonzero(answer == end) if completion_mask is None else []
                length = ends[0] + 1 if len(ends) else len(np.trim_zeros(own.astype(np.int8), "b"))
                texts.append((prompt[begin:].tolist(), answer[:length].tolist()))
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
            outputs = self._generate([[*prompt, *answer] for prompt, answer in texts], params)
            result = np.zeros(answers.shape, np.float32)
            for row, (prompt, answer), output in zip(result, texts, outputs, strict=True):
                entries: Any = output.prompt_logprobs[len(prompt) :]
                row[: len(answer)] = [entry[token].logprob for entry, token in zip(entries, answer, strict=True)]
            return jnp.asarray(result)

        def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
            """Take the trainer's parameters: all of them, of the engine's shapes and dtypes."""
            if filter_types is not None and any("LoRA" in kind.__name__ for kind in filter_types):
                raise InvalidParameterError("update_params: adapters alone are not supported; merge them in `weights`")
            self._thread.submit(lambda: self._llm.update_weights(self._weights(params))).result()

        def pad_id(self) -> int:
            """Token that prompts and answers are padded with: the trainer's, else the first end of text."""
            return self.eos_id() if self._tokenizer is None else int(self._tokenizer.pad_id())

        def eos_id(self) -> int:
            """Token that ends an answer."""
            return min(self._llm.engine.eos_token_ids) if self._tokenizer is None else int(self._tokenizer.eos_id())

        def model(self) -> Any:
            """None, by which Tunix knows that the engine does not share its trainer's weights, and updates them."""
            return None

        def _generate(self, prompts: Any, params: Any) -> Any:
            return self._thread.submit(self._llm.generate, prompts, params, use_tqdm=False).result()

    return VeraxRollout


def _sampling(config: Any, index: int) -> SamplingParams:
    """Sampling parameters of a `RolloutConfig`.

    Prompts of a group are equal, and a draw depends on the seed and the position alone: each has a seed of its own.
    """
    if config.return_logprobs and config.temperature not in (0, 1):
        raise InvalidParameterError(
            f"return_logprobs: expected temperature 1, got {config.temperature}: Tunix compares them with the "
            "trainer's at this temperature, and the engine's log-probabilities are those without one; or let the "
            "trainer compute them (use_rollout_logps=False)"
        )
    seed = None
    if config.seed is not None:
        is_key = isinstance(config.seed, jax.Array) and jnp.issubdtype(config.seed.dtype, jax.dtypes.prng_key)
        seed = int(np.asarray(jax.random.key_data(config.seed) if is_key else config.seed).reshape(-1)[-1]) + index
    return SamplingParams(
        max_tokens=config.max_tokens_to_generate,
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=max(config.top_k or 0, 0),
        seed=seed,
        stop_token_ids=config.eos_tokens or None,
        logprobs=0 if config.return_logprobs else None,
    )
