"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from verax.errors import CheckpointError, TemplateError
from verax.text import chat_template

__all__ = ["Tokenizer"]


class Tokenizer:
    """A fast tokenizer with the special tokens and the chat template of its checkpoint."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_templates: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self.eos_token_ids = eos_token_ids

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, and what tokenizer_config.json, generation_config.json and chat_template.jinja add.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file; transformers' AutoTokenizer.from_pretrained(...).save_pretrained writes one"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a valid tokenizer: {error}") from error
        config = _optional_json(folder / "tokenizer_config.json")
        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in {**_optional_json(folder / "special_tokens_map.json"), **config}.items()
            if key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        ends = {backend.token_to_id(special["eos_token"])} if "eos_token" in special else set()
        for name in ("config.json", "generation_config.json"):
            listed = _optional_json(folder / name).get("eos_token_id")
            ends.update(listed if isinstance(listed, list) else [listed])
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=frozenset(end for end in ends if end is not None),
            chat_templates=_chat_templates(folder, config),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` for what the model expects around it (a beginning token, say)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None if there is none."""
        return self._backend.id_to_token(token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._chat_templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation of `{"role": ..., "content": ...}` messages, to be encoded without specials.

        Raises:
            TemplateError: if the checkpoint has no template, or it refuses the messages.
            InvalidParameterError: if `messages` is no conversation.
        """
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        template = self._chat_templates.get(name)
        if template is None:
            raise TemplateError("this checkpoint has no chat template; give a prompt as text instead of messages")
        variables = {
            **self._special_tokens,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return chat_template.render(template, messages, **variables)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja first, else tokenizer_config.json's one, or its list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    given = config.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {"default": given} if given else {}


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value
