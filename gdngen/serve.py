"""Paged states for serving engines: not written yet."""

raise ImportError(
    "Paged states for serving engines do not exist in gdngen yet (gdngen.serve); "
    "hand states from call to call as initial_state and final_state; one call takes many sequences (cu_seqlens)"
)
