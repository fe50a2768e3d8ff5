"""Compiles grammars away from the engine loop, within bounds of time and memory.

`xgrammar` does the work; it and what it imports are loaded with the first request that needs a grammar, in a
thread. A compilation can't be interrupted: one that takes too long keeps its thread while its request is
refused, and when every thread is kept like that, further grammars are refused at once.
"""

import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quickturn.engine.closing import Ways
from quickturn.sampling_params import Constraint

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, Grammar, TokenizerInfo

MAX_SOURCE = 1 << 20
_MAX_THREADS = 4
_REMEMBERED_FAILURES = 1024
INSTALL = "structured output needs xgrammar: pip install 'quickturn[server]'"


@dataclass(frozen=True)
class GrammarLimits:
    """`seconds`: how long one grammar may compile. `cache_bytes`: memory for compiled ones that nobody
    uses now.
    """

    seconds: float = 20.0
    cache_bytes: int = 256 << 20


Outcome = "CompiledGrammar | str"
"""A compiled grammar, or why there is none."""


class GrammarPool:
    """Compiled grammars by their source. Used by the engine's thread alone; only compiling happens in
    others.
    """

    def __init__(self, tokenizer: Callable[[], "TokenizerInfo"], limits: GrammarLimits | None = None) -> None:
        """`tokenizer` is called in a thread, once, when the first grammar is wanted."""
        self._tokenizer = tokenizer
        self._limits = limits or GrammarLimits()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._failed: OrderedDict[str, str] = OrderedDict()
        self._running: dict[str, _Job] = {}
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._workers = 0
        self._given_up: list[_Job] = []
        self._info: TokenizerInfo | None = None
        self._ways: Ways | None = None
        self._info_lock = threading.Lock()

    @property
    def ways(self) -> Ways:
        """How answers over the model's vocabulary are brought to an end."""
        if self._ways is None:
            self._ways = Ways(self._vocabulary())
        return self._ways

    def outcome(self, constraint: Constraint) -> "CompiledGrammar | str | None":
        """The compiled grammar or an error text; None while it compiles, which this call begins if need
        be.
        """
        source = constraint.source
        self._collect()
        if source in self._compiled:
            self._compiled.move_to_end(source)
            return self._compiled[source]
        if source in self._failed:
            return self._failed[source]
        if source not in self._running:
            return self._start(source)
        job = self._running[source]
        if job.began and time.monotonic() - job.began > self._limits.seconds:
            self._given_up.append(job)
            del self._running[source]
            return self._fail(
                source,
                f"the grammar took longer than {self._limits.seconds:g} s to compile: make it simpler "
                "(fewer alternatives, smaller bounds of repetition, shorter patterns)",
            )
        return None

    def _start(self, source: str) -> str | None:
        if len(source) > MAX_SOURCE:
            return f"the grammar has {len(source)} characters, more than {MAX_SOURCE}: make it smaller"
        self._given_up = [job for job in self._given_up if job.result is None]
        free = self._workers - len(self._given_up) - len(self._running)
        if free < 1:
            if self._workers < _MAX_THREADS:
                self._workers += 1
                threading.Thread(target=self._work, daemon=True, name="grammar").start()
            elif len(self._given_up) == self._workers:
                return "the grammar compiler is busy with grammars that are too complex; try again later"
        job = _Job(source)
        self._running[source] = job
        self._jobs.put(job)
        return None

    def _collect(self) -> None:
        for source, job in list(self._running.items()):
            if job.result is None:
                continue
            del self._running[source]
            if isinstance(job.result, str):
                self._fail(source, job.result)
            else:
                self._keep(source, job.result)

    def _keep(self, source: str, compiled: "CompiledGrammar") -> None:
        self._compiled[source] = compiled
        total = sum(each.memory_size_bytes for each in self._compiled.values())
        while total > self._limits.cache_bytes and len(self._compiled) > 1:
            total -= self._compiled.popitem(last=False)[1].memory_size_bytes

    def _fail(self, source: str, message: str) -> str:
        self._failed[source] = message
        if len(self._failed) > _REMEMBERED_FAILURES:
            self._failed.popitem(last=False)
        return message

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job.began = time.monotonic()
            try:
                job.result = self._compile(job.source)
            except ImportError:
                job.result = INSTALL
            except Exception as error:
                job.result = f"the grammar can't be compiled: {_readable(error)}"

    def _compile(self, source: str) -> "CompiledGrammar":
        import xgrammar

        compiler = xgrammar.GrammarCompiler(self._vocabulary(), max_threads=1, cache_enabled=False)
        return compiler.compile_grammar(grammar_of(source))

    def _vocabulary(self) -> "TokenizerInfo":
        with self._info_lock:
            if self._info is None:
                self._info = self._tokenizer()
            return self._info


@dataclass
class _Job:
    source: str
    began: float = 0.0
    result: "CompiledGrammar | str | None" = None


_LOOSE_CHARACTER = r"[^\"\\\r\n]"
_JSON_CHARACTER = r'([^\"\\\0-\x1f]) | ("\\" [\"\\/bfnrt])'


_DIGITS = (
    ("[1-9] [0-9]*", "[1-9] [0-9]{0, 18}"),
    ('("." basic_number_digits{1, -1})', '("." basic_number_digits{1, 17})'),
    ("basic_number_4 basic_number_digits{1, -1}", "basic_number_4 basic_number_digits{1, 3}"),
)
"""A number that the schema doesn't bound has digits without end, and a model that has begun to write them may
not find one: as many as 64 bits hold are enough.
"""
_NUMBER_RULES = re.compile(r"^basic_(?:integer|number_[235]) ::=.*$", re.MULTILINE)
_SHORT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\x([0-9a-f]{2})")


def grammar_of(source: str) -> "Grammar":
    """The grammar of a structural tag. Strings of bounded length get JSON's own characters: xgrammar (0.2.9)
    lets control characters into them, and no escapes. Numbers have an end.
    """
    import xgrammar

    grammar = xgrammar.Grammar.from_structural_tag(source)
    text = str(grammar)
    bounded = _NUMBER_RULES.sub(lambda rule: _with_few_digits(rule[0]), text)
    if bounded == text and _LOOSE_CHARACTER not in text:
        return grammar
    text = bounded
    # It also prints characters as '\\xdf', and reads a letter that follows as a third digit.
    text = text.replace(f"({_LOOSE_CHARACTER})", _JSON_CHARACTER)
    # A string of exactly one character has it in line.
    text = _SHORT_ESCAPE.sub(r"\1\\u00\2", text.replace(_LOOSE_CHARACTER, f"({_JSON_CHARACTER})"))
    return xgrammar.Grammar.from_ebnf(text)


def _with_few_digits(rule: str) -> str:
    for endless, bounded in _DIGITS:
        rule = rule.replace(endless, bounded)
    return rule


def tokenizer_info(model: str, vocab_size: int, stop_ids: Sequence[int]) -> "TokenizerInfo":
    """The vocabulary as grammars see it: bytes a token. Special tokens get bytes that are no UTF-8, so that
    no text matches them and a grammar can still ask for one by its id.
    """
    import xgrammar

    from quickturn.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    vocabulary = tokenizer.vocabulary
    special = vocabulary.special_ids
    tokens = [b"\xff" * (index in special) + vocabulary.token_bytes(index) for index in range(vocab_size)]
    ends = sorted({*stop_ids, *tokenizer.eos_ids})
    return xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=ends,
        add_prefix_space=vocabulary.strip_first,
    )


def _readable(error: Exception) -> str:
    """The message of an xgrammar error without its time and source line."""
    text = str(error).strip()
    head, found, rest = text.partition(": ")
    return rest if found and head.startswith("[") else text
