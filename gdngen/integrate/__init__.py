"""Model libraries: each module here puts a package's operators into the layers of one of them."""

from gdngen.integrate.transformers import pytorch_operators, remove_operators, use_operators

__all__ = ["pytorch_operators", "remove_operators", "use_operators"]
