"""Programs that ask a server for answers of a form, each with its own library."""
