"""One line out of the parser's many: which key, what was expected, what came, and the nearest valid word."""

import inspect
import re
from collections.abc import Iterable
from importlib import import_module

from reszoo.errors import nearest

_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"class_path '([^']+)'")
_NESTED = re.compile(r"NestedArg\(key='[^']*', val='([^']*)'\)")
_NOT_SAID = ("<class 'NoneType'>", "path but", "dot import path")
"""What the parser also takes, and a user never means."""
_GIVEN = re.compile(r"Given value: (.*)")
_TYPES = {
    "<class 'int'>": "an integer",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
}


def explain(message: str, known: Iterable[str]) -> str:
    """Shorten a message of the parser.

    Args:
        message: What jsonargparse said.
        known: Every option of the command, for the nearest one.

    Returns:
        One line.
    """
    text = " ".join(message.split())
    if match := re.search(r"unrecognized arguments: (\S+)", text):
        return _unknown(match[1].partition("=")[0], [f"--{key}" for key in known])
    if match := re.search(r"does not accept option '([^']+)'", text):
        return _unknown(match[1], known)
    if match := re.search(r"arguments are required: \w+\.(.+)", text):
        return f"the recipe names no {match[1]}; `reszoo recipes --show digits/resnet26` is an example"
    keys, classes = _KEY.findall(text), _CLASS.findall(text)
    if match := re.search(
        r"(?:Type .* expects a function or a callable class: )?Option '([^']+)' is not accepted", text
    ):
        owner = _class_named_before(text[: match.start()], text[match.end() :], classes)
        where = ".".join(key for key in keys if key)
        return f"{where}: " + _unknown(match[1], _parameters(owner), f" of {owner}" if owner else "")
    if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", text):
        module = import_module(match[1])
        names = [name for name in dir(module) if callable(getattr(module, name)) and not name.startswith("_")]
        return f"{'.'.join(keys)}: {match[1]} has no {match[2]!r}{nearest(match[2], names)}"
    expected = re.findall(r"Expected an? (.*?)(?= - | Given value|\. Got value| Subtypes|$)", text)
    wanted = [_TYPES.get(e, e.replace("typing.Literal", "one of ")) for e in expected if not e.startswith(_NOT_SAID)]
    given = _NESTED.findall(text) or re.findall(r"Got value: (\S+)", text) or _GIVEN.findall(text)
    if expected and keys:
        plain = [word for word in wanted if word in _TYPES.values()] or wanted or ["a class_path with init_args"]
        return f"{'.'.join(keys)}: expected {plain[0]}, got {given[0] if given else 'something else'}"
    return text


def _unknown(word: str, known: Iterable[str], owner: str = "") -> str:
    known = list(known)
    hint = nearest(word, known, 1) or nearest(word.rpartition(".")[2], {k.rpartition(".")[2] for k in known}, 1)
    listed = f" (valid: {', '.join(known)})" if 0 < len(known) <= 20 else "; `--help` lists the valid ones"
    return f"unknown key {word!r}{owner}{hint or listed}"


def _class_named_before(before: str, after: str, classes: list[str]) -> str:
    """The class whose option was refused: the innermost named before it, or the value's own right behind it."""
    if match := re.match(r"\. Got value: Namespace\(class_path='([^']+)'", after):
        return match[1]
    named = _CLASS.findall(before)
    return named[-1] if named else (classes[-1] if classes else "")


def _parameters(class_path: str) -> list[str]:
    """The arguments that a class or function takes."""
    module, _, name = class_path.rpartition(".")
    try:
        return [key for key in inspect.signature(getattr(import_module(module), name)).parameters if key != "self"]
    except (ImportError, AttributeError, ValueError, TypeError):
        return []
