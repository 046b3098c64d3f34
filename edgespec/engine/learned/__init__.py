"""Texts and answers that a drafter copies from."""
