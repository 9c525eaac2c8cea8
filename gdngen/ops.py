"""The operators, with the package each call needs built and loaded on first use.

The Spec is derived from the call: gates given, shapes, options.  A generated package has the same functions for the one
member it was made for, without the compiler.  LAUNCHES counts kernel launches by kernel name over all packages so far.
"""

from gdngen.mixer.operators import *  # noqa: F403
from gdngen.mixer.operators import __all__ as _mixer
from gdngen.runtime.arguments import ArgumentError
from gdngen.runtime.dispatch import LAUNCHES
from gdngen.runtime.keywords import KeywordError
from gdngen.runtime.operators import *  # noqa: F403
from gdngen.runtime.operators import __all__ as _operators

__all__ = ["LAUNCHES", "ArgumentError", "KeywordError", *_operators, *_mixer]
