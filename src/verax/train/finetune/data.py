"""Objects of a file to examples, which are token ids and a mask of the trained ones, and examples to batches.

An object has `messages`, `prompt` and `completion`, or `text`, as in TRL's and OpenAI's files.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from verax._buckets import at_least, powers
from verax._optional import require_optional
from verax.errors import InvalidParameterError, TemplateError
from verax.text.features.tool_calls import (
    CLOSE_REASONING,
    CLOSE_THINK,
    CLOSE_THOUGHT,
    OPEN_REASONING,
    OPEN_THINK,
    OPEN_THOUGHT,
)
from verax.text.tokens.chat_template import REASONING, check_messages
from verax.text.tokens.tokenizer import Tokenizer

FORMS = 'an object with "messages", with "prompt" and "completion", or with "text"'

_REFUSED = {
    **dict.fromkeys(("system", "system_prompt"), 'give it as a first message of the role "system", or in the prompt'),
    "functions": 'name them in "tools"',
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "documents"),
        "the template is rendered without variables of its own",
    ),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "give it in the answer's message, or its text"),
    **dict.fromkeys(("images", "videos", "audios"), "only text is read"),
    **dict.fromkeys(("chosen", "rejected"), "each answer here is learned; leave it out"),
    **dict.fromkeys(("labels", "completion_mask", "assistant_masks"), "what is trained follows from the form"),
    "suffix": "give it in the prompt, as the model's tokens for filling in",
    "loss_scale": 'answers count alike; one of the "weight" 0 is only read',
}
"""Fields of other programs' files that change an example, each with what is possible here."""

_SWITCHES = ("loss", "train", "training", "trainable")
"""Names by which other programs' files say whether a message, or a line, is trained."""

_ASSISTANTS = ("assistant", "gpt", "model", "bot", "chatbot", "ai")
"""Roles, in small letters, that other programs' files give to the assistant."""


class Example(NamedTuple):
    """Tokens of an example."""

    tokens: Int32[np.ndarray, "T"]
    trained: Bool[np.ndarray, "T"]
    """True for the tokens that the model learns to give. The others are only read."""


@dataclass(frozen=True)
class Examples:
    """Examples of a file, each with a token that is trained."""

    items: list[Example]
    cut: int
    """Examples that were longer than the limit, and lost their ends."""
    left_out: int
    """Examples without a token that is trained before the limit."""

    def __len__(self) -> int:
        return len(self.items)


class _Piece(NamedTuple):
    """Part of an example's text."""

    text: str
    trained: bool


def read_examples(path: Path, tokenizer: Tokenizer, *, max_length: int, now: datetime | None = None) -> Examples:
    """Examples of a file, in its order. A conversation may become several.

    `path`: a file of UTF-8 text with one JSON object on each line, where blank lines are skipped, or with an array of
    them; or of Parquet, with an object in each row. `tokenizer`: with the chat template, if there are messages. `now`:
    time for templates that write the date; the clock's if None.
    """
    now = now or datetime.now()
    items, cut, left_out = list[Example](), 0, 0
    unit, objects = _read_file(path)
    for number, line in enumerate(objects, start=1):
        if isinstance(line, bytes) and not line.strip():
            continue
        try:
            read = list(_examples(_checked(line), tokenizer, now))
        except (ValueError, RecursionError, TemplateError) as error:
            raise InvalidParameterError(f"data: {path}, {unit} {number}: {error}") from error
        for tokens, trained in read:
            cut += len(tokens) > max_length
            if trained[1:max_length].any():  # nothing predicts the first token
                items.append(Example(tokens[:max_length], trained[:max_length]))
            else:
                left_out += 1
    if not items:
        why = "it is empty"
        if left_out:
            why = f"what is to be learned comes after {max_length} tokens, in each of {left_out}"
        raise InvalidParameterError(f"data: {path}: no example to learn from: {why}; expected {FORMS} on each line")
    return Examples(items, cut, left_out)


def _read_file(path: Path) -> tuple[str, Sequence[Any]]:
    """Kind of the file's parts (line, row, item), and its objects: lines that are not parsed yet, or values."""
    try:
        if path.suffix.lower() == ".parquet":
            table = require_optional("pyarrow.parquet").read_table(path)
            return "row", [_without_nulls(row) for row in table.to_pylist()]
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        if content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK")):
            raise ValueError("it is packed; unpack it")
        if not content.lstrip().startswith(b"["):
            return "line", content.splitlines()
        return "item", json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidParameterError(f"data: {path}: cannot be read: {why}") from error


def _without_nulls(value: Any) -> Any:
    """A row without its empty cells, which all objects of a column have where one of them has a value."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _checked(line: Any) -> Mapping[str, Any]:
    """The object of a line, or of a value."""
    try:
        value = json.loads(line) if isinstance(line, bytes) else line
        json.dumps(value, ensure_ascii=False, default=str).encode()  # half of a surrogate pair is not text
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        given = line.decode(errors="replace") if isinstance(line, bytes) else repr(line)
        raise ValueError(f"expected {FORMS}, got {given[:60]}")
    return value


def _examples(fields: Mapping[str, Any], tokenizer: Tokenizer, now: datetime) -> Iterator[Example]:
    """Examples of a line's object."""
    forms = [form for form in (("messages",), ("prompt", "completion"), ("text",)) if fields.keys() >= {*form}]
    if len(forms) != 1:
        raise ValueError(f"expected {FORMS}, got the keys {', '.join(fields) or '(none)'}")
    if refused := next((name for name in _REFUSED if fields.get(name) not in (None, "", [], {})), None):
        raise ValueError(f"{refused}: it is not supported; {_REFUSED[refused]}")
    if fields.get("label") is False:
        raise ValueError("label: false marks an answer to avoid, and each answer here is learned; leave it out")
    if not_learned := next((name for name in _SWITCHES if fields.get(name) is False), None):
        raise ValueError(f"{not_learned}: false is not supported; each line here is learned; leave it out")
    if fields.get("weight") not in (None, 1):
        raise ValueError(f"weight: {fields['weight']!r} is not supported; each line here is learned; leave it out")
    messages, prompt, completion = (fields.get(name) for name in ("messages", "prompt", "completion"))
    if forms == [("prompt", "completion")] and isinstance(prompt, list) and isinstance(completion, list):
        # Both are lists of messages, as in TRL. Answers of the prompt are only read.
        messages = [{**m, "weight": 0} if isinstance(m, dict) else m for m in prompt] + completion
        forms = [("messages",)]
    if forms == [("messages",)]:
        render = partial(tokenizer.apply_chat_template, tools=fields.get("tools"), strftime_now=now.strftime)
        for pieces in _conversation(messages, fields.get("tools"), render):
            yield _encoded(pieces, tokenizer, templated=True)
        return
    texts = [fields[name] for name in forms[0]]
    for name, text in zip(forms[0], texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{name}: expected a text, got {text!r}")
    if not texts[-1]:
        raise ValueError(f"{forms[0][-1]}: it is empty; there is nothing to learn")
    pieces = [_Piece(text, trained=i == len(texts) - 1) for i, text in enumerate(texts)]
    example = _encoded(pieces, tokenizer, templated=False)
    begin = tokenizer.special_tokens.get("bos_token")
    if begin is not None and example.tokens[:2].tolist() == [tokenizer.token_id(begin)] * 2:
        raise ValueError(f"{forms[0][0]}: it begins with {begin!r}, which the tokenizer adds; leave it out")
    yield _ended(example, tokenizer)


def _conversation(messages: Any, tools: Any, render: Callable[..., str]) -> list[list[_Piece]]:
    """Pieces of a conversation's examples, in which the assistant's answers are trained.

    It is one example, unless the template renders an answer otherwise when more follows, as those do that drop the
    reasoning of earlier answers. Then each answer is an example, after the prompt that asks for it. An answer of the
    `weight` 0 is only read. `render`: the text of messages, with the tools.
    """
    _check_conversation(messages, tools)
    whole = render(messages, add_generation_prompt=False)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        raise ValueError("messages: expected an answer of the assistant after another message")
    turns = list[tuple[str, str, bool]]()
    for i in answers:
        trained = messages[i].get("weight") != 0
        if trained and not ((messages[i].get("content") or "").strip() or messages[i].get("tool_calls")):
            raise ValueError(f"messages[{i}]: the answer is empty; there is nothing to learn")
        prompt, answer = _turn(messages[: i + 1], render)
        if trained and (part := _left_out(messages[i], prompt + answer, answer)):
            raise TemplateError(f"messages[{i}].{part}: {_LEFT_OUT}")
        turns.append((prompt, answer, trained))
    if not any(trained for *_, trained in turns):
        raise ValueError("messages: each answer has the weight 0; there is nothing to learn")
    if tools and render(messages, tools=None, add_generation_prompt=False) == whole:
        raise TemplateError(f"tools: {_LEFT_OUT}")
    asked, prompt = messages[: answers[-1]], turns[-1][0]
    written = _without_space(prompt)
    for i, message in enumerate(asked):
        if i not in answers and _without_space(message.get("content") or "") not in written:
            other = [*asked[:i], {**message, "content": f"{message['content']}?"}, *asked[i + 1 :]]
            if render(other) == prompt:  # or the text is there in other characters, such as JSON's
                raise TemplateError(f"messages[{i}]: {_LEFT_OUT}")
    if not all(whole.startswith(prompt + answer) for prompt, answer, _ in turns):
        return [
            [_Piece(prompt, trained=False), _Piece(answer, trained=True)]
            for prompt, answer, trained in turns
            if trained
        ]
    pieces, end = list[_Piece](), 0
    for prompt, answer, trained in turns:
        pieces += [_Piece(prompt[end:], trained=False), _Piece(answer, trained=trained)]
        end = len(prompt) + len(answer)
    return [pieces]


_LEFT_OUT = (
    'the chat template leaves out some of it; remove it, or render the lines yourself as "prompt" and "completion"'
)

_REASONING_TAGS = (OPEN_REASONING, CLOSE_REASONING), (OPEN_THOUGHT, CLOSE_THOUGHT), (OPEN_THINK, CLOSE_THINK)


def _turn(messages: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> tuple[str, str]:
    """The prompt that asks for the last of messages, and that message after it."""
    prompt, text = render(messages[:-1]), render(messages, add_generation_prompt=False)
    if text.startswith(prompt):
        return prompt, text[len(prompt) :]
    # Gemma 4's larger models are asked with empty reasoning, which their template does not write into answers.
    for begin, end in _REASONING_TAGS:
        head, found, rest = prompt.rpartition(begin)
        if found and rest.strip() == end and text.startswith(head) and not text.startswith(head + begin):
            return prompt, text[len(head) :]
    raise TemplateError(
        f"messages[{len(messages) - 1}]: the chat template does not render this answer after the prompt that asks for "
        'it; give "prompt" and "completion" instead'
    )


def _left_out(message: Mapping[str, Any], text: str, answer: str) -> str | None:
    """Field of an answer that is not in the text that was rendered with it, apart from white space; None if all are.

    `answer`: the end of the text, in which its calls are.
    """
    written = _without_space(text)
    for name in ("content", *REASONING):
        part = message.get(name)
        if isinstance(part, str) and _without_space(part) not in written:
            return name
    calls = [str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ()]
    return "tool_calls" if any(answer.count(name) < calls.count(name) for name in calls) else None


def _without_space(text: str) -> str:
    return "".join(text.split())


def _check_conversation(messages: Any, tools: Any) -> None:
    """Refuse what a template would write as Python shows it, and weights and switches that are not supported."""
    check_messages(messages)
    for i, message in enumerate(messages):
        content, weight, calls = message.get("content"), message.get("weight"), message.get("tool_calls") or []
        if not (
            isinstance(calls, list)
            and all(isinstance(c, dict) and isinstance(c.get("function", c), dict) for c in calls)
        ):
            raise ValueError(f"messages[{i}].tool_calls: expected a list of calls of functions, got {calls!r:.60}")
        if not isinstance(content, str | None):
            raise ValueError(f"messages[{i}].content: expected a text, got {content!r:.60}")
        if weight not in (None, 0, 1):
            raise ValueError(f"messages[{i}].weight: expected 0 or 1, got {weight!r}")
        if (role := message["role"]) != "assistant" and role.lower() in _ASSISTANTS:
            raise ValueError(f"messages[{i}].role: {role!r} is not supported; the role of answers is 'assistant'")
        answer = message["role"] == "assistant"
        if refused := next((name for name in _SWITCHES if message.get(name) not in (None, answer)), None):
            possible = 'give the answer the "weight" 0' if answer else "only the assistant's answers are learned"
            raise ValueError(f"messages[{i}].{refused}: {message[refused]!r} is not supported; {possible}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"tools: expected a list of objects, got {tools!r:.60}")


def _encoded(pieces: Sequence[_Piece], tokenizer: Tokenizer, *, templated: bool) -> Example:
    """Tokens of pieces. A piece's tokens do not depend on later ones: an answer is generated after its prompt's tokens.

    What a chat template writes after the token that ends an answer is not trained, since nobody generates it.

    `templated`: True for a chat template's text. To other texts the tokenizer adds its special tokens.
    """
    ids, trained, text = list[int](), list[bool](), ""
    for piece in pieces:
        new = _following(ids, text, piece.text, tokenizer, special=not templated)
        ends = [i for i, token in enumerate(new) if token in tokenizer.eos_token_ids]
        if piece.trained and templated and tokenizer.eos_token_ids and not ends:
            known = ", ".join(f"{tokenizer.token(token)!r}" for token in sorted(tokenizer.eos_token_ids))
            raise TemplateError(
                f"the chat template ends an answer with no token that ends a text ({known}), so that the model would "
                "not learn to stop; add the answers' last token to eos_token_id in the model's generation_config.json"
            )
        last = ends[-1] if ends and templated else len(new)
        ids += new
        trained += [piece.trained and i <= last for i in range(len(new))]
        text += piece.text
    return Example(np.asarray(ids, np.int32), np.asarray(trained, bool))


def _following(ids: list[int], before: str, text: str, tokenizer: Tokenizer, *, special: bool) -> list[int]:
    """Tokens of a text after an earlier one, whose tokens are `ids`.

    A text by itself is not encoded so: many tokenizers put a space before its first word.
    """
    whole = tokenizer.encode(before + text, add_special_tokens=special)
    if whole[: len(ids)] == ids:
        return whole[len(ids) :]
    # A token of the whole goes across the border. After a line break a text is encoded as in the middle of another.
    line, whole = (tokenizer.encode(part, add_special_tokens=False) for part in ("\n", "\n" + text))
    return whole[len(line) :] if whole[: len(line)] == line else tokenizer.encode(text, add_special_tokens=False)


def _ended(example: Example, tokenizer: Tokenizer) -> Example:
    """The example with the token that ends a text, if the tokenizer has one and the text does not end so already."""
    end = tokenizer.eos_token_id
    if end is None or (len(example.tokens) and example.tokens[-1] in tokenizer.eos_token_ids):
        return example
    return Example(np.append(example.tokens, np.int32(end)), np.append(example.trained, True))


Batch = dict[str, np.ndarray]
"""`tokens [B, T]`, `targets [B, T]` (the token after each), `weights [B, T]` and `lengths [B]`.

The weights are the targets' in the loss: equal for all that are trained, adding up to 1 in a step, and otherwise
zero. A row has zeros after its tokens."""

SHORTEST = 32
"""Tokens of the shortest rows. Longer ones have powers of two, so that few programs are compiled."""


def shuffled_batches(
    examples: Sequence[Example], *, seed: int, rows: int, parts: int, max_length: int, start: int
) -> Iterator[Batch]:
    """Endless batches from step `start` on: all examples in a random order, then all in another one, and so on.

    `rows`: examples that are computed at once, B. `parts`: number of such groups of rows that make a step; entries have
    them as a first axis if there are several.
    """
    order = _order(len(examples), seed, start * rows * parts)
    while True:
        chosen = [examples[i] for i in islice(order, rows * parts)]
        batch = _padded(chosen, rows * parts, max_length, total=_targets(chosen))
        if parts > 1:
            batch = {name: array.reshape(parts, rows, *array.shape[1:]) for name, array in batch.items()}
        yield batch


def validation_batches(examples: Sequence[Example], *, rows: int, max_length: int) -> Iterator[Batch]:
    """Batches of all examples once, of similar lengths; the weights of all of them add up to 1."""
    ordered = sorted(examples, key=lambda example: len(example.tokens))
    total = _targets(ordered)
    for i in range(0, len(ordered), rows):
        yield _padded(ordered[i : i + rows], rows, max_length, total=total)


def _order(count: int, seed: int, start: int) -> Iterator[int]:
    epoch, offset = divmod(start, count)
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count)[offset:].tolist()
        epoch, offset = epoch + 1, 0


def _targets(examples: Sequence[Example]) -> int:
    """Number of trained tokens. The first token of an example has none before it that could predict it."""
    return max(1, sum(int(example.trained[1:].sum()) for example in examples))


def _padded(examples: Sequence[Example], rows: int, max_length: int, *, total: int) -> Batch:
    """A batch of `rows`, the last of which are empty if there are fewer examples."""
    longest = max(len(example.tokens) for example in examples) - 1
    length = at_least(powers(min(SHORTEST, max_length), max_length, 2), longest)
    batch = {
        "tokens": np.zeros((rows, length), np.int32),
        "targets": np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
        "lengths": np.zeros(rows, np.int32),
    }
    for row, (tokens, trained) in enumerate(examples):
        T = len(tokens) - 1
        batch["tokens"][row, :T] = tokens[:-1]
        batch["targets"][row, :T] = tokens[1:]
        batch["weights"][row, :T] = trained[1:] / np.float32(total)
        batch["lengths"][row] = T
    return batch
