"""Caches of beginnings that conversations share, kept on disk."""
