"""Templates: valid Python on disk, made into text by Jinja and laid out as ruff would."""

import re
import textwrap
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates"
WIDTH = 120


def read_template(name: str) -> str:
    """A template's text.  On disk it is valid Python: a value is put in where it says PUT_value_PUT."""
    return re.sub(r"PUT_([a-z][a-z_]*?)_PUT", r"{{ \1 }}", (TEMPLATES / name).read_text())


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Jinja with line statements behind ``#%`` and an error for every undefined name."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="#%",
        keep_trailing_newline=True,
        autoescape=False,
    )


@lru_cache(maxsize=8)
def tiles(name: str) -> ModuleType:
    """The macros of templates/tiles/<name>.py."""
    return environment().get_template(f"tiles/{name}.py").module  # type: ignore[return-value]


def render(template: str, /, **context: object) -> str:
    """A rendered template, laid out: long statements wrapped, two blank lines around top-level definitions."""
    lines = environment().get_template(template).render(**context).rstrip("\n").split("\n")
    return "\n".join(spaced([piece for line in lines for piece in wrapped(line)])) + "\n"


def folded(label: str, text: str) -> str:
    """A labelled line of a docstring, continued on indented lines where it is too long."""
    return textwrap.fill(label + text, WIDTH, subsequent_indent=" " * len(label), break_on_hyphens=False)


def spaced(lines: list[str]) -> list[str]:
    """Two blank lines before a top-level definition and after one, as line statements swallow blank lines."""
    found: list[str] = []
    last, decorated = "", False
    for line in lines:
        top = line[:1].isalpha() or line[:1] == "@"
        opens = line.startswith(("@", "def ", "class ")) and not decorated
        decorated = line.startswith("@") or (decorated and not line.startswith(("def ", "class ")))
        if top and last and (opens or (last.startswith(" ") and not line.startswith(("def ", "class ")))):
            while found and not found[-1]:
                found.pop()
            found += ["", ""]
        found.append(line)
        last = line or last
    return found


def wrapped(line: str) -> list[str]:
    """A statement that is too long, split inside its first call: arguments on one line if they fit, else one each.
    Inside of brackets that only group, terms or factors take the place of arguments.

    Where all but the arguments of a method called on that (``tl.load(...).to(DOT)``) fits, it is split there instead.
    """
    opening = line.find("(")
    if len(line) <= WIDTH or opening < 0 or line.lstrip().startswith(("#", '"')):
        return [line]
    closing = _closing(line, opening)
    method = line.rfind("(", closing)
    if 0 < method < WIDTH:
        opening, closing = method, _closing(line, method)
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    inner = line[opening + 1 : closing]
    body = [indent + inner]
    if len(indent + inner) > WIDTH:
        is_call = re.search(r"[\w)\]]$", line[:opening])
        body = [f"{indent}{part}," for part in _arguments(inner)] if is_call else [indent + x for x in _terms(inner)]
    return [line[: opening + 1], *body, indent[4:] + line[closing:]]


def _closing(line: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if depth == 0:
            return position
    return len(line)


def _arguments(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    return [part.removeprefix(",").strip() for part in _split(text, (",",))]


def _terms(text: str) -> list[str]:
    """Split before the operators that bind least, each at the start of its line."""
    for operators in ((" | ",), (" & ",), (" + ", " - "), (" * ", " / ")):
        parts = _split(text, operators)
        if len(parts) > 1:
            return [part.strip() for part in parts]
    return [text]


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split before separators outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth == 0 and text.startswith(separators, position):
            parts.append(text[start:position])
            start = position
    return [*parts, text[start:]]
