"""Reads conversations, and says which characters of each the assistant wrote.

Records are JSON lines or rows of Parquet, of one of these forms:

    {"messages": [{"role": "user", "content": "..."}, ...]}         OpenAI, transformers, TRL
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"prompt": "...", "completion": "..."}                           or lists of messages

beside which `tools` (a list, or its JSON as text) and `system` (a text that comes first) are read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivefold.data.corpus import records
from fivefold.data.paths import JSON_SUFFIXES, TABLE_SUFFIXES, kind
from fivefold.data.template import BEGIN, END, ChatTemplate, Message, Span
from fivefold.errors import DataError, Mistake, did_you_mean, json_kind
from fivefold.files import parse_json

_FORMS = "messages | conversations | prompt and completion"
_KEYS = frozenset({"messages", "conversations", "prompt", "completion", "tools", "system"})
_SUFFIXES = JSON_SUFFIXES | TABLE_SUFFIXES
# Who speaks in ShareGPT's files, as templates call it.
_SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
        "system": "system",
        **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    }
)
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Conversation:
    """Messages; the model learns those of the assistant.

    Attributes:
        messages: each with a role.
        tools: functions that the assistant may call; None: none.
        given: how many messages at the beginning are given, and never learnt.
        place: its file and line.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None
    given: int
    place: str

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are learnt."""
        every = enumerate(self.messages)
        return [at for at, each in every if at >= self.given and each["role"] == "assistant"]


def check_conversations(files: Iterable[Path]) -> None:
    """Raise DataError if a file's name shows that it cannot hold conversations."""
    for file in files:
        if kind(file) not in _SUFFIXES:
            what = f"{file} cannot hold conversations, which --sft trains on"
            why = f"what can: {' '.join(sorted(_SUFFIXES))}, with {_FORMS}"
            raise DataError(Mistake(what, (why,), ("--no-sft to train on its text",)))


def marked_texts(files: Iterable[Path], template: ChatTemplate) -> Iterator[tuple[str, list[Span]]]:
    """The text of each document, and which characters of it are learnt.

    Raises:
        DataError: a record is no conversation, or the template refuses it; the error names the
            file and line.
    """
    for file in files:
        for place, record in records(file, _KEYS):
            yield from documents(conversation(record, place), template)


def documents(talk: Conversation, template: ChatTemplate) -> Iterator[tuple[str, list[Span]]]:
    """The texts that a conversation becomes, each with the characters that are learnt.

    Where the template marks what is generated, that is learnt. Else an answer is what the text of
    the messages up to and with it has beyond the prompt that asks for it, which the model would be
    given. One text holds all answers if each of those is its beginning. Templates that show earlier
    answers otherwise than the last one (without their thoughts: Qwen3) make a text of each answer,
    with what the model would have seen.
    """
    answers = sum(each["role"] == "assistant" for each in talk.messages)
    if template.marks(talk.tools) and len(talk.answers) == answers:
        text, spans = template.render(talk.messages, talk.tools, talk.place)
        if not spans:
            raise DataError(
                f"{talk.place}: the chat template in {template.origin} puts no {{% generation %}} "
                "around any of its answers"
            )
        yield text, spans
        return
    turns = []
    for at in talk.answers:
        before, _ = template.render(talk.messages[:at], talk.tools, talk.place, prompt=True)
        through, _ = template.render(talk.messages[: at + 1], talk.tools, talk.place)
        if not through.startswith(before):
            what = (
                f"{talk.place}: where the answer begins cannot be told: with message {at + 1} the "
                f"chat template in {template.origin} changes the text before it"
            )
            marks = "{% generation %} and {% endgeneration %} around answers in the template"
            raise DataError(Mistake(what, works=(marks,)))
        turns.append((through, (len(before), len(through))))
    whole, _ = template.render(talk.messages, talk.tools, talk.place)
    if all(whole.startswith(through) for through, _ in turns):
        yield whole, [span for _, span in turns]
    else:
        yield from ((through, [span]) for through, span in turns)


def conversation(record: Mapping[str, Any], place: str) -> Conversation:
    """Parse a record of any of the forms.

    Raises:
        DataError: it is of none, or has nothing to learn.
    """
    tools = record.get("tools")
    if isinstance(tools, str):  # columns of tables cannot hold schemas that differ
        tools = parse_json(tools, Any, f"{place}: 'tools'", DataError)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: 'tools' is {json_kind(tools)}, not a list")
    given = 0
    if "messages" in record:
        messages = _messages(record["messages"], place, "messages")
    elif "conversations" in record:
        messages = _messages(record["conversations"], place, "conversations")
    elif "prompt" in record and "completion" in record:
        asked = _messages(record["prompt"], place, "prompt", "user")
        messages = asked + _messages(record["completion"], place, "completion", "assistant")
        given = len(asked)
    else:
        what = f"{place} is no conversation: its keys are {', '.join(record) or 'none'}"
        works = ("--no-sft --text-key KEY to train on the text of a key",)
        raise DataError(Mistake(what, (f"what --sft reads: {_FORMS}",), works))
    if system := record.get("system"):
        if not isinstance(system, str):
            raise DataError(f"{place}: 'system' is {json_kind(system)}, not a text")
        messages, given = [{"role": "system", "content": system}, *messages], given + 1
    if any(mark in json.dumps([messages, tools], ensure_ascii=False) for mark in (BEGIN, END)):
        raise DataError(f"{place} has a noncharacter of Unicode, U+FDD0 or U+FDD1")
    found = Conversation(tuple(messages), tools, given, place)
    if not found.answers:
        roles = ", ".join(each["role"] for each in messages) or "none"
        raise DataError(f"{place} has no answer to learn: roles are {roles}")
    return found


def _messages(value: Any, place: str, key: str, role: str | None = None) -> list[dict[str, Any]]:
    """Messages from a list, or from a text whose author is `role`."""
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{place}: {key!r} is {json_kind(value)}, not a list of messages")
    return [_message(each, f"{place}: {key}[{number}]") for number, each in enumerate(value)]


def _message(each: Any, where: str) -> dict[str, Any]:
    if not isinstance(each, dict):
        raise DataError(f"{where} is {json_kind(each)}, not an object")
    # Rows of Parquet have every field that any row has.
    message = {name: value for name, value in each.items() if value is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            near = did_you_mean(str(speaker), _SPEAKERS)
            what = f"{where} is from {speaker!r}, an unknown role{near}"
            raise DataError(Mistake(what, (f"known: {', '.join(_SPEAKERS)}",)))
        message = {"role": _SPEAKERS[speaker], "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where} has no role; its keys are {', '.join(message) or 'none'}")
    if message.get("weight", 1) != 1:
        what = f"{where} has a weight of {message['weight']}: every answer is learnt alike"
        why = "what works: prompt and completion: only the completion is learnt"
        raise DataError(Mistake(what, (why,)))
    content = message.get("content")
    if not isinstance(content, str | list) and not message.get("tool_calls"):
        kind = "missing" if content is None else json_kind(content)
        raise DataError(f"{where}: its content is {kind}; it has to be a text")
    # As in transformers: templates of later models read one name, those of gpt-oss another.
    thought = next((message[name] for name in _THOUGHTS if name in message), None)
    if thought is not None:
        message = {"thinking": thought, **message, "reasoning_content": thought}
    return message
