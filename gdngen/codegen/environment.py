"""Templates: valid Python on disk, made into text by Jinja."""

import re
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates"


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
