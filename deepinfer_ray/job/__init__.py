"""The batch application: rows of a data set in, one output row each, exactly once."""
