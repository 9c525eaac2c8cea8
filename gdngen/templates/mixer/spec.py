"""What this package was generated for.

INPUTS are tensors, in the order of the registered ops; h0 may be None, the others are there.
"""

NAME = PUT_name_PUT
SPEC = PUT_spec_PUT
INPUTS = PUT_inputs_PUT
OUTPUTS = PUT_outputs_PUT
