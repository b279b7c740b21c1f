"""Rendering of chat templates. Knows nothing of tokens.

The environment is that of transformers' `apply_chat_template`, so that templates written for it
give the same text: sandboxed, block lines trimmed, `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, loop controls and the (here transparent) `generation` block.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

from jspec.errors import JspecError


def render(template: str, **variables: Any) -> str:
    """The text of `template`. JspecError when it is invalid or itself refuses the messages."""
    try:
        return _compile(template).render(**variables)
    except Exception as error:  # a template is a program of its author's
        raise JspecError(f"the chat template refuses these messages: {error}") from error


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
