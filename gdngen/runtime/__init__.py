"""What runs when an operator is called: its public functions, the checks of its arguments, and who computes it.

``operators.py``, ``arguments.py``, ``composed.py``, ``keywords.py`` and ``compilers.py`` are copied into every
generated package as they are, so they import nothing of gdngen.
"""
