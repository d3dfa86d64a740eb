"""Chat format of a checkpoint: the syntax of its answers, the parser of an answer, and the grammar of its tool calls.

The chat template teaches the model the syntax of reasoning and tool calls. The parser splits an answer into reasoning,
content and tool calls as it streams, each part as soon as it is certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verax.errors import InvalidParameterError, TemplateError
from verax.text.engine.sampling_params import StructuredOutputs
from verax.text.features import gemma_calls, harmony
from verax.text.features.gemma_calls import GemmaCallReader
from verax.text.features.harmony import HarmonyParser
from verax.text.features.history import (
    calls_as_text,
    joined_by_role,
    one_call_each,
    with_functions_in_text,
    with_instructions_in_text,
    with_parts,
    with_results_in_text,
    with_short_ids,
)
from verax.text.features.json_schema import JSON_OPTIONS, literal, referenced, schema_rule
from verax.text.features.tool_calls import (
    CLOSE_CALL,
    CLOSE_REASONING,
    CLOSE_THINK,
    CLOSE_THOUGHT,
    MISTRAL_ARGS,
    MISTRAL_CALL,
    MISTRAL_ID,
    OPEN_CALL,
    OPEN_REASONING,
    OPEN_THINK,
    OPEN_THOUGHT,
    AnswerParser,
    Function,
    JsonCallReader,
    MistralCallReader,
    XmlCallReader,
    function_tag,
    read_functions,
)
from verax.text.tokens.tokenizer import Tokenizer

OPEN_LIST, CLOSE_LIST = "<|tool_call|>", "<|/tool_call|>"

_LISTS = {"granite": (OPEN_LIST, ""), "phi4_mini_json": (OPEN_LIST, CLOSE_LIST), "mistral_json": (MISTRAL_CALL, "")}
"""Tags around a list of calls, of the syntaxes that have one."""

_CALL_TAGS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("hermes", "qwen3_coder"), (OPEN_CALL, CLOSE_CALL)),
    "gemma4": (gemma_calls.OPEN_CALL, gemma_calls.CLOSE_CALL),
    "mistral": (MISTRAL_CALL, ""),
    **_LISTS,
}
"""Tags around a call or a list of calls, of the syntaxes that have them."""

PYTHON_TAG = "<|python_tag|>"

ToolSyntax = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "gemma4",
    "harmony",
    "mistral",
    "mistral_json",
    "granite",
    "phi4_mini_json",
    "none",
]
"""Syntax of tool calls, by vLLM's names of its parsers:

- hermes: JSON in `<tool_call>` (Hermes, Qwen2.5, Qwen3), or an answer that is JSON (Qwen2.5-Coder);
- qwen3_coder: XML in `<tool_call>` (Qwen3-Coder, Qwen3.5);
- llama3_json: an answer that is JSON (Llama 3.1 and later);
- gemma4: a syntax of its own in `<|tool_call>` (Gemma 4), see `verax.text.features.gemma_calls`;
- harmony: messages to a function in a format with channels (gpt-oss), see `verax.text.features.harmony`;
- mistral: a name and JSON after `[TOOL_CALLS]` (Mistral Small 3.2, Ministral 3, Devstral);
- mistral_json: a list of JSON after `[TOOL_CALLS]` (Mistral 7B, Nemo, Small 3.1);
- granite: a list of JSON after `<|tool_call|>` (Granite 3);
- phi4_mini_json: a list of JSON in `<|tool_call|>` (Phi-4-mini);
- none: the template has no tool calls. An answer can still be one, as with llama3_json: a grammar can demand it.
"""

ReasoningState = Literal["none", "open", "inside", "over"]
"""State of the reasoning where the answer begins:

- none: the model does not reason;
- open: the answer may begin with the tag of reasoning;
- inside: the prompt ends inside of the reasoning;
- over: the prompt has closed it.
"""

CallReader = JsonCallReader | XmlCallReader | GemmaCallReader | MistralCallReader

_LLAMA = re.compile(r'\{"name":.*"parameters":', re.DOTALL)


@dataclass(frozen=True)
class ChatFormat:
    """Syntax of a checkpoint's answers."""

    tools: ToolSyntax = "none"
    reasoning: bool = False
    """True if the model can reason, between `reasoning_tags`, before it answers."""
    special_tokens: frozenset[str] = frozenset()
    """Tags above that are special tokens, which a tokenizer leaves out of the text unless told otherwise."""
    turn_tokens: tuple[str, ...] = ()
    """Special tokens of the template: the last one in a prompt stands before the answer."""
    instructions_first: bool = False
    """True if the template refuses or leaves out instructions, messages of the system, that are not the first one."""
    no_instructions: bool = False
    """True if the template refuses or leaves out the first one too."""
    in_brackets: bool = False
    """True if the tags of the reasoning are Mistral's."""
    alternates: bool = False
    """True if the template refuses two messages of the user in a row."""
    loses_calls: bool = False
    """True if the template leaves out the calls of earlier answers."""
    loses_functions: bool = False
    """True if it has no syntax of calls, and leaves out the functions that the model may call."""
    loses_results: bool = False
    """True if it has no syntax of calls, and refuses or leaves out their results."""
    thinks_in_parts: bool = False
    """True if the template reads the reasoning of earlier answers as parts of their content."""

    @property
    def reasoning_tags(self) -> tuple[str, str]:
        """Tags that begin and end the reasoning."""
        if self.tools == "gemma4":
            return OPEN_THOUGHT, CLOSE_THOUGHT
        return (OPEN_THINK, CLOSE_THINK) if self.in_brackets else (OPEN_REASONING, CLOSE_REASONING)

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that a request needs for its answer to be parsed.

        The token that ends an answer is never part of its text, so that nothing has to be cut off.
        """
        return {"skip_special_tokens": False} if self.special_tokens else {}

    def reasoning_state(self, prompt: str) -> ReasoningState:
        """State of the reasoning at the end of a rendered prompt."""
        if not self.reasoning or self.tools == "harmony":  # whose channels are not a state of the beginning
            return "none"
        begin = max((prompt.rfind(token) + len(token) for token in self.turn_tokens if token in prompt), default=0)
        opening, closing = self.reasoning_tags
        tail = prompt[begin:] if begin else prompt.rstrip()[-len(closing) :]
        opened, closed = tail.rfind(opening), tail.rfind(closing)
        if opened == closed:
            return "open"
        return "inside" if opened > closed else "over"

    def history(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Messages of a conversation in a form that the template takes, so that each answer can come back.

        `messages`: with texts as contents of the system's. `tools`: functions that the model may call.
        """
        if self.loses_functions and tools:
            messages = with_functions_in_text(messages, tools)
        if self.loses_results:
            messages = with_results_in_text(messages)
        if self.loses_calls and self.tools == "none":
            messages = [calls_as_text(message, "", "", in_list=False) for message in messages]
        instructions = [message["content"] for message in messages if message["role"] == "system"]
        if self.instructions_first and instructions:
            others = (message for message in messages if message["role"] != "system")
            messages = [{"role": "system", "content": "\n".join(instructions)}, *others]
            if self.no_instructions:
                messages = with_instructions_in_text(messages)
        if self.alternates:
            messages = joined_by_role(messages)
        if self.thinks_in_parts:
            messages = [with_parts(message) for message in messages]
        if self.tools == "phi4_mini_json" and tools:
            # Its template reads them as a text of the first message, which has to be the system's.
            first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
            functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            messages = [{**first, "tools": functions}, *(messages[1:] if first is messages[0] else messages)]
        if self.tools in ("granite", "phi4_mini_json"):
            roles = {"tool": "tool_response"}  # the name that the models know, which their templates write as it is
            messages = [{**message, "role": roles.get(message["role"], message["role"])} for message in messages]
        if self.loses_calls and (self.tools == "hermes" or self.tools in _LISTS):
            tags, in_list = _CALL_TAGS[self.tools], self.tools in _LISTS
            messages = [calls_as_text(message, *tags, in_list=in_list) for message in messages]
        if self.tools in ("mistral", "mistral_json"):
            messages = [with_short_ids(message) for message in messages]
        if self.tools == "harmony":
            messages = harmony.history(messages)
        return one_call_each(messages) if self.tools in ("harmony", "llama3_json") else messages

    def functions(self, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
        """Functions that the model may call, in OpenAI's form, as the template takes them. None if it takes none."""
        if self.loses_functions:
            return None
        if tools is None or self.tools != "harmony":
            return tools
        # Its template adds each description to a text.
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def structured_after(self, prompt: str) -> str | None:
        """Text after which a grammar begins, for `StructuredOutputs(after=...)`: the end of the reasoning, or None."""
        if self.tools == "harmony":
            return None if harmony.FINAL in prompt.rpartition(harmony.START)[2] else harmony.FINAL
        return self.reasoning_tags[1] if self.reasoning_state(prompt) == "inside" else None


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Format of a checkpoint, from its chat template and its vocabulary."""
    templates = tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default", ""))
    special = {token for number in tokenizer.special_token_ids if (token := tokenizer.token(number))}
    in_vocabulary = all(tokenizer.token_id(tag) is not None for tag in (OPEN_REASONING, CLOSE_REASONING))
    tags = {OPEN_REASONING, CLOSE_REASONING, OPEN_CALL, CLOSE_CALL, PYTHON_TAG, *harmony.TAGS}
    tags |= {OPEN_LIST, CLOSE_LIST, MISTRAL_CALL, MISTRAL_ARGS, MISTRAL_ID}
    tags |= {
        OPEN_THINK,
        CLOSE_THINK,
        OPEN_THOUGHT.removesuffix("thought"),
        CLOSE_THOUGHT,
        *_CALL_TAGS["gemma4"],
        gemma_calls.QUOTE,
    }
    tools = _tool_syntax(template)
    called = _written(tokenizer, "user", "call")
    plain = tools == "none" and "text 0" in _written(tokenizer, "user")
    return ChatFormat(
        tools=tools,
        reasoning=_reasons(tools, template, in_vocabulary),
        in_brackets=OPEN_THINK in template,
        thinks_in_parts=OPEN_THINK in template and "'thinking'" in template.replace('"', "'"),
        special_tokens=frozenset(tags & special),
        turn_tokens=tuple(sorted(token for token in special - tags if token in template)),
        instructions_first=bool(template)
        and "text 3" not in _written(tokenizer, "system", "user", "assistant", "system", "user"),
        no_instructions="text 0" in _written(tokenizer, "user")
        and "text 0" not in _written(tokenizer, "system", "user"),
        alternates="text 0" in _written(tokenizer, "user") and not _written(tokenizer, "user", "user"),
        loses_calls="text 0" in called and "text 1" not in called,
        loses_functions=plain and "text f" not in _written(tokenizer, "user", tools=True),
        loses_results=plain and "text 2" not in _written(tokenizer, "user", "call", "tool"),
    )


def _written(tokenizer: Tokenizer, *roles: str, tools: bool = False) -> str:
    """Prompt of a conversation with these roles, whose texts are "text 0" and so on; empty if it is refused.

    The role "call" is an answer that calls a function of that name. `tools`: with a function "text f".
    """
    function = {"name": "text f", "description": "", "parameters": {"type": "object", "properties": {}}}
    conversation: list[dict[str, Any]] = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    for i, message in enumerate(conversation):
        if message["role"] == "call":
            call = {"id": "000000000", "type": "function", "function": {"name": f"text {i}", "arguments": {}}}
            message |= {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return tokenizer.apply_chat_template(
            conversation, tools=[{"type": "function", "function": function}] if tools else None
        )
    except TemplateError:
        return ""


def _reasons(tools: ToolSyntax, template: str, in_vocabulary: bool) -> bool:
    """True if a model reasons. `in_vocabulary`: True if its tokenizer has the tags `<think>` and `</think>`."""
    if tools in ("harmony", "gemma4"):
        return tools == "harmony" or CLOSE_THOUGHT in template
    return bool(template) and (CLOSE_REASONING in template or OPEN_THINK in template or in_vocabulary)


def _tool_syntax(template: str) -> ToolSyntax:
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "harmony"
    if f"{gemma_calls.OPEN_CALL}call:" in template:
        return "gemma4"
    if MISTRAL_CALL in template:
        return "mistral_json" if re.search(re.escape(MISTRAL_CALL) + r" ?\[", template) else "mistral"
    if OPEN_LIST in template or "<|/tool|>" in template:
        return "phi4_mini_json" if "<|/tool|>" in template else "granite"
    plain = template.replace('\\"', '"')
    if OPEN_CALL in plain and "<function=" in plain and "<parameter=" in plain:
        return "qwen3_coder"
    # GLM writes keys and values as tags inside of the same tag.
    if OPEN_CALL in plain and "arguments" in plain and "<arg_key>" not in plain:
        return "hermes"
    if _LLAMA.search(plain) and "tool_calls" in plain:
        return "llama3_json"
    return "none"


class TaggedParser(AnswerParser):
    """Parser of one answer with tags around reasoning and calls.

    - Reasoning is one block at the beginning. Its closing tag ends it, and so does a tool call; a closing tag after
      that call is not content.
    - A tool call names a known function. What only looks like one is text, as it was written.
    - White space around a tag belongs to the tag.
    - Held back are white space, what may become a tag, and a call until it is certain to be one.
    """

    def __init__(
        self,
        reader: Callable[[str], CallReader] | None = None,
        *,
        call_tags: Sequence[str] = (),
        reasoning: ReasoningState = "none",
        reasoning_tags: tuple[str, str] = (OPEN_REASONING, CLOSE_REASONING),
    ):
        """Begin an answer.

        Args:
            reader: makes the reader of a call from the tag that begins it; None if calls are not parsed.
            call_tags: tags that begin a call. Without any, or with "" too, an answer that begins with JSON is one.
            reasoning: state of the reasoning at the end of the prompt; "none" if it is not parsed.
            reasoning_tags: tags that begin and end the reasoning.
        """
        super().__init__()
        self._new_reader = reader
        self._call_tags = tuple(filter(None, call_tags))
        self._untagged = reader is not None and (not call_tags or "" in call_tags)
        self._in_reasoning = False
        self._has_content = False
        self._space = ""
        """White space after a tag: dropped unless it stands between two pieces of content."""
        self._after_tag = False
        self._opening, self._closing = reasoning_tags
        self._steps = self._parse(reasoning)

    def _parse(self, reasoning: ReasoningState) -> Generator[None, None, None]:
        """Read the whole answer; yields where more of it is needed."""
        if reasoning in ("open", "inside"):
            # A model may write the tag though the prompt has it already.
            opened = yield from self._source.expect((self._opening,))
            if opened or reasoning == "inside":
                self._in_reasoning = self._after_tag = True
        closing = (self._closing,) if self._in_reasoning else ()
        while True:
            if self._untagged and not self._in_reasoning:
                yield from self._untagged_calls()
                self._untagged = False
            tag = yield from self._source.up_to((*closing, *self._call_tags), self._emit)
            if tag is None:
                return
            if tag == self._closing:
                closing = ()
                self._pass_tag()
            else:
                yield from self._call(tag)

    def _untagged_calls(self) -> Generator[None, None, None]:
        """Calls at the beginning of the content, one after the other."""
        source, is_call = self._source, True
        while is_call:
            while True:
                rest = source.text[source.at :].lstrip("; \t\r\n" if self._calls.count else " \t\r\n")
                begun = rest.removeprefix(PYTHON_TAG).lstrip()
                if source.final or (begun and not PYTHON_TAG.startswith(rest)):
                    break
                yield
            if not begun.startswith("{"):
                source.at = len(source.text) if self._calls.count and not rest else source.at
                return
            source.mark, source.at = source.at, len(source.text) - len(begun)
            is_call = yield from self._call("")

    def _call(self, tag: str) -> Generator[None, None, bool]:
        """Read a call after its tag; emit its text if it is not one."""
        assert self._new_reader is not None
        is_call = yield from self._new_reader(tag).read(self._source, self._calls)
        if is_call:
            self._pass_tag()
        else:
            self._emit(self._source.text[self._source.mark : self._source.at])
        self._source.mark = None
        return is_call

    def _pass_tag(self) -> None:
        """Continue with content after a tag."""
        self._in_reasoning = False
        self._after_tag = True
        self._space = ""

    def _emit(self, text: str) -> None:
        """Put text into the reasoning or the content."""
        if self._after_tag:
            stripped = text.lstrip()
            if not stripped:
                self._space += text
                return
            text = self._space + text if self._has_content else stripped
            self._after_tag = False
            self._space = ""
        if self._in_reasoning:
            self._reasoning.append(text)
        elif text:
            self._content.append(text)
            self._has_content = True


def parser_for(
    template: ChatFormat,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    prompt: str,
    parse_tool_calls: bool,
    parse_reasoning: bool,
) -> AnswerParser:
    """Parser of one answer to a prompt.

    `tools`: functions that the request offers, in OpenAI's form; only calls of these are parsed.
    """
    reasoning = template.reasoning_state(prompt) if parse_reasoning else "none"
    functions = read_functions(tools) if parse_tool_calls else {}
    if template.tools == "harmony":
        return HarmonyParser(functions, prompt=prompt, reasoning=parse_reasoning)
    reader, tags = _calls_of(template, functions) if functions else (None, ())
    return TaggedParser(reader, call_tags=tags, reasoning=reasoning, reasoning_tags=template.reasoning_tags)


def _calls_of(
    template: ChatFormat, functions: Mapping[str, Function]
) -> tuple[Callable[[str], CallReader], Sequence[str]]:
    """Factory of readers of the format's calls, and the tags that begin a call."""
    match template.tools:
        case "hermes":
            return lambda tag: JsonCallReader(functions, CLOSE_CALL), (OPEN_CALL, "")
        case "qwen3_coder":
            # Models forget the outer tag now and then.
            return lambda tag: XmlCallReader(functions, tag), (OPEN_CALL, *map(function_tag, functions))
        case "gemma4":
            return lambda tag: GemmaCallReader(functions), (gemma_calls.OPEN_CALL,)
        case "mistral" | "mistral_json":
            return lambda tag: MistralCallReader(functions), (MISTRAL_CALL,)
        case "granite" | "phi4_mini_json":
            # Granite 3 writes the tag as text now and then.
            closing = CLOSE_LIST if template.tools == "phi4_mini_json" else None
            return lambda tag: JsonCallReader(functions, closing), (OPEN_LIST, OPEN_CALL)
        case _:
            return lambda tag: JsonCallReader(functions), ()


ToolChoice = str | Mapping[str, Any]
""""none", "auto", "required", or a function: `{"type": "function", "function": {"name": ...}}`."""

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON as templates write it, and models with them."""

_ANY_TEXT = r"/(.|\n)*/"
_END_VALUE = "\n</parameter>\n"


def tool_grammar(
    template: ChatFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    *,
    prompt: str = "",
    form: Mapping[str, Any] | None = None,
) -> dict[str, str] | None:
    """Arguments of `StructuredOutputs` that make an answer obey `tool_choice`, and have a form if it is text.

    None if any answer will do, or one that begins with the form. With "auto" only strict functions need a grammar,
    `parallel` being False, and a form: then the answer is calls, or has this form. A grammar leaves the model its
    reasoning.

    `tool_choice`: "none", "auto", "required" or a function. `parallel`: False for one call at most. `form`: arguments
    of `StructuredOutputs` for an answer that is text, which is JSON.
    """
    functions = read_functions(tools)
    chosen, auto = _chosen(tool_choice, functions), tool_choice == "auto"
    free = auto and parallel and form is None and not any(function.strict for function in chosen.values())
    reasoning = template.reasoning_state(prompt)
    if not chosen and form is not None and reasoning == "open":
        lark = _Lark(template, chosen, strict_only=True)
        return {"grammar": lark.text(lark.reasoning_before(lark.form(StructuredOutputs.from_value(form))))}
    if not chosen or free:
        return None
    lark = _Lark(template, chosen, strict_only=auto)
    text = lark.form(StructuredOutputs.from_value(form)) if auto and form is not None else None
    if template.tools == "harmony":
        thought, message = lark.up_to(harmony.END), text or (_ANY_TEXT if auto else None)
        return {"grammar": lark.text(harmony.start_rule("function", lark.tag, thought, message))}
    calls = lark.calls(parallel) if text is None else f"{lark.calls(parallel)} | {text}"
    start = lark.text_or_calls(parallel) if auto and text is None else calls
    if start is calls and reasoning == "open":
        start = lark.reasoning_before(start)
    grammar = {"grammar": lark.text(start)}
    after = template.structured_after(prompt)
    return grammar if after is None else {**grammar, "after": after}


class _Lark:
    """Rules of a grammar."""

    def __init__(self, template: ChatFormat, functions: Mapping[str, Function], *, strict_only: bool):
        """Write the rules of calls of some functions. With `strict_only` the others take any arguments."""
        self._special = template.special_tokens
        self._call_tags = _CALL_TAGS.get(template.tools)
        self._in_list = template.tools in _LISTS
        self._break = '"\\n" ' if template.tools in ("hermes", "qwen3_coder") else ""
        self._reasoning_tags = template.reasoning_tags
        self._rules: dict[str, str] = {}
        writers = {"qwen3_coder": self._xml, "harmony": self._harmony, "gemma4": self._gemma, "mistral": self._mistral}
        write = writers.get(template.tools, self._json)
        self._key = "arguments" if template.tools == "hermes" or self._in_list else "parameters"
        for i, function in enumerate(functions.values()):
            self._rules[f"function_{i}"] = write(i, function, any_arguments=strict_only and not function.strict)
        if functions:
            self._rules["function"] = " | ".join(f"function_{i}" for i in range(len(functions)))

    def text(self, start: str) -> str:
        """The grammar, with the body of its first rule."""
        return "".join(f"{name}: {body}\n" for name, body in {"start": start, **self._rules}.items())

    def form(self, wanted: StructuredOutputs) -> str:
        """Name of the rule of a text that is JSON."""
        schema = {"type": "object"} if wanted.json is None else json.loads(str(wanted.json))
        try:
            options = _JSON_FORM if self._call_tags is None else JSON_OPTIONS
            self._rules["form"] = schema_rule(schema, options, self._rules)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"structured_outputs: json: {error}") from error
        return "form"

    def calls(self, parallel: bool) -> str:
        """Body that is one call, or one and more."""
        if self._call_tags is None:
            return 'function ("; " function)*' if parallel else "function"
        opening, closing = map(self.tag, self._call_tags)
        if self._in_list:
            more = ' (", " function)*' if parallel else ""
            self._rules["inner"] = f'"[" function{more} "]" {closing}'
            return f"{opening} inner"
        self._rules["inner"] = f"{self._break}function {self._break}{closing}"
        return f"{opening} inner ({self._break}{opening} inner)*" if parallel else f"{opening} inner"

    def text_or_calls(self, parallel: bool) -> str:
        """Body that is text with calls in it, or without."""
        if self._call_tags is None:
            self._rules["text"] = r"/([^{\s](.|\n)*)?/"
            return f"{self.calls(parallel)} | text"
        self._rules["text"] = _ANY_TEXT
        before = self.up_to(self._call_tags[0])
        return f"({before} inner)* text" if parallel and not self._in_list else f"{before} inner | text"

    def reasoning_before(self, body: str) -> str:
        """Body that begins with the model's reasoning, if the model likes."""
        self._rules["body"] = body
        thought = self.up_to(self._reasoning_tags[1])
        opening = self.tag(self._reasoning_tags[0])
        if self._reasoning_tags[0] == OPEN_THOUGHT:
            opening = f'{self.tag(OPEN_THOUGHT.removesuffix("thought"))} "thought"'
        return f"({opening} {thought} /\\s*/)? body"

    def _json(self, number: int, function: Function, *, any_arguments: bool) -> str:
        """A function's call as JSON."""
        # Where the answer may be other JSON, the two begin alike: the lexer needs the pieces that JSON has.
        pieces = ("{", '"name"', ": ", literal(function.name), ", ", f'"{self._key}"', ": ")
        return f'{" ".join(map(literal, pieces))} {self._arguments(number, function, any_arguments)} "}}"'

    def _harmony(self, number: int, function: Function, *, any_arguments: bool) -> str:
        """A function's call as a message to it."""
        return harmony.call_rule(function.name, self._arguments(number, function, any_arguments), self.tag)

    def _mistral(self, number: int, function: Function, *, any_arguments: bool) -> str:
        """A function's call as its name and JSON."""
        return f"{literal(function.name)} {self.tag(MISTRAL_ARGS)} {self._arguments(number, function, any_arguments)}"

    def _gemma(self, number: int, function: Function, *, any_arguments: bool) -> str:
        """A function's call in Gemma's syntax."""
        if function.strict and not any_arguments:
            raise InvalidParameterError(
                f"tools: function {function.name!r}: strict is not supported with Gemma 4's syntax of calls"
            )
        self._rules["gemma_quote"] = self.tag(gemma_calls.QUOTE)
        quoted = f"gemma_quote {self.up_to(gemma_calls.QUOTE)}"
        return gemma_calls.call_rule(function, self._rules, quoted, any_arguments=any_arguments)

    def _arguments(self, number: int, function: Function, any_arguments: bool) -> str:
        """Name of the rule of a call's arguments as JSON."""
        schema = {"type": "object"} if any_arguments else {"type": "object", **function.schema}
        self._rules[name := f"arguments_{number}"] = self._schema(function, schema)
        return name

    def _xml(self, number: int, function: Function, *, any_arguments: bool) -> str:
        """A function's call as XML, with its parameters in the schema's order."""
        required = () if any_arguments else function.schema.get("required", ())
        parts: list[str] = []
        for i, (name, schema) in enumerate(function.parameters.items()):
            if schema is False:
                continue
            rule = f"parameter_{number}_{i}"
            opening = literal(f"<parameter={name}>\n")
            self._rules[rule] = f"{opening} {self._value(function, schema, function.types(name))}"
            parts.append(rule if name in required else f"{rule}?")
        unnamed = len({*required} - function.parameters.keys())
        others = function.schema.get("additionalProperties", unnamed > 0)
        if others is True or isinstance(others, Mapping):
            value = self._value(function, others, function.types(""))
            self._rules[f"others_{number}"] = f'"<parameter=" /[^>\\n]+/ ">\\n" {value}'
            parts.append(f"others_{number}{{{unnamed},}}")
        return " ".join([literal(function_tag(function.name) + "\n"), *parts, literal("</function>")])

    def _schema(self, function: Function, schema: Mapping[str, Any]) -> str:
        """Body of a rule for JSON of a schema."""
        try:
            return schema_rule(schema, _JSON_FORM, self._rules)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"tools: function {function.name!r}: {error}") from error

    def _value(self, function: Function, schema: Any, types: frozenset[str]) -> str:
        """The value of a parameter with a schema, and the tag after it."""
        schema = schema if isinstance(schema, Mapping) else {}
        target = referenced(str(schema.get("$ref")), function.schema) or schema
        values = target.get("enum", [target["const"]] if "const" in target else None)
        if types == {"string"} and values:
            return f"({' | '.join(literal(value) for value in values)}) {literal(_END_VALUE)}"
        if "string" in types:
            self._rules["value[lazy]"] = r"/(.|\n)*\n<\/parameter>\n/"
            return "value"
        definitions = {key: function.schema[key] for key in ("$defs", "definitions") if key in function.schema}
        rule = f"json_{len(self._rules)}"
        self._rules[rule] = self._schema(function, {**definitions, **schema})
        return f"{rule} {literal(_END_VALUE)}"

    def tag(self, tag: str) -> str:
        """A tag: a special token by its name, which Lark has in angle brackets, or text."""
        if tag not in self._special:
            return literal(tag)
        return tag if tag.startswith("<") else f"<{tag}>"

    def up_to(self, tag: str) -> str:
        """Text up to the first such tag, and the tag."""
        if tag in self._special:
            return f"{_ANY_TEXT} {self.tag(tag)}"
        name = "up_to_" + "".join(f"{ord(letter):x}" for letter in tag)
        self._rules[f"{name}[lazy]"] = _ANY_TEXT[:-1] + re.escape(tag).replace("/", r"\/") + "/"
        return name


def _chosen(tool_choice: ToolChoice, functions: Mapping[str, Function]) -> Mapping[str, Function]:
    """Functions that may be called."""
    if tool_choice == "none" or (tool_choice == "auto" and not functions):
        return {}
    if not functions:
        raise InvalidParameterError("tool_choice: there are no tools to choose from")
    if tool_choice in ("auto", "required"):
        return functions
    named = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameterError(
            f"tool_choice: expected none, auto, required or a function's name, got {tool_choice!r}"
        )
    if name not in functions:
        raise InvalidParameterError(f"tool_choice: tools has no function {name!r}, only {', '.join(functions)}")
    return {name: functions[name]}
