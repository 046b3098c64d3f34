"""Answers that are bound to a form: a JSON schema, a regular expression, a grammar, or one of several texts."""
