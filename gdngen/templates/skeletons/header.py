"""Kernel PUT_kernel_PUT of PUT_package_PUT.

PUT_spec_PUT
Plan: PUT_plan_PUT
Body: PUT_digest_PUT
"""

import triton
import triton.language as tl

#% if helpers
from ..device import (
    #% for helper in helpers
    PUT_helper_PUT,
    #% endfor
)

#% endif
#% if varying
VARYING = [
    #% for name in varying
    PUT_name_PUT,
    #% endfor
]
#% endif
