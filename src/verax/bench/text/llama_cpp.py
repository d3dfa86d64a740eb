"""llama.cpp as a baseline of the text benchmark. Needs `pip install 'verax[llama-cpp]'`, which compiles it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError
from verax.machine import num_cores

if TYPE_CHECKING:
    from verax.bench.text.workload import Workload

__all__ = ["LlamaCpp", "LlamaCppSide", "import_llama_cpp"]

_BATCH_TOKENS = 512
"""Most tokens in one call while prompts are read: llama.cpp's own physical batch."""

_MOST_SEQUENCES = 256
"""llama.cpp's own limit on sequences in a context (LLAMA_MAX_SEQ)."""

_LOG_ERROR = 4


def import_llama_cpp() -> Any:
    """The module of llama.cpp's C interface.

    Raises:
        MissingDependencyError: if llama-cpp-python is not installed.
    """
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            "comparing with llama.cpp needs llama-cpp-python, which is compiled for minutes while it is installed: "
            "pip install 'verax[llama-cpp]'"
        ) from error
    return llama_cpp


class Row(NamedTuple):
    """A token to run through the model."""

    sequence: int
    token: int
    position: int
    last: bool
    """True if a token is to be drawn after it."""


class LlamaCpp:
    """A GGUF file in llama.cpp on all cores, through its C interface."""

    def __init__(self, path: Path, *, context: int, batch: int, sequences: int = 1):
        """Load the file, and make room for so many tokens in all, in one call, and for so many sequences.

        Raises:
            MissingDependencyError: if llama-cpp-python is not installed.
            VeraxError: if llama.cpp cannot load the file; the message ends with its log.
        """
        llama_cpp = import_llama_cpp()
        self._c = llama_cpp
        self._errors: list[str] = []
        # ctypes keeps no reference to a callback: this one does.
        self._log = llama_cpp.llama_log_callback(self._hear)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise self._fault(f"cannot load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = batch
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = num_cores()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise self._fault(f"cannot make a context of {context} tokens")
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)
        self._batch_size = batch

    def close(self) -> None:
        """Free the model; it cannot be used afterwards."""
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def clear(self) -> None:
        """Forget all sequences."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)

    def decode(self, rows: Sequence[Row]) -> None:
        """Run rows through the model, at most as many as a call takes.

        Raises:
            VeraxError: if llama.cpp refuses them.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, row in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = row.token, row.position, row.last
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, row.sequence
        if code := self._c.llama_decode(self._context, batch):
            raise self._fault(f"llama_decode returned {code}")

    def logits(self, tokens: Sequence[int], *, position: int) -> Float32[np.ndarray, "T V"]:
        """Logits behind each of these tokens of the one sequence, which are the next from `position` on."""
        self.decode([Row(0, token, position + n, True) for n, token in enumerate(tokens)])
        size = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        rows = (self._c.llama_get_logits_ith(self._context, n) for n in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (size,)) for row in rows])

    def _hear(self, level: int, text: bytes, user_data: object) -> None:
        if level == _LOG_ERROR:
            self._errors.append(text.decode(errors="replace").strip())

    def _fault(self, what: str) -> VeraxError:
        return VeraxError(f"llama.cpp: {what}: {'; '.join(self._errors[-3:]) or 'it gives no reason'}")


class LlamaCppSide(LlamaCpp):
    """llama.cpp as a side of the benchmark: one `llama_decode` a step for all sequences."""

    def __init__(self, path: Path, workload: Workload):
        """Load the file, and make room for all sequences of the workload.

        Raises:
            MissingDependencyError: if llama-cpp-python is not installed.
            InvalidParameterError: if the workload has more sequences than llama.cpp takes.
            VeraxError: if llama.cpp cannot load the file.
        """
        count = len(workload.prompts)
        if count > _MOST_SEQUENCES:
            raise InvalidParameterError(f"requests: llama.cpp takes at most {_MOST_SEQUENCES} sequences at once")
        super().__init__(path, context=count * workload.longest, batch=max(_BATCH_TOKENS, count), sequences=count)

    def versions(self) -> dict[str, Any]:
        """Versions, threads and device of this side."""
        build = self._c.llama_print_system_info().decode()
        features = [part.split("=")[0].strip() for part in build.split(":", 1)[-1].split("|") if part.strip()]
        return {
            "llama_cpp_python": self._c.__version__,
            "llama_cpp_build": " ".join(features),
            "llama_cpp_threads": num_cores(),
        }

    def batched(self, workload: Workload) -> int:
        """All prompts together; a sequence leaves the batch when it has its tokens."""
        return sum(map(len, self.generate(workload)))

    def generate(self, workload: Workload) -> list[list[int]]:
        """The new tokens of each prompt."""
        self.clear()
        sampler = self._sampler(workload.temperature)
        try:
            answers: list[list[int]] = [[] for _ in workload.prompts]
            for rows in self._prompt_batches(workload):
                self._step(rows, sampler, answers)
            while rows := [
                Row(i, answer[-1], len(workload.prompts[i]) + len(answer) - 1, True)
                for i, answer in enumerate(answers)
                if len(answer) < workload.max_tokens[i]
            ]:
                self._step(rows, sampler, answers)
            return answers
        finally:
            self._c.llama_sampler_free(sampler)

    def _step(self, rows: list[Row], sampler: Any, answers: list[list[int]]) -> None:
        """Run the rows through the model, and add a sampled token to the answer of each row whose `last` is true."""
        self.decode(rows)
        for n, row in enumerate(rows):
            if row.last:
                answers[row.sequence].append(self._c.llama_sampler_sample(sampler, self._context, n))

    def _prompt_batches(self, workload: Workload) -> Iterator[list[Row]]:
        """Rows of all prompts, in batches of at most `_batch_size` tokens."""
        rows = [
            Row(i, token, position, position == len(prompt) - 1)
            for i, prompt in enumerate(workload.prompts)
            for position, token in enumerate(prompt)
        ]
        for begin in range(0, len(rows), self._batch_size):
            yield rows[begin : begin + self._batch_size]

    def _sampler(self, temperature: float) -> Any:
        """Greedy, or a draw from all tokens: top-k and the like are off, as on our side."""
        c = self._c
        chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        if temperature:
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(temperature))
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_dist(0))
        else:
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_greedy())
        return chain
