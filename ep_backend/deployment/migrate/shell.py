"""Reads the commands of a shell text, as far as launching an engine needs: quotes, comments, continued lines, variables.

Nothing is run. What only a shell can know (`$(hostname)`, a variable that the text does not set) stays as it is written.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Stand for an expansion while words are split; no text that people write has them.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
# An array's words stand between NAME=ARRAY or NAME+=ARRAY and END.
ARRAY, END = "\ue002", "\ue003"
ARRAY_START = re.compile(rf"([A-Za-z_]\w*)(\+?)={ARRAY}")
ARRAY_IN_SHELL = re.compile(r"([A-Za-z_]\w*\+?=)\(")
ALL_OF_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
NAME = re.compile(r"\$([A-Za-z_]\w*)")
REDIRECTION = re.compile(r"(?:\d+|&)?>>?\s*(?:&\d+|[^\s;&|<>]+)|<(?![<(])\s*[^\s;&|<>]+")
# Blanks and a comment after the backslash would end the command; they stand in many recipes, and are meant to go on.
CONTINUATION = re.compile(r"\\[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
QUOTED_CONTINUATION = re.compile(r"\\\n")
HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)(\w+)\2")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>")
SEPARATORS = set(";&|()\n")
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")


class Unreadable(Exception):
    """The text is no shell command; says where it breaks."""


@dataclass(frozen=True)
class Command:
    """One simple command: its words, and the variables that are exported to it."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)


def commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """The simple commands of a text in their order. `variables`: known before it starts. Raises Unreadable."""
    known, exported, arrays = dict(variables or {}), dict[str, str](), dict[str, list[str]]()
    found: list[Command] = []
    for words in _split(text.replace("\r\n", "\n"), known, arrays):
        words = _without_arrays(words, arrays)
        while words and words[0] in ("exec", "nohup", "time", "then", "do", "else", "{"):
            words = words[1:]
        own: dict[str, str] = {}
        while words and (given := ASSIGNMENT.fullmatch(words[0])):
            own[given[1]] = given[2]
            words = words[1:]
        if not words:
            known |= own
            exported |= {name: value for name, value in own.items() if name in exported}
        elif words[0] in ("export", "declare", "local", "readonly"):
            for word in words[1:]:
                if given := ASSIGNMENT.fullmatch(word):
                    known[given[1]] = given[2]
                    if words[0] in ("export", "declare"):
                        exported[given[1]] = given[2]
                elif word in known:
                    exported[word] = known[word]
        elif shell := _shell_at(words):
            # What stands before the shell (srun, docker run) starts each of its commands.
            inner = commands(words[shell.stop - 1], known | own)
            found += [Command(words[: shell.start] + each.words, {**exported, **own, **each.env}) for each in inner]
        else:
            found.append(Command(words, {**exported, **own}))
    return found


def _without_arrays(words: list[str], arrays: dict[str, list[str]]) -> list[str]:
    """The words that are not of an array's assignment; those go to `arrays`."""
    kept: list[str] = []
    into = kept
    for word in words:
        if opened := ARRAY_START.fullmatch(word):
            into = [*arrays.get(opened[1], [])] if opened[2] else []
            arrays[opened[1]] = into
        elif word == END:
            into = kept
        else:
            into.append(word)
    return kept


def _shell_at(words: list[str]) -> slice | None:
    """Where `bash -c COMMANDS` stands."""
    for index, word in enumerate(words[:-2]):
        if word in SHELLS and re.fullmatch(r"-[a-z]*c", words[index + 1]):
            return slice(index, index + 3)
    return None


def integer(expression: str, variables: Mapping[str, str]) -> str | None:
    """The value of shell arithmetic over whole numbers and known variables, else None."""
    plain = re.sub(r"\$\{?(\w+)(?::?-\w*)?\}?", r"\1", expression).strip()
    try:
        return str(_evaluated(ast.parse(plain, mode="eval").body, variables))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def _evaluated(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(variables.get(name, "?"))
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _evaluated(left, variables), _evaluated(right, variables)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div() | ast.FloorDiv():
                    return a // b
                case ast.Mod():
                    return a % b
    raise ValueError("no arithmetic over whole numbers")


def _split(text: str, known: Mapping[str, str], arrays: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """The words of each simple command, with the variables that are known when its turn comes."""
    pieces, expansions = _scan(text)
    for line, piece in pieces:
        try:
            words = shlex.split(piece)
        except ValueError as error:
            raise Unreadable(f"line {line}: {str(error).lower()}; close it") from None
        if words:
            yield [each for word in words for each in _words_of(word, expansions, known, arrays)]


def _words_of(word: str, expansions: list[str], known: Mapping[str, str], arrays: Mapping[str, list[str]]) -> Iterator[str]:
    """The word, expanded; all of an array is a word an element."""
    if (mark := MARK.fullmatch(word)) and (whole := ALL_OF_ARRAY.fullmatch(expansions[int(mark[1])])) and whole[1] in arrays:
        yield from arrays[whole[1]]
    else:
        yield MARK.sub(lambda mark: _expanded(expansions[int(mark[1])], known), word)


def _expanded(raw: str, known: Mapping[str, str]) -> str:
    if raw.startswith("$(("):
        return integer(raw[3:-2], known) or raw
    if found := re.fullmatch(r"\$\{?([A-Za-z_]\w*)(?::?-([^}]*))?\}?", raw):
        return known.get(found[1], raw if found[2] is None else found[2])
    return raw


def _scan(text: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Simple commands with the lines they start on, expansions replaced by marks; and the expansions."""
    pieces: list[tuple[int, str]] = []
    expansions: list[str] = []
    piece, started, line, at, quote = "", 1, 1, 0, ""
    documents: list[re.Pattern[str]] = []
    in_array = False
    while at < len(text):
        char = text[at]
        if char == "\\" and quote == '"' and text[at + 1 : at + 2] in ("$", "`"):
            piece, at = piece + text[at + 1], at + 2
        elif char == "\\" and quote != "'":
            if continued := (QUOTED_CONTINUATION if quote else CONTINUATION).match(text, at):
                piece, at, line = f"{piece} " if not quote else piece, continued.end(), line + 1
            else:
                piece, at = piece + text[at : at + 2], at + 2
        elif char in "'\"" and quote in ("", char):
            quote, piece, at = "" if quote else char, piece + char, at + 1
        elif quote == "'":
            piece, at, line = piece + char, at + 1, line + (char == "\n")
        elif char in "$`" and (end := _expansion_end(text, at)) > at:
            piece += f"{OPEN}{len(expansions)}{CLOSE}"
            expansions.append(text[at:end])
            line, at = line + text.count("\n", at, end), end
        elif quote:
            piece, at, line = piece + char, at + 1, line + (char == "\n")
        elif char == "#" and (not piece or piece[-1].isspace()):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif document := HEREDOC.match(text, at):
            indent = r"\t*" if document[1] else ""
            documents.append(re.compile(rf"\n{indent}{document[3]}(?=\n|\Z)"))
            at = document.end()
        elif char == "\n" and documents:
            last = documents.pop(0).search(text, at)
            past = last.end() if last else len(text)
            line, at = line + text.count("\n", at, past), past
        elif in_array and char == "\n":
            piece, at, line = piece + " ", at + 1, line + 1
        elif in_array and char == ")":
            piece, at, in_array = f"{piece} {END}", at + 1, False
        elif (not piece or piece[-1].isspace()) and not in_array and (array := ARRAY_IN_SHELL.match(text, at)):
            piece, at, in_array = f"{piece}{array[1]}{ARRAY} ", array.end(), True
        elif placeholder := PLACEHOLDER.match(text, at):
            piece, at = piece + placeholder[0].replace(" ", "-"), placeholder.end()
        elif (not piece or not piece[-1].isalnum()) and (redirection := REDIRECTION.match(text, at)):
            at = redirection.end()
        elif char in SEPARATORS:
            pieces.append((started, piece))
            line, at = line + (char == "\n"), at + 1
            piece, started = "", line
        else:
            piece, at = piece + char, at + 1
    if quote:
        raise Unreadable(f"line {started}: a quotation that starts with {quote} is not closed; close it")
    if in_array:
        raise Unreadable(f"line {started}: an array is not closed; add )")
    return [*pieces, (started, piece)], expansions


def _expansion_end(text: str, at: int) -> int:
    """Where an expansion that starts here ends; `at` if none does. Raises Unreadable if it never ends."""
    line = text.count("\n", 0, at) + 1
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise Unreadable(f"line {line}: a ` is not closed; close it")
        return end + 1
    if name := NAME.match(text, at):
        return name.end()
    opening = text[at + 1 : at + 2]
    if opening not in ("(", "{"):
        return at
    depth, closing = 0, {"(": ")", "{": "}"}[opening]
    for end in range(at + 1, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return end + 1
    raise Unreadable(f"line {line}: {text[at : at + 2]} is not closed; add {closing}")
