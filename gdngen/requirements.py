"""What gdngen and its packages are tested with; pyproject.toml says the same of gdngen, and a test compares them."""

TRITON = ("3.6.0", "3.9.0")  # the oldest and the newest: docs/versions.md
TRITON_BELOW = "3.10"
TORCH = "2.10"

# Of generated packages; CPU tensors need torch alone, and triton has no wheels for other systems.
RUNTIME = (f"torch>={TORCH}", f'triton>={TRITON[0]},<{TRITON_BELOW}; sys_platform == "linux"')
