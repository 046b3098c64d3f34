"""Prompt suites, metrics, paired statistics and reports: how edgespec measures its claims on a machine."""
