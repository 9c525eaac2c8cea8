"""One Triton kernel per file."""
