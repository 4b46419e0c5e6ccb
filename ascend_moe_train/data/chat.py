"""Instruction data: one conversation per JSONL line, checked before anything is made of it. Pure.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Roles are system (first or not at all), user, assistant, tool. Further keys of a message (`tool_calls`, `name`,
`reasoning_content`) and `tools` of the line are given to the chat template as they are.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ascend_moe_train.config_error import nearest
from ascend_moe_train.data.chat_worker import CLOSING, OPENING
from ascend_moe_train.data.sources import record_field
from ascend_moe_train.errors import DataError

# Which roles may follow which; None is the start.
FOLLOWING: Mapping[str | None, tuple[str, ...]] = MappingProxyType(
    {
        None: ("system", "user"),
        "system": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("tool", "assistant"),
    }
)
ROLES = tuple(role for role in FOLLOWING if role is not None)


def conversation_text(record: Mapping[str, Any], field: str, where: str) -> str:
    """The conversation of a JSONL line as canonical JSON of `messages` and `tools`. Raises DataError after `where`."""
    messages = record_field(record, field, where)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field {field!r} is no list of messages, or an empty one")
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        before = _check_message(message, before, f"{where}: message {number}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the assistant, so there is nothing to learn")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is of type {type(tools).__name__}, a list is needed")
    for text in _strings([messages, tools]):
        _check_characters(text, where)
    return json.dumps({"messages": messages, "tools": tools})


def check_special_tokens(conversation: Mapping[str, Any], tokens: frozenset[str], where: str) -> None:
    """Refuse a conversation that spells a special token, with which a message could end itself or begin another.

    Raises DataError after `where`.
    """
    for text in _strings(conversation["messages"]):
        for token in tokens:
            if token in text:
                raise DataError(f"{where}: a message spells the special token {token!r}: spell it differently")


def _check_message(message: object, before: str | None, where: str) -> str:
    """Returns the role."""
    if not isinstance(message, dict):
        raise DataError(f"{where} is a JSON {type(message).__name__}, an object with role and content is needed")
    role = message.get("role")
    if "role" not in message or not isinstance(role, str):
        raise DataError(f"{where} has no role, one of {', '.join(ROLES)} is needed")
    if role not in ROLES:
        close = nearest(role, ROLES)
        hint = f" (did you mean {close!r}?)" if close else ""
        raise DataError(f"{where} has the role {role[:40]!r}, known are {', '.join(ROLES)}{hint}")
    if role not in FOLLOWING[before]:
        after = "at the start" if before is None else f"after {before}"
        raise DataError(f"{where}: {role} {after} is not possible, allowed: {', '.join(FOLLOWING[before])}")
    content = message.get("content")
    if role == "assistant" and message.get("tool_calls") and content in (None, ""):
        return role
    if not isinstance(content, str):
        kind = "no content" if "content" not in message else f"content of type {type(content).__name__}"
        raise DataError(f"{where} has {kind}, text is needed")
    if not content.strip():
        raise DataError(f"{where}: the content is empty")
    return role


def _check_characters(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a message holds half a surrogate pair at character {error.start}") from error
    for character in (OPENING, CLOSING):
        if character in text:
            raise DataError(f"{where}: a message holds U+{ord(character):04X}, which is no character")


def _strings(value: object) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
