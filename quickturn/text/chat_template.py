"""Chat templates in a sandbox, with the same globals, filters and tags that `transformers` gives them.

Templates are programs of strangers: they run in jinja2's immutable sandbox, and see nothing but plain JSON
values.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils


class TemplateFailed(ValueError):
    """The template refused these messages, or is itself broken; the text says which."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training; here it's only
    its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without underscore names: a template that reaches for internals is refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` has to work
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` as a template may use it: to call, and `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class ChatTemplate:
    """A compiled chat template. Raises TemplateFailed when `source` isn't a template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._special = dict(special)
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template can't be compiled: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `extra` are further variables (`chat_template_kwargs`); they win over special
        tokens.

        Raises TemplateFailed with the template's own words when it doesn't accept the messages.
        """
        variables = {**self._special, **(extra or {})}
        variables |= {"messages": messages, "tools": tools, "documents": None}
        variables.setdefault("add_generation_prompt", add_generation_prompt)
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template refused the messages: {error}") from error
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError, ArithmeticError) as error:
            raise TemplateFailed(f"the model's chat template failed on the messages: {error!r}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and sorts keys, which is not what models were trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have the attribute {name!r}")
