"""Layers of gdngen's own: not written yet."""

raise ImportError(
    "Layers of gdngen's own do not exist in gdngen yet (gdngen.layers); "
    "put operators into the layers of a model with gdngen.integrate.use_operators, or call those of gdngen.ops"
)
