"""`verax chat`: a conversation in the terminal, or from a script."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.cli.options import Flags
from verax.errors import VeraxError
from verax.files import model_name, write_json
from verax.text.engine.engine_config import EngineConfig
from verax.text.features.tool_calls import CLOSE_REASONING, OPEN_REASONING, Delta, join

if TYPE_CHECKING:
    from verax.text.engine.llm import LLM
    from verax.text.engine.outputs import RequestOutput
    from verax.text.engine.sampling_params import SamplingParams
    from verax.text.features.lora import LoRARequest

HELP = """/reset        begin a new conversation
/system TEXT  set the system message, and begin a new conversation
/save FILE    write the conversation as JSON
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer."""


ENGINE = ("kv_cache_dtype", "tensor_parallel_size", "max_model_len", "seed", "speculative_config")
"""Options of the engine that matter for one conversation."""


@options.with_flags
def chat(
    model: options.Model = None,
    lora: options.Lora = None,
    message: Annotated[str | None, typer.Option("--message", help="One message: print the answer and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    sampling: Annotated[dict[str, Any], options.sampling_flags(max_tokens=512)],
    loading: Annotated[dict[str, Any], Flags(options.ModelOptions)],
    engine: Annotated[dict[str, Any], Flags(EngineConfig, only=ENGINE)],
    chat_template: options.ChatTemplate = None,
    as_json: options.Json = False,
) -> None:
    """Talk to a model. On a terminal: type, /help for commands. Otherwise: each line of standard input is a turn.

    \b
    Examples:
        verax chat
        verax chat --message "What is 12 + 30?" --temperature 0
        verax chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."
    """
    from verax.text.engine.llm import LLM

    llm = LLM(model, max_num_seqs=1, **loading, **engine, **options.lora_options(lora))
    options.with_chat_template(llm, chat_template)
    begun = llm.chat_sampling if sampling["temperature"] is None else {}
    params = llm.default_sampling_params(**begun | options.given(**sampling))
    if begun:
        words = ", ".join(f"{name} {getattr(params, name)}" for name in begun)
        sys.stderr.write(f"the model recommends no sampling: {words}\n")
    talk = Conversation(llm, params, system, show=not as_json, adapter=options.lora_request(lora))
    interactive = message is None and sys.stdin.isatty()
    if interactive:
        name = model_name(model) if model else "the built-in model"
        sys.stderr.write(f"{name}; /help for commands, /exit to leave\n")
    for turn in [message] if message is not None else _turns(interactive):
        if interactive and turn.startswith("/"):
            if not _command(talk, turn):
                return
            continue
        try:
            output = talk.say(turn)
        except VeraxError as error:  # such as a text that is longer than the context
            if not interactive:
                raise
            sys.stderr.write(f"error: {error}\n")
            continue
        if as_json and output is not None:
            sys.stdout.write(json.dumps(output.to_dict(), ensure_ascii=False) + "\n")


class Conversation:
    """History of a conversation. The oldest turns are dropped when it no longer fits the context."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, show: bool, adapter: LoRARequest | None = None
    ):
        from verax.text.features.chat_format import chat_format

        assert llm.tokenizer is not None
        self._llm = llm
        self._adapter = adapter
        self._tokenizer = llm.tokenizer
        self._form = chat_format(llm.tokenizer)
        self._params = replace(params, **self._form.sampling_overrides)
        self._show = show
        self._in_reasoning = False
        """True where the end of what was shown is reasoning."""
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Begin a new conversation with this system message."""
        self.system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> RequestOutput | None:
        """Answer one message: show the answer while it is generated, and keep it. None if Ctrl-C stopped it.

        Raises:
            VeraxError: if the message cannot be answered. The conversation is as it was before it.
        """
        from verax.text.features.chat_format import parser_for

        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            dropped = self._make_room()
            prompt = self._prompt()
            pieces = self._llm.stream(self._form.history(self.messages), self._params, self._adapter)
        except Exception:
            self.messages = before
            raise
        if dropped:
            sys.stderr.write(f"(the context is full: {dropped} oldest turns dropped)\n")
        parser = parser_for(self._form, tools=None, prompt=prompt, parse_tool_calls=False, parse_reasoning=True)
        deltas: list[Delta] = []
        output, self._in_reasoning = None, False
        try:
            while True:
                deltas.append(self._shown(parser.feed(next(pieces))))
        except StopIteration as end:
            output = end.value
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            pieces.close()
        deltas.append(self._shown(parser.finish()))
        if self._show:
            sys.stdout.write("\n")
        answer = join(deltas)
        self.messages.append({"role": "assistant", "content": answer.content})
        if answer.reasoning:
            self.messages[-1]["reasoning_content"] = answer.reasoning
        return output

    def _shown(self, delta: Delta) -> Delta:
        """A part of an answer, after it was shown with its reasoning between tags."""
        if self._show:
            opening = f"{OPEN_REASONING}\n" if delta.reasoning and not self._in_reasoning else ""
            self._in_reasoning = self._in_reasoning or bool(delta.reasoning)
            closing = f"\n{CLOSE_REASONING}\n\n" if delta.content and self._in_reasoning else ""
            self._in_reasoning = self._in_reasoning and not delta.content
            sys.stdout.write(f"{opening}{delta.reasoning}{closing}{delta.content}")
            sys.stdout.flush()
        return delta

    def _make_room(self) -> int:
        """Drop the oldest turns where the context is nearly full; their number."""
        first = 1 if self.system else 0
        dropped = 0
        while len(self.messages) > first + 1 and self._length() >= self._llm.max_model_len * 3 // 4:
            del self.messages[first : first + 2]
            dropped += 1
        return dropped

    def _length(self) -> int:
        return len(self._tokenizer.encode(self._prompt(), add_special_tokens=False))

    def _prompt(self) -> str:
        return self._llm.render(self._form.history(self.messages))


def _turns(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line for line in sys.stdin.read().removeprefix("\ufeff").split("\n") if line)
        return
    with contextlib.suppress(ImportError):  # gives input() line editing and history
        importlib.import_module("readline")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n/exit or Ctrl-D to leave\n")
            continue
        if line:
            yield line


def _command(talk: Conversation, line: str) -> bool:
    """Run a /command. False if it ends the conversation."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        talk.reset(talk.system)
    elif name == "/system":
        talk.reset(rest or None)
    elif name == "/save" and rest:
        try:
            path = Path(rest).expanduser()  # no shell has seen the ~
            write_json(path, talk.messages)
            sys.stderr.write(f"written: {path}\n")
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"cannot write {rest}: {getattr(error, 'strerror', error)}\n")
    else:
        sys.stderr.write(HELP + "\n")
    return True
