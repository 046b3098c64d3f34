"""Prompt suites, metrics, paired statistics and reports: how edgespec measures its claims on a machine."""

# The fewest passes whose median excludes a disturbed pass; an interval needs as many.
LEAST_PASSES = 3

# The fewest passes of one prompt, and of several prompts together, that have a 95 % interval. Of five passes all are
# on one side of the median once in 16 times; with three of each of two prompts, equal arms differed once in 18.
LEAST_OF_ONE, LEAST_OF_ALL = 6, 9


def enough(prompts: int, passes: int) -> bool:
    """Whether that many passes of each prompt have a 95 % interval."""
    least = LEAST_OF_ONE if prompts == 1 else max(LEAST_PASSES, LEAST_OF_ALL / prompts)
    return passes >= least
