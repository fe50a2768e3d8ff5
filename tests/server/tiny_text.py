"""A model directory that has a text side only: every byte is a token, so that each multi-byte character comes
in pieces.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quickturn.text.byte_alphabet import CHAR_OF_BYTE

SPECIAL = ("<|im_start|>", "<|im_end|>")
EOS_ID = 257
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_text(folder: Path) -> Path:
    """Write tokenizer.json and its companions into `folder`; ids 0 to 255 are the bytes themselves."""
    tokenizer = Tokenizer(models.BPE(vocab={CHAR_OF_BYTE[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    return folder
