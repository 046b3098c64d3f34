"""Prompt suites, metrics, paired statistics and reports: how edgespec measures its claims on a machine."""

# The fewest passes whose median excludes a disturbed pass; an interval needs as many.
LEAST_PASSES = 3
