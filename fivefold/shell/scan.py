"""Tokens of a bash script: words as they are written, operators, ends of lines."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from fivefold.errors import ConfigError

_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|&>>|&>|<<<|<<-|<<|>>|>&|<&|>\||<>|[;&|()<>]")
_ARRAY = re.compile(r"\w+(\[[^]]*\])?\+?=\(")
_BEFORE_COMMANDS = {
    *("if", "then", "else", "elif", "while", "until", "do", "for", "{", "!", "time"),
    *(";", "&", "&&", "||", "|", "|&", "(", ")", "\n", ";;", ""),
}
REDIRECTIONS = {"<", ">", ">>", ">&", "<&", ">|", "<>", "&>", "&>>", "<<", "<<-", "<<<"}


class Token(NamedTuple):
    """A piece of a script.

    Attributes:
        kind: "word", "operator", "test" (between [[ and ]]), "sum" (between (( and ))), "document"
            or "quoted document" (in which nothing is expanded).
        text: as it is written; of tests and sums what is between.
    """

    kind: str
    text: str


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a script, without comments; here-documents stand where they are named.

    Raises:
        ConfigError: a quotation, or something in parentheses, does not end.
    """
    place, before, after_line = 0, "", 0
    while place < len(text):
        if text[place] in " \t\r" or text.startswith("\\\n", place):
            place += 1 if text[place] != "\\" else 2
            continue
        if text[place] == "#":
            place = _until(text, place, "\n")
            continue
        token, end = _token(text, place, before)
        if token.text == "\n":
            end = max(end, after_line)
        if before in ("<<", "<<-"):
            begin = max(_until(text, end, "\n") + 1, after_line)
            token, after_line = _document(text, begin, token.text)
        numbered = token.kind == "word" and token.text.isdecimal() and text[end : end + 1] in "<>"
        if not (numbered and end < len(text)):  # the number of a file before its redirection
            yield token
            before = token.text if token.kind in ("word", "operator") else ""
        place = end


def _token(text: str, place: int, before: str) -> tuple[Token, int]:
    if text[place] == "\n":
        return Token("operator", "\n"), place + 1
    if before in _BEFORE_COMMANDS:
        if text.startswith("((", place):
            end = closing(text, place + 1, ")")
            return Token("sum", text[place + 2 : end]), end + 2
        if re.match(r"\[\[\s", text[place : place + 3]):
            end = _end_of_test(text, place + 2)
            return Token("test", text[place + 2 : end]), end + 2
    operator = _OPERATOR.match(text, place)
    if operator and not (before in REDIRECTIONS and text[place : place + 2] in ("<(", ">(")):
        return Token("operator", operator[0]), operator.end()
    end = end_of_word(text, place)
    return Token("word", text[place:end]), end


def end_of_word(text: str, place: int, ends: str = " \t\r\n;&|<>()") -> int:
    """The end of the word that begins at a place."""
    if array := _ARRAY.match(text, place):
        return closing(text, array.end() - 1, ")") + 1
    if text[place : place + 2] in ("<(", ">("):
        return closing(text, place + 1, ")") + 1
    while place < len(text) and text[place] not in ends:
        place = after_piece(text, place)
    return place


def after_piece(text: str, place: int) -> int:
    """The place after a character, or after the quotation or expansion that it begins."""
    letter = text[place]
    if letter == "\\":
        return place + 2
    if letter == "'":
        return _until(text, place + 1, "'") + 1
    if letter == "`":
        return closing(text, place, "`") + 1
    if letter == '"':
        return closing(text, place, '"') + 1
    if letter == "$" and text[place + 1 : place + 2] in ("(", "{"):
        return closing(text, place + 1, ")" if text[place + 1] == "(" else "}") + 1
    return place + 1


def closing(text: str, place: int, mark: str) -> int:
    """The place of the mark that closes what begins at a place, outside quotations and parentheses
    within."""
    opening, here = text[place], place + 1
    while here < len(text):
        if text[here] == mark:
            return here
        if text[here] == opening and opening in "({":
            here = closing(text, here, mark) + 1
        elif mark in '"`' and text[here] == "'":
            here += 1
        elif mark == ")" and text[here] == "#" and text[here - 1] in " \t\n(":
            here = _until(text, here, "\n")
        else:
            here = after_piece(text, here)
    line = text.count("\n", 0, place) + 1
    raise ConfigError(f"this is no command that a shell reads: {opening} of line {line} has no end")


def _until(text: str, place: int, mark: str) -> int:
    found = text.find(mark, place)
    if found < 0 and mark == "'":
        line = text.count("\n", 0, place) + 1
        raise ConfigError(f"this is no command that a shell reads: ' of line {line} has no end")
    return len(text) if found < 0 else found


def _end_of_test(text: str, place: int) -> int:
    while place < len(text):
        if text.startswith("]]", place) and text[place - 1].isspace():
            return place
        place = after_piece(text, place)
    raise ConfigError("this is no command that a shell reads: [[ has no end")


def _document(text: str, begin: int, named: str) -> tuple[Token, int]:
    """The here-document that begins at a place, and the place after it."""
    ending = re.sub(r"[\\'\"]", "", named)
    kind = "document" if ending == named else "quoted document"
    place = begin
    while place < len(text):
        start, end = place, _until(text, place, "\n")
        place = end + 1
        if text[start:end].strip("\t\r ") == ending:
            return Token(kind, text[begin:start]), place
    return Token(kind, text[begin:]), place
