"""Small tokenizers of every kind of cut: trained here, in a moment, on a text of code and prose."""

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quickturn.text.gguf_tokenizer import CUTS

CORPUS = [
    "def main(argv: list[str]) -> None:\n    print('hello world', 123)\n\n\n    return  None\n",
    "It's a don't-care;\nthe quick brown fox jumps\n\tover the lazy dog 2024.\nThe end!\n",
    "über Straße 你好世界 été\nnext line\r\nthird\n\n  indented  text\n",
] * 20
CONTROL = ("<|im_start|>", "<|im_end|>", "<|im_end|>!", "<think>")
Added = list[AddedToken]


def _plain_tokens() -> Added:
    return [AddedToken(token, special=True, normalized=False) for token in CONTROL]


def _odd_tokens() -> Added:
    """Tokens that reach to their sides, that words hold, that are white space, and that are normalised."""
    return [
        *_plain_tokens(),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True),
        AddedToken("<end>", special=True, normalized=False, rstrip=True),
        AddedToken("<word>", special=True, normalized=False, single_word=True),
        AddedToken("    ", normalized=False),
        AddedToken("fox", normalized=True),
        AddedToken(" dog", normalized=False),
    ]


def _trained(
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    added: Added,
    byte_level: bool = True,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token=None))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet if byte_level else [], show_progress=False,
        special_tokens=[] if byte_level else alphabet,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def _split(name: str) -> pre_tokenizers.PreTokenizer:
    pattern = CUTS[name].pattern
    assert pattern is not None
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def _metaspace(scheme: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
    )
    tokenizer.add_special_tokens(_plain_tokens())
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_plain_tokens())
    return tokenizer


_LEGACY = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: _trained(None, _byte_level(), _plain_tokens()),
    "digits": lambda: _trained(
        None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level()]), _plain_tokens()
    ),
    "llama-3": lambda: _trained(None, _split("llama3"), _plain_tokens()),
    "qwen-2": lambda: _trained(normalizers.NFC(), _split("qwen2"), _plain_tokens()),
    "qwen-3.5": lambda: _trained(normalizers.NFC(), _split("qwen35"), _plain_tokens()),
    "tekken": lambda: _trained(None, _split("tekken"), _plain_tokens()),
    "gpt-4o": lambda: _trained(None, _split("gpt-4o"), _plain_tokens()),
    "one piece": lambda: _trained(None, _byte_level(use_regex=False), _plain_tokens()),
    "prefix space": lambda: _trained(None, _byte_level(add_prefix_space=True), _plain_tokens()),
    "metaspace first": lambda: _trained(None, _metaspace("first"), _plain_tokens(), byte_level=False),
    "metaspace always": lambda: _trained(None, _metaspace("always"), _plain_tokens(), byte_level=False),
    "legacy": lambda: _trained(_LEGACY, None, _plain_tokens(), byte_level=False),
    "odd tokens": lambda: _trained(None, _byte_level(), _odd_tokens()),
    "odd tokens, lower case": lambda: _trained(normalizers.Lowercase(), _byte_level(), _odd_tokens()),
    "word piece": _word_piece,
    "unigram": _unigram,
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """The tokenizer of that kind; it isn't to be changed."""
    return KINDS[kind]()
