"""From chat messages to the prompt's token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from quickturn.text.chat_template import ChatTemplate
from quickturn.text.conversation import normalise_messages
from quickturn.text.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    extra: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Ids of the prompt that asks for the next answer. Control tokens inside messages and tools are encoded
    as plain text.

    `extra` are further variables for the template. Raises BadMessage or TemplateFailed.
    """
    marked = tokenizer.mark_data(normalise_messages(messages, template.source))
    definitions = None if tools is None else tokenizer.mark_data(list(tools))
    return tokenizer.encode_marked(template.render(marked, definitions, extra=extra))
