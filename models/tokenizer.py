"""From text to tokens and back, for checkpoints and for GGUF files."""

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from models.checkpoint import CheckpointError
from models.gguf_file import GgufFile


class Tokenizer:
    """Text to tokens and back, and chats to text.

    Attributes:
      stop_tokens: Tokens that end an answer.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        stop_tokens: frozenset[int],
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        """Bind what a checkpoint says.

        Args:
          encoder: Does the work.
          stop_tokens: Tokens that end an answer.
          chat_template: A Jinja template, or None if there is none.
          special_tokens: What ``bos_token`` and the like are in the template.
        """
        self.stop_tokens = stop_tokens
        self._encoder = encoder
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "Tokenizer":
        """Read the tokenizer in the header of a GGUF file.

        Raises:
          CheckpointError: It is of another kind than SmolLM's.
        """
        for name, wanted in (
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
            ("tokenizer.ggml.add_bos_token", False),
        ):
            if file.field(name) != wanted:
                raise CheckpointError(
                    f"{file.folder}: {name}={file.field(name)!r} is not supported; it "
                    f"can be {wanted!r}"
                )
        tokens = file.field("tokenizer.ggml.tokens")
        kinds = file.field("tokenizer.ggml.token_type")
        merges = file.field("tokenizer.ggml.merges")
        encoder = tokenizers.Tokenizer(
            tokenizer_models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ")) for merge in merges],
            )
        )
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        encoder.decoder = decoders.ByteLevel()
        encoder.add_special_tokens(
            [
                token
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == gguf.TokenType.CONTROL
            ]
        )
        template, special = None, {}
        if file.has_field("tokenizer.chat_template"):
            template = file.field("tokenizer.chat_template")
        for name in ("bos", "eos"):
            special[f"{name}_token"] = tokens[
                file.field(f"tokenizer.ggml.{name}_token_id")
            ]
        return cls(
            encoder,
            stop_tokens=frozenset([file.field("tokenizer.ggml.eos_token_id")]),
            chat_template=template,
            special_tokens=special,
        )

    @classmethod
    def from_checkpoint(cls, folder: pathlib.Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and what lies beside it in a released checkpoint.

        Raises:
          CheckpointError: ``tokenizer.json`` is missing.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: has no tokenizer.json, so text cannot become tokens"
            )
        config = _read_json(folder / "tokenizer_config.json")
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text()
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name in ("bos_token", "eos_token", "unk_token", "pad_token") and value
        }
        stop_tokens = set()
        for name in ("generation_config.json", "config.json"):
            found = _read_json(folder / name).get("eos_token_id")
            stop_tokens |= set(found if isinstance(found, list) else [found]) - {None}
        return cls(
            tokenizers.Tokenizer.from_file(str(path)),
            stop_tokens=frozenset(stop_tokens),
            chat_template=template,
            special_tokens=special,
        )

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._chat_template is not None

    def encode(self, text: str, *, adds_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text.

        Args:
          text: May contain special tokens, as a rendered chat does.
          adds_special_tokens: Whether to begin as the checkpoint wants plain text to.
        """
        return self._encoder.encode(text, add_special_tokens=adds_special_tokens).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._encoder.decode(list(tokens), skip_special_tokens=True)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a chat, up to where the answer begins.

        Args:
          messages: Each with ``role`` and ``content``.

        Raises:
          CheckpointError: There is no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise CheckpointError("the checkpoint has no chat template; give raw text")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self._chat_template).render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template failed: {error}") from error

    def stream(self) -> "TextStream":
        """Return a decoder that takes one token at a time."""
        return TextStream(self._encoder)


class TextStream:
    """Decodes tokens one by one; a character split over tokens waits for its end."""

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        """Start with no token."""
        self._encoder = encoder
        self._stream = decoders.DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Return the text that the token completes; perhaps none."""
        return self._stream.step(self._encoder, token) or ""


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
