"""Suites of prompts, metrics, paired statistics and reports: how edgespec checks its claims on a machine."""
