"""A model directory that has a text side only: every byte is a token, so that each multi-byte character comes
in pieces, and thinking and tool calls are written as Qwen's models do.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quickturn.text.byte_alphabet import CHAR_OF_BYTE

SPECIAL = ("<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
IDS = {token: 256 + index for index, token in enumerate((*SPECIAL, *MARKUP))}
EOS_ID = IDS["<|im_end|>"]
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"""


def write_tiny_text(folder: Path) -> Path:
    """Write tokenizer.json and its companions into `folder`; ids 0 to 255 are the bytes themselves."""
    tokenizer = Tokenizer(models.BPE(vocab={CHAR_OF_BYTE[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token) for token in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    return folder


def encode(text: str) -> list[int]:
    """Ids of an answer; its control tokens are those of the vocabulary."""
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, IDS))})", text):
        ids += [IDS[piece]] if piece in IDS else list(piece.encode())
    return ids


def spell(ids: list[int]) -> str:
    """What `ids` stand for; control tokens in double angle brackets, to tell them from mere text."""
    names = {index: f"<{token}>".encode() for token, index in IDS.items()}
    return b"".join(names.get(index) or bytes([index]) for index in ids).decode()
