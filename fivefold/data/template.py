"""A tokenizer's chat template: messages as the text that its model was trained on.

Templates are programs of jinja2 that come with published tokenizers. They run in a sandbox, with
the functions, filters and settings that transformers gives them (`apply_chat_template`), but no
clock: the same conversation has the same tokens on every day.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fivefold.errors import DataError, Mistake
from fivefold.files import at_home, read_json

# Noncharacters of Unicode, which no text contains; they mark answers in a template's output.
BEGIN, END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
TOKENIZER_CONFIG = "tokenizer_config.json"
FILES = "chat_template.jinja", TOKENIZER_CONFIG
"""Where a template is, beside a tokenizer.json; the first one counts."""

Message = Mapping[str, Any]
Span = tuple[int, int]


class ChatTemplate:
    """Renders messages as text.

    Attributes:
        digest: SHA-256 of the templates and special tokens; equal ones make equal texts.
        origin: what messages call the template: the path of its file.
    """

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str], origin: str):
        """Compile `templates`, by name; `tokens` are special ones by name, such as bos_token.

        Raises:
            DataError: there is no template called default, or one is not of jinja2's language.
        """
        if _DEFAULT not in templates:
            raise DataError(
                f"{origin} has no chat template called {_DEFAULT!r}, only: "
                f"{', '.join(templates) or 'none'}"
            )
        self.origin = origin
        self.digest = hashlib.sha256(
            json.dumps([dict(templates), dict(tokens)], sort_keys=True).encode()
        ).hexdigest()
        environment = _environment(tokens)
        self._marks = {name for name, text in templates.items() if _GENERATION.search(text)}
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in templates.items()
            }
        except TemplateError as error:
            raise DataError(f"{origin} is not a template of jinja2: {error}") from error

    @classmethod
    def load(cls, tokenizer_model: str) -> "ChatTemplate":
        """The template beside a tokenizer.json, or in its folder: `chat_template.jinja`, else the
        one in `tokenizer_config.json`.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        folder = folder_of(tokenizer_model)
        own, config = (folder / name for name in FILES)
        try:
            said = read_json(config, dict[str, Any], DataError) if config.exists() else {}
            kept = own.read_text("utf-8") if own.exists() else said.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the chat template in {folder} cannot be read: {error}") from error
        if not kept:
            why = (
                f'looked for: {own}, and "chat_template" in {config}',
                "base models have none: take the files of the tokenizer of the model's chat "
                "version, or write chat_template.jinja",
            )
            what = f"the tokenizer in {folder} has no chat template, which --sft needs"
            raise DataError(Mistake(what, why))
        origin = str(own if own.exists() else config)
        return cls(_by_name(kept, origin), _special_tokens(said), origin)

    def marks(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template itself marks which tokens are the assistant's."""
        return self._name(tools) in self._marks

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        place: str,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text of messages, and which characters of it the template says are the assistant's.

        Args:
            messages: each with its role and what else the template reads.
            tools: descriptions of functions that the assistant may call.
            place: what an error calls the messages: the line of their file.
            prompt: whether the beginning of an answer follows the messages.

        Raises:
            DataError: the template refuses the messages, or fails.
        """
        template = self._templates[self._name(tools)]
        try:
            said = template.render(messages=messages, tools=tools, add_generation_prompt=prompt)
        except Exception as error:  # a program of others, on data of others: anything may happen
            raise DataError(
                f"{place}: the chat template in {self.origin} cannot be used for it: {error}"
            ) from error
        return _spans(said)

    def _name(self, tools: Sequence[Any] | None) -> str:
        has = tools is not None and _WITH_TOOLS in self._templates
        return _WITH_TOOLS if has else _DEFAULT


def folder_of(tokenizer_model: str) -> Path:
    """The folder of a tokenizer, given its tokenizer.json or the folder itself."""
    path = at_home(tokenizer_model, DataError)
    return path if path.is_dir() else path.parent


def _by_name(kept: Any, origin: str) -> dict[str, str]:
    """One template, or a list of {"name": ..., "template": ...}."""
    if isinstance(kept, str):
        return {_DEFAULT: kept}
    try:
        return {str(each["name"]): str(each["template"]) for each in kept}
    except (TypeError, KeyError) as error:
        raise DataError(f"{origin}: chat_template is neither a text nor named texts") from error


def _special_tokens(said: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a text, or an object with its content."""
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in said.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _environment(tokens: Mapping[str, str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {**tokens, "raise_exception": _refuse}
    return environment


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` around what the assistant says."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between, with a mark at either end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (BEGIN, END)
        )
        return [begin, *body, end]


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers writes it, without escapes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent} | options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _spans(said: str) -> tuple[str, list[Span]]:
    """The text without marks, and the ranges of characters between them."""
    first, *answers = said.split(BEGIN)
    text, spans = [first], []
    length = len(first)
    for answer in answers:
        inside, _, after = answer.partition(END)
        spans.append((length, length + len(inside)))
        text += (inside, after)
        length += len(inside) + len(after)
    return "".join(text), spans
