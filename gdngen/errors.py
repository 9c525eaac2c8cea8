"""One exception class per kind of mistake; every message says what, where, why and the next step."""

import contextlib
import os
from collections.abc import Iterator


class GdngenError(Exception):
    """Base of every error that gdngen raises on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 1


class SpecError(GdngenError, ValueError):
    """A Spec contradicts itself or names a member that does not exist."""

    exit_code = 2


class ArgumentError(GdngenError, ValueError):
    """A call passed an argument that the operator cannot take."""

    exit_code = 2


class PinError(GdngenError, ValueError):
    """A pinned plan decision cannot be honoured."""

    exit_code = 2


class GraphError(GdngenError):
    """A graph is malformed, or a pass changed what a graph computes."""


class PlanError(GdngenError):
    """No legal plan exists for a graph on a target."""


class PackageError(GdngenError):
    """A package on disk is missing, altered or cannot be written."""


class EnvironmentProblem(GdngenError):
    """Something outside gdngen (a GPU, a library, a folder) is not as needed."""

    exit_code = 3


class GdngenWarning(UserWarning):
    """Something is not as it should be and was worked around: results stay right."""


@contextlib.contextmanager
def naming(path: "str | os.PathLike[str]") -> Iterator[None]:
    """An OSError inside says which file it is about: one of a write, to a full disk, does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
