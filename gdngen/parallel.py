"""Context parallelism, one sequence over several GPUs: not written yet."""

raise ImportError(
    "Context parallelism, one sequence over several GPUs, does not exist in gdngen yet (gdngen.parallel); "
    "split the batch or the heads: operators of gdngen.ops work on whole sequences of any subset of heads"
)
