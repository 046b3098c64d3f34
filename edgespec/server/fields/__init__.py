"""The fields of requests, a module of rows for each family of APIs."""
