"""Builds a tokenizer from the vocabulary that a GGUF file carries.

A GGUF file names its tokenizer by model ('gpt2': byte-level BPE, 'llama': SentencePiece BPE) and, for
byte-level BPE, by the pre-tokenizer that cut the text while the merges were learned. The cut isn't in the
file, only its name; the patterns here are those of the `tokenizer.json` files that these names stand for.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quickturn.files.gguf_header import Value
from quickturn.text.byte_alphabet import BYTE_OF_CHAR

_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


@dataclass(frozen=True)
class Cut:
    """How a pre-tokenizer of that name treats text. `pattern` None is GPT-2's own; `digits` cuts single
    digits out first."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_CUT, _DIGITS_CUT = Cut(), Cut(digits=True)
_LLAMA3_CUT = Cut(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_CUT, _GPT4O_CUT = Cut(_QWEN2, nfc=True), Cut(_GPT4O)

CUTS: dict[str, Cut] = {
    **dict.fromkeys(
        ("default", "gpt-2", "olmo", "mpt", "phi-2", "jais", "trillion", "roberta-bpe"), _GPT2_CUT
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_CUT),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_CUT
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2_CUT),
    "qwen35": Cut(_QWEN35, nfc=True),
    "tekken": Cut(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O_CUT),
}


def build_gguf_tokenizer(metadata: dict[str, Value]) -> tuple[Tokenizer, bool]:
    """The tokenizer that `metadata` describes, and whether a text gets the BOS token in front.

    Raises ValueError for a tokenizer model or a pre-tokenizer name that isn't known: guessing would give
    wrong ids, silently.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        name = str(metadata.get("tokenizer.ggml.pre", "default"))
        if name not in CUTS:
            raise ValueError(
                f"the GGUF file names the pre-tokenizer {name!r}, which is not known here; "
                f"serve the model's original directory with its tokenizer.json "
                f"(known: {', '.join(sorted(CUTS))})"
            )
        tokenizer, add_bos = _byte_level(metadata, CUTS[name]), CUTS[name].add_bos
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    else:
        raise ValueError(
            f"the GGUF file's tokenizer model is {kind!r}; supported are 'gpt2' (byte-level BPE) "
            f"and 'llama' (SentencePiece BPE)"
        )
    _add_tokens(tokenizer, metadata, byte_level=kind == "gpt2")
    return tokenizer, bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))


def strings_of(metadata: dict[str, Value], key: str) -> list[str]:
    """The list of strings under `key`; ValueError when it's missing."""
    value = metadata.get(key)
    if not isinstance(value, list):
        raise ValueError(f"the GGUF file has no {key}")
    return [str(item) for item in value]


def _byte_level(metadata: dict[str, Value], cut: Cut) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(strings_of(metadata, "tokenizer.ggml.tokens"))}
    merges = [_pair(merge) for merge in strings_of(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignore_merges))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: dict[str, Value]) -> Tokenizer:
    tokens = strings_of(metadata, "tokenizer.ggml.tokens")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("the GGUF file has no tokenizer.ggml.scores that fit its tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_by_score(vocab, [float(score) for score in scores]),
            unk_token=tokens[int(unknown)] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme=scheme, split=False
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The BPE merges that SentencePiece's greedy 'join the best-scored neighbours' amounts to, best first."""
    # Ties go by the joined token's id, as in `transformers`.
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], -len(left), -len(right), index, vocab[left], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Value], byte_level: bool) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens: both stay whole in a text.

    A byte-level vocabulary spells every token in the byte alphabet, so a control token outside it is a
    mislabel of the converter.
    """
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return
    tokens = strings_of(metadata, "tokenizer.ggml.tokens")
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, found in zip(tokens, kinds, strict=True)
            if found == kind
            and (not byte_level or not special or all(char in BYTE_OF_CHAR for char in token))
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
