"""The Spec that this package was generated from."""

from typing import Any

NAME = PUT_name_PUT
BUILD_COMMAND = PUT_command_PUT
DIFFERENTIABLE = PUT_differentiable_PUT  # whether there are backward kernels
SPEC: dict[str, Any] = {
#% for row in rows
PUT_row_PUT
#% endfor
}
#% if missing
MISSING = {
#% for row in missing
PUT_row_PUT
#% endfor
}
#% else
MISSING: dict[str, str] = {}
#% endif
