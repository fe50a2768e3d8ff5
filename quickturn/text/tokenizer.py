"""One model's tokenizer: text to ids and back, its special tokens, and the file or directory that it comes
from.

Built on the `tokenizers` library alone: `transformers` would cost the server process seconds and a torch
import at start.
"""

import json
import re
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from quickturn.files.gguf_header import Value, read_metadata
from quickturn.files.resolve import text_files
from quickturn.text.encoder import DATA_END, DATA_START, Encoder
from quickturn.text.gguf_tokenizer import build_gguf_tokenizer, strings_of
from quickturn.text.vocabulary import Vocabulary

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what a model's files say about its use.

    `special` maps roles such as 'bos_token' to token texts (chat templates read them). `eos_ids` end an
    answer. `add_bos`: put BOS in front of a plain text; None leaves it to the tokenizer's own post-processor.
    `sampling_defaults` are the model's recommended temperature, top_p and so on.
    """

    backend: tokenizers.Tokenizer
    special: Mapping[str, str]
    eos_ids: tuple[int, ...]
    add_bos: bool | None = None
    chat_template: str | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes and special flags per token id, as detokenising needs them."""
        return Vocabulary.of(self.backend)

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the tokens that mean something to the model: special tokens, and added ones that its chat
        template writes."""
        template = self.chat_template or ""
        found = [
            token.content
            for token in self.backend.get_added_tokens_decoder().values()
            if token.special or (token.content.strip() and token.content in template)
        ]
        longest_first = sorted(found, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes rendered chats, and remembers what it encoded."""
        return Encoder(self.backend, self.control_pattern)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, in which control tokens are recognised; with what the model wants in front if
        `add_special`."""
        if not add_special:
            return self._ids(text, add_special=False)
        if self.add_bos is None:
            return self._ids(text, add_special=True)
        bos = self.backend.token_to_id(self.special.get("bos_token", "")) if self.add_bos else None
        ids = self._ids(text, add_special=False)
        return ids if bos is None else [bos, *ids]

    def mark_data(self, value: Any) -> Any:
        """`value` (strings in lists and dicts, as deep as they go) with every control token inside a string
        wrapped in marks.

        Chat templates get marked data; `encoder` then knows the template's own markup from what only looks
        like it.
        """
        if isinstance(value, str):
            clean = value.replace(DATA_START, "").replace(DATA_END, "")
            return self.control_pattern.sub(rf"{DATA_START}\g<0>{DATA_END}", clean)
        if isinstance(value, dict):
            return {key: self.mark_data(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_data(item) for item in value]
        return value

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a rendered chat: marked control tokens are encoded as text, the rest as usual."""
        return self.encoder.encode([text]).ids.tolist()

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.vocabulary.decode(ids, skip_special)

    def _ids(self, text: str, add_special: bool) -> list[int]:
        # As in `encoder`: encode_batch releases the interpreter lock, encode doesn't.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return ids


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Ids as little-endian int32, the form in which a prompt travels to the engine."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model under any name that `text_files` knows. Raises ValueError saying what is
    missing.
    """
    source = text_files(model)
    return _from_gguf(read_metadata(source)) if source.is_file() else _from_directory(source)


def _from_gguf(metadata: dict[str, Value]) -> Tokenizer:
    backend, add_bos = build_gguf_tokenizer(metadata)
    tokens = strings_of(metadata, "tokenizer.ggml.tokens")
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in _GGUF_ROLES.items()}
    special = {
        role: tokens[index] for role, index in ids.items() if isinstance(index, int) and index < len(tokens)
    }
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        special=special,
        eos_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        add_bos=add_bos,
        chat_template=template if isinstance(template, str) else None,
    )


def _from_directory(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend=backend,
        special=special,
        eos_ids=_eos_ids(backend, special, _read_json(folder / "config.json"), generation),
        add_bos=add_bos if isinstance(add_bos, bool) and "bos_token" in special else None,
        chat_template=_chat_template(folder, config),
        sampling_defaults={
            name: value for name in _DEFAULTS if isinstance(value := generation.get(name), int | float)
        },
    )


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for source in sources:
        for role in _ROLES:
            token = source.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special.setdefault(role, text)
    return special


def _eos_ids(
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    config: dict[str, Any],
    generation: dict[str, Any],
) -> tuple[int, ...]:
    """The tokenizer's own end first, then those of the generation configuration, which chat models list in
    full."""
    found: list[Any] = [backend.token_to_id(special.get("eos_token", ""))]
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in found if isinstance(item, int)))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file. Raises ValueError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
